"""Flags of llama.cpp, vLLM, SGLang and mlx-lm: another spelling of an option here, or a sentence about what to give instead."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import click

from auraflux.cli.options.renamed import notice

# the parameter's name here, and the other engines' flags
SAME = {
    "model": "-m --model --model-path --hf-repo -hf -hfr",
    "context": "-c --ctx-size --max-model-len --context-length --context-size --num-ctx --max-kv-size --max-seq-len",
    "max_tokens": "--n-predict --predict --num-predict --max-new-tokens --max-completion-tokens",
    "temperature": "--temp",
    "repetition_penalty": "--repeat-penalty",
    "seed": "-s",
    "system": "-sys --system-prompt",
    "device": "--device",
    "kv": "--kv-cache",
    "speculate": "-md --model-draft --draft-model --speculative-model --speculative-draft-model-path",
    "name": "-a --alias --served-model-name",
    "max_sequences": "-np --max-num-seqs --max-running-requests --num-parallel",
    "max_queue": "--max-queued-requests",
    "origins": "--allowed-origins",
    "clients": "--max-concurrency --num-clients",
    "requests": "--num-prompts --num-requests",
    "rate": "--request-rate",
    "prompt_tokens": "--input-len --random-input-len",
    "tokens": "--output-len --random-output-len",
    "url": "--base-url",
    "group": "--q-group-size",
}
# the sentence, and the other engines' flags
INSTEAD = {
    "A GPU is used where there is one, with as many experts as fit: --gpu-memory 8GB limits it, --device cpu uses none.": (
        "-ngl --gpu-layers --n-gpu-layers --num-gpu --num-gpu-layers"
    ),
    "Give a size: --gpu-memory 8GB, or --cache-memory 4GB for the KV cache of a server.": (
        "--gpu-memory-utilization --mem-fraction-static"
    ),
    "Experts that do not fit stay in host memory: --gpu-memory 8GB limits the GPU, --expert-memory 4GB the expert cache.": (
        "-ncmoe --n-cpu-moe -cmoe --cpu-moe -ot --override-tensor --cpu-offload-gb"
    ),
    "Give the bits of keys and values: --kv k8v8, k8v4 or k4v4, or --kv none for full precision.": (
        "-ctk --cache-type-k -ctv --cache-type-v --kv-cache-dtype --kv-bits --kv-group-size"
    ),
    "CPU kernels use one thread per core; the environment variable NUMBA_NUM_THREADS=4 sets another number.": (
        "--threads -tb --threads-batch --num-threads --cpu-threads"
    ),
    "Give --parallel tensor=2.": "-tp --tp --tp-size --tensor-parallel-size",
    "Give --parallel pipeline=2.": "-pp --pp --pp-size --pipeline-parallel-size",
    "Give --parallel experts=2.": "-ep --ep-size --enable-expert-parallel",
    "Give --parallel context=2.": "-dcp --decode-context-parallel-size",
    "Copies of a model are 'auraflux serve --ray --replicas N'.": "-dp --dp-size --data-parallel-size",
    "Give --no-graph.": "--enforce-eager --disable-cuda-graph",
    "It is always on: leave the flag out.": (
        "--enable-prefix-caching --enable-chunked-prefill -cb --cont-batching --jinja -fa --flash-attn --no-display-prompt "
        "--metrics --enable-metrics"
    ),
    "It cannot be turned off: leave the flag out.": (
        "--no-enable-prefix-caching --disable-radix-cache --no-warmup --no-cont-batching --no-mmap --mlock"
    ),
    "Prefill is chunked by itself, and --max-sequences limits a batch: leave the flag out.": (
        "-b --batch-size -ub --ubatch-size --max-num-batched-tokens --chunked-prefill-size --max-prefill-tokens"
    ),
    "Weights keep the checkpoint's format, which is detected: --quantize 4 quantizes dense ones.": (
        "--dtype --quantization -q --load-format"
    ),
    "No code of a model is run: leave the flag out.": "--trust-remote-code",
    "A prompt may come from stdin: --prompt - < FILE.": "-f --file",
    "'auraflux generate -p TEXT' answers one prompt.": "-p --prompt",
    "'auraflux chat' is the interactive command.": "-i --interactive -cnv --conversation",
    "The tokenizer and the chat template are those of the model's folder or file.": (
        "--tokenizer --tokenizer-mode --chat-template --chat-template-file"
    ),
    "They are chosen by the model's family: leave the flag out.": (
        "--reasoning-parser --tool-call-parser --enable-auto-tool-choice --reasoning-format"
    ),
    "Structured output is a field of a request to 'auraflux serve': response_format.": (
        "--grammar --grammar-file --json-schema --guided-decoding-backend"
    ),
    "The number of draft tokens follows the acceptance rate: --speculate ngram, mtp or a smaller model is enough.": (
        "--draft --draft-max --draft-min --num-speculative-tokens --speculative-num-draft-tokens --speculative-config"
    ),
    "Set the environment variable HF_HOME to the folder of downloads.": "--download-dir --cache-dir",
    "The prefix cache on disk is --prefix-disk 20GB of 'auraflux serve'.": "--prompt-cache",
    "LoRA adapters are not supported: merge the adapter into the model first.": "--lora --enable-lora --lora-paths",
    "An mmproj file in another folder than the model is not found: leave --mmproj out.": "--no-mmproj",
    "A prompt takes 64 images; audio is not supported.": "--limit-mm-per-prompt",
    "The model's own settings are used: leave the flag out.": (
        "--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --hf-overrides"
    ),
    "Put a proxy with TLS before the server; --allow-host names it.": (
        "--ssl-keyfile --ssl-certfile --ssl-key-file --ssl-cert-file"
    ),
    "Models with generated text only run: there is no pooling.": "--embedding --embeddings --reranking --task",
}
PEER_FLAGS: dict[str, str] = {flag: name for name, flags in SAME.items() for flag in flags.split()}
PEER_FLAGS |= {flag: sentence for sentence, flags in INSTEAD.items() for flag in flags.split()}
FLAG = re.compile(r"--[a-z-]+")


class PeerFlag(click.Option):
    """A hidden option that fills one of ours, or refuses with a sentence.

    target   the parameter it fills; None to refuse
    instead  the sentence, then
    """

    def __init__(self, flag: str, target: click.Parameter | None):
        self.target, self.instead = target, PEER_FLAGS[flag]
        is_flag = target is None or bool(getattr(target, "is_flag", False))
        repeats = isinstance(target, click.Option) and target.multiple
        name = f"peer{flag.replace('-', '_')}"
        super().__init__([flag, name], is_flag=is_flag, multiple=repeats, is_eager=True, expose_value=False, hidden=True)

    def handle_parse_result(self, ctx: click.Context, opts: Mapping[str, Any], args: list[str]) -> tuple[Any, list[str]]:
        if self.name not in opts or ctx.resilient_parsing:
            return None, args
        if self.target is None:
            raise click.UsageError(f"There is no {self.opts[0]} here. {self.instead}", ctx)
        option = isinstance(self.target, click.Option)
        notice(ctx, self.opts[0], self.target.opts[0] if option else "MODEL", verb="means")
        # parameters that are not eager are processed later, from the same mapping; a missing argument is in it
        assert isinstance(opts, dict)
        name, given = str(self.target.name), opts.pop(self.name)
        opts[name] = opts.get(name, given) if option else given
        return None, args


def peer_flags(params: Sequence[click.Parameter]) -> list[PeerFlag]:
    """Return the flags of other engines that mean something to a command with these parameters."""
    names = {str(param.name): param for param in params}
    own = {flag for param in params for flag in (*param.opts, *param.secondary_opts)}
    found = []
    for flag, meaning in PEER_FLAGS.items():
        if flag in own:
            continue
        if meaning in SAME:
            if meaning in names:
                found.append(PeerFlag(flag, names[meaning]))
        # a sentence that advises an option needs a command that has it; the others one that loads a model
        elif ((advised := FLAG.search(meaning)) is None and "--kv" in own) or (advised is not None and advised[0] in own):
            found.append(PeerFlag(flag, None))
    return found
