"""Qwen4 (hyper-connections, block-sparse attention, n-gram embeddings on disk) against transformers."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

import auraflux
from auraflux.cache import CacheSettings
from auraflux.cli import main
from auraflux.engine.engine import Engine
from auraflux.errors import FormatError, SettingsError
from auraflux.models import family
from auraflux.models.ngram_rows import Grams, _is_prime, offsets
from auraflux.models.qwen4_exp import Config
from auraflux.ops.simd.isa import ISA
from auraflux.quant import quantize
from auraflux.weights import memory_plan
from auraflux.weights.convert.mlx_folder import convert
from auraflux.weights.convert.pack import pack
from auraflux.weights.formats.checkpoint import open_checkpoint
from auraflux.weights.loader import Weights
from auraflux.weights.memory_plan import plan_memory
from tests.models.oracles import agreement, error, logits, prefill, save, tokens, transformers_logits

DELTA, ATTENTION = "linear_attention", "indexed_attention"
SMALL: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "layer_types": [DELTA, DELTA, ATTENTION, DELTA],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 32,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "hc_count": 3,
    "hc_lowrank": 32,
    "ple_layer_ids": [2, 4],
    "ple_embed_dim": 64,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 211,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 3,
    "indexer_n_heads": 12,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 20,
    "indexer_budget": 40,
    "indexer_compress_ratio": 5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "max_position_embeddings": 512,
    "eos_token_id": 7,
    "pad_token_id": 0,
    "bos_token_id": 1,
}


def qwen4(**changes: Any) -> Qwen4ExpForCausalLM:
    """Return a model in which indexers, n-gram embeddings and recurrent states all affect the logits."""
    torch.manual_seed(0)
    model = Qwen4ExpForCausalLM(Qwen4ExpTextConfig(**{**SMALL, **changes}))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if any(part in name for part in ("index_qk_proj", "ngram_embedding", "ple.conv1d", "block_inject_weight")):
                tensor.normal_(0, 0.3)
            elif name.endswith(("input_mix_weight_down.weight", "input_mix_weight_up.weight", "gate.weight")):
                tensor.normal_(0, 0.1)
            elif name.endswith("A_log"):
                tensor.uniform_(-1.5, 0.5)
            elif name.endswith("dt_bias"):
                tensor.uniform_(-4, 1)
    return model


MODELS: dict[str, Any] = {
    "qwen4_exp": qwen4,
    "sigmoid": lambda: qwen4(output_gate_type="sigmoid", hc_count=2),
    "no-ngrams": lambda: qwen4(ple_layer_ids=None),
    "long-ngrams": lambda: qwen4(ngram_size=5, heads_per_ngram=1, ple_conv_kernel_size=3, ple_layer_ids=[1]),
    "pairs": lambda: qwen4(ngram_size=2, heads_per_ngram=4, ple_conv_kernel_size=2, eos_token_id=[9, 7]),
    "one-block": lambda: qwen4(indexer_budget=8, indexer_compress_ratio=8),
    "all-blocks": lambda: qwen4(indexer_budget=500, indexer_compress_ratio=4, norm_topk_prob=False, tie_word_embeddings=True),
    "wide-blocks": lambda: qwen4(indexer_budget=64, indexer_compress_ratio=32, num_key_value_heads=6),
}
QUICK = {"qwen4_exp", "sigmoid"}


def tokens_with_eos(model: Any, count: int = 150) -> list[int]:
    """Return tokens with some EOS tokens, at which n-grams stop."""
    ids = tokens(model, count)
    ends = model.config.eos_token_id
    return [ends[0] if isinstance(ends, list) else ends if at % 17 == 11 else token for at, token in enumerate(ids)]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in MODELS])
def test_logits_match_transformers(name: str, tmp_path: Path):
    model = MODELS[name]()
    save(model, tmp_path)
    ids = tokens_with_eos(model)
    expected = transformers_logits(model, ids)
    for chunk in (512, 37, 1):
        assert error(logits(tmp_path, ids, chunk=chunk), expected) < 1e-5


def test_text_config_of_multimodal_models_is_loaded(tmp_path: Path):
    """Load a multimodal layout: nested names and settings are used, those of other towers are skipped."""
    model = qwen4()
    ids = tokens_with_eos(model, 40)
    save(model, tmp_path)
    expected, files = logits(tmp_path, ids), load_file(tmp_path / "model.safetensors")
    inner = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in files.items()}
    inner |= {"model.visual.patch_embed.proj.weight": torch.zeros(3), "mtp.fc.weight": torch.zeros(3)}
    save_file(inner, tmp_path / "model.safetensors")
    settings = json.loads((tmp_path / "config.json").read_text())
    kinds = ["full_attention" if kind == ATTENTION else kind for kind in settings["layer_types"]]
    outer = {"model_type": "qwen4_exp", "text_config": {**settings, "layer_types": kinds}, "eos_token_id": 3}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    found = logits(tmp_path, ids)
    assert torch.equal(found, expected)
    assert error(found, transformers_logits(model, ids)) < 1e-5


def test_quantized_kv_cache_is_accurate(tmp_path: Path):
    model = qwen4()
    ids = tokens_with_eos(model)
    save(model, tmp_path)
    expected = logits(tmp_path, ids)
    quantized_kv = logits(tmp_path, ids, kv="k8v8")
    # blocks are selected by unquantized keys
    assert error(quantized_kv, expected) < 0.02
    assert agreement(quantized_kv, expected) >= 0.98


def test_full_precision_window_is_refused(tmp_path: Path):
    folder = save(qwen4(), tmp_path)
    with pytest.raises(
        SettingsError, match="block-sparse attention has no full-precision window: leave out --sink-tokens and --recent-window"
    ):
        engine_of(folder, CacheSettings("k8v4", recent_window=4))


def engine_of(folder: Path, settings: CacheSettings | None = None, **options: Any) -> Engine:
    checkpoint = open_checkpoint(folder)
    module = family(checkpoint.config)
    config = module.Config.from_hf(checkpoint.config)
    weights = Weights(checkpoint, module.rename)
    model = module.Model(config, weights)
    weights.check_loaded()
    settings = settings or CacheSettings("none")
    return Engine(model, module.make_caches(config), settings, context=256, sequences=6, exact=True, **options)


def test_decode_is_exact_in_a_batch_after_fork_and_truncate(tmp_path: Path):
    """Check that n-grams continue across chunks, forks and truncation: the last tokens are part of the state."""
    model = qwen4()
    engine, ids = engine_of(save(model, tmp_path)), tokens_with_eos(model, 90)
    expected = engine.all_logits(engine.cache.open(), ids)
    long, short = engine.cache.open(), engine.cache.open()
    prefill(engine, long, ids[:61])
    prefill(engine, short, ids[:1])
    batch = engine.cache.batch([long, short])
    for at, token in enumerate(ids[61:75]):
        found = engine.decode(batch, [token, ids[1 + at]])
        assert torch.equal(found, expected[[61 + at, 1 + at]])
    other = long.fork()
    engine.all_logits(other, ids[::-1][:9])
    assert torch.equal(engine.all_logits(long, ids[75:]), expected[75:])
    recomputed = other.truncate(70)
    assert torch.equal(engine.all_logits(other, ids[70 - recomputed :])[recomputed:], expected[70:])
    image = long.snapshot()
    long.close()
    again = engine.cache.restore(image)
    assert torch.equal(engine.all_logits(again, ids[:3]), _after(engine, ids, ids[:3]))


def _after(engine: Engine, ids: list[int], more: list[int]) -> torch.Tensor:
    sequence = engine.cache.open()
    engine.all_logits(sequence, ids)
    return engine.all_logits(sequence, more)


def rewrite(folder: Path, files: dict[str, torch.Tensor], **changes: Any) -> None:
    save_file({name: tensor.contiguous() for name, tensor in files.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_selected_blocks_and_ngram_rows_change_the_logits(tmp_path: Path):
    """Check that more blocks and other n-gram rows change the logits, the former from the first affected token on."""
    model = qwen4()
    ids = tokens(model, 60)
    save(model, tmp_path)
    expected = logits(tmp_path, ids)
    files = load_file(tmp_path / "model.safetensors")
    rewrite(tmp_path, files, indexer_budget=500)
    # the ninth block is complete at the 45th token
    found = logits(tmp_path, ids)
    assert torch.equal(found[:44], expected[:44])
    assert error(found[44:], expected[44:]) > 0.003
    name = next(name for name in files if "ngram_embedding.shard_1" in name)
    rewrite(tmp_path, {**files, name: files[name].roll(1, 0)}, indexer_budget=40)
    assert error(logits(tmp_path, ids), expected) > 0.01


def test_ngrams_stop_at_the_eos_token(tmp_path: Path):
    """Check that tokens before EOS do not change the n-gram rows that are looked up."""
    model = qwen4()
    engine = engine_of(save(model, tmp_path))
    ngrams = engine.model.layers[1].ngrams
    seen: list[torch.Tensor] = []
    fetch = ngrams.table.fetch
    ngrams.table.fetch = lambda ids: (seen.append(ids.view(-1, ngrams.grams.count)), fetch(ids))[1]
    for prompt in ([7, 30, 31], [5, 7, 30, 31], [5, 6, 7, 30, 31], [30, 31]):
        engine.all_logits(engine.cache.open(), prompt)
    assert all(torch.equal(rows[-2:], seen[0][-2:]) for rows in seen)


@pytest.mark.parametrize("layout", ["one", "mlx", "buffers"])
def test_every_table_layout_is_loaded(layout: str, tmp_path: Path):
    """Load one tensor, quantized codes with scales, and a table without buffers that follow from the config."""
    model = qwen4()
    ids = tokens_with_eos(model, 40)
    save(model, tmp_path)
    expected, files = logits(tmp_path, ids), load_file(tmp_path / "model.safetensors")
    shards: dict[str, dict[int, torch.Tensor]] = {}
    for name in [name for name in files if ".shard_" in name]:
        stem, _, rest = name.partition(".shard_")
        shards.setdefault(stem, {})[int(rest.split(".")[0])] = files.pop(name)
    assert {len(parts) for parts in shards.values()} == {3}
    joined = {stem: torch.cat([parts[number] for number in sorted(parts)]) for stem, parts in shards.items()}
    if layout == "mlx":
        for stem, table in joined.items():
            codes = quantize(torch.nn.functional.pad(table, (0, 16)), 8, 32)
            assert codes.biases is not None
            files |= {f"{stem}.weight": codes.packed.view(torch.uint32), f"{stem}.scales": codes.scales}
            files[f"{stem}.biases"] = codes.biases
        # rows padded to twice the width
        for name in [name for name in files if name.endswith(("ple.key_proj.weight", "ple.value_proj.weight"))]:
            heads = files[name].unflatten(1, (4, 16))
            files[name] = torch.nn.functional.pad(heads, (0, 16)).flatten(1)
        rewrite(tmp_path, files, quantization={"bits": 8, "group_size": 32}, ple_embed_dim=128)
        # this format stores norm weights with 1 added
        for name in [name for name in files if "norm" in name and not name.endswith("linear_attn.norm.weight")]:
            files[name] = files[name] + 1
        for name in [name for name in files if name.endswith("linear_attn.conv1d.weight")]:
            files[name] = files[name].transpose(1, 2)
        rewrite(tmp_path, files)
        assert 0 < error(logits(tmp_path, ids), expected) < 0.01
        return
    files |= {f"{stem}.weight": table for stem, table in joined.items()}
    if layout == "buffers":
        files = {name: tensor for name, tensor in files.items() if not name.endswith(BUFFERS)}
    rewrite(tmp_path, files)
    assert torch.equal(logits(tmp_path, ids), expected)


BUFFERS = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")


def test_experts_are_packed_and_tables_converted(tmp_path: Path):
    model = qwen4(ple_embed_dim=128)
    ids = tokens_with_eos(model, 40)
    checkpoint = open_checkpoint(save(model, tmp_path / "hf"))
    module = family(checkpoint.config)
    exact = transformers_logits(model, ids)
    converted = convert(checkpoint, module, tmp_path / "mlx", bits=8, group=32)
    expected = logits(converted, ids)
    assert 1e-6 < error(expected, exact) < 0.05
    names = [*open_checkpoint(converted).sizes()]
    assert [name for name in names if "ngram_embedding" in name] == [
        f"model.layers.{layer}.ple.ple_embedding.ngram_embedding.rows_0.affine8_32_float32" for layer in (1, 3)
    ]
    packed = pack(open_checkpoint(converted), module, tmp_path / "packed", lanes=ISA.lanes)
    assert error(logits(packed, ids), expected) < 1e-5


def test_bf16_weights_match_transformers(tmp_path: Path):
    model = qwen4()
    ids = tokens_with_eos(model, 60)
    save(model.to(torch.bfloat16), tmp_path)
    expected = transformers_logits(Qwen4ExpForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), ids)
    for chunk in (512, 7):
        assert error(logits(tmp_path, ids, chunk=chunk), expected) < 1e-5


def test_converted_and_packed_folders_give_the_same_logits_at_4_bits(tmp_path: Path):
    """Compare folders whose tables stay unquantized, with checksums: rows of 16 are too narrow for groups of 32."""
    model = qwen4()
    ids = tokens_with_eos(model, 40)
    checkpoint = open_checkpoint(save(model, tmp_path / "hf"))
    module, form = family(checkpoint.config), {"bits": 4, "group": 32}
    expected = logits(tmp_path / "hf", ids, **form)
    converted = convert(checkpoint, module, tmp_path / "mlx", **form)
    assert any(name.endswith("rows_0.float32") for name in open_checkpoint(converted).sizes())
    assert error(logits(converted, ids), expected) < 1e-5
    packed = pack(open_checkpoint(tmp_path / "hf"), module, tmp_path / "packed", lanes=ISA.lanes, **form)
    assert error(logits(packed, ids), expected) < 1e-5


MANY = {"ngram_size": 16, "heads_per_ngram": 1024, "ple_embed_dim": 15360}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indexer_budget": None}, "has no 'indexer_budget'"),
        ({"indexer_budget": 41}, "has indexer_budget 41, which is no multiple of indexer_compress_ratio 5"),
        ({"indexer_head_dim": 12}, "has indexer_head_dim 12, of which 16 channels are to be rotated"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads 2; only 1"),
        ({"ple_layer_ids": [3]}, r"has ple_layer_ids \[3\], which are no layers of kind linear_attention"),
        ({"ple_layer_ids": [9]}, r"has ple_layer_ids \[9\]"),
        ({"ple_embed_dim": 66}, "has ple_embed_dim 66, which does not divide among 4 heads"),
        ({"eos_token_id": None}, "has no 'eos_token_id'"),
        ({"eos_token_id": []}, "an empty list of eos_token_id"),
        ({"seed": "x"}, "has seed = 'x'; an integer is needed"),
        ({"heads_per_ngram": 8192}, "has heads_per_ngram = 8192; an integer from 1 to 1,024 is needed"),
        ({**MANY, "ple_layer_ids": [1, 2]}, "30720 heads of n-grams; 16384"),
        ({"output_gate_type": "tanh"}, "output_gate_type 'tanh'; only silu or sigmoid"),
        ({"num_experts": 0}, "layers without experts"),
        ({"layer_types": [DELTA] * 3}, "lists 3 layer_types for num_hidden_layers 4"),
    ],
)
def test_unsupported_configs_are_refused(change: dict[str, Any], message: str):
    with pytest.raises(FormatError, match=message):
        Config.from_hf({**Qwen4ExpTextConfig(**SMALL).to_dict(), **change})


def test_missing_table_shards_are_refused(tmp_path: Path):
    save(qwen4(), tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    gone = next(name for name in files if "ngram_embedding.shard_1" in name)
    rewrite(tmp_path, {name: tensor for name, tensor in files.items() if name != gone})
    with pytest.raises(FormatError, match=r"1 missing: model.layers.1.ple.ple_embedding.ngram_embedding.shard_1.weight"):
        logits(tmp_path, [1, 2])
    last = gone.replace("shard_1", "shard_2")
    rewrite(tmp_path, {name: tensor for name, tensor in files.items() if name != last})
    with pytest.raises(FormatError, match=r"form a table of \[\d+, 16\], \[\d+, 16\] is needed"):
        logits(tmp_path, [1, 2])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(qwen4(ple_embed_dim=128), tmp_path_factory.mktemp("qwen4"))


def test_prefix_cache_on_disk_gives_the_same_output(saved: Path, tmp_path: Path):
    options: dict[str, Any] = {"device": "cpu", "kv": "k8v4", "context": 128, "exact": True}
    prompt = [5, 30, 7, 31, 32, 33, 200, 201, 30, 7, 31] * 7
    plain = auraflux.load(saved, **options)
    expected = list(plain.tokens(prompt, max_tokens=8, temperature=0))
    for _ in range(2):
        made = auraflux.load(saved, **options, prefix_disk="1GB", prefix_folder=tmp_path)
        assert list(made.tokens(prompt, max_tokens=8, temperature=0)) == expected
        assert list(made.tokens([*prompt, *expected], max_tokens=4, temperature=0)) == list(
            plain.tokens([*prompt, *expected], max_tokens=4, temperature=0)
        )
        made.reset()


def test_inspect_prints_rows_on_disk(saved: Path):
    done = CliRunner().invoke(main, ["inspect", str(saved), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    table = sum(tensor.nbytes for name, tensor in load_file(saved / "model.safetensors").items() if "ngram_embedding" in name)
    assert found["rows"]["nbytes"] == found["parts"]["rows on disk"]["nbytes"] == table
    # these tables are smaller than the row cache
    assert found["rows"]["memory_nbytes"] == table
    assert found["rows"]["parameters"] == table // 4
    assert "are read row by row on demand; at most" in " ".join(
        CliRunner().invoke(main, ["inspect", str(saved)]).stdout.split()
    )


def test_large_tables_count_only_their_row_cache(saved: Path, monkeypatch: pytest.MonkeyPatch):
    checkpoint = open_checkpoint(saved)
    module = family(checkpoint.config)
    joined = plan_memory(checkpoint, module.rename)
    monkeypatch.setattr(memory_plan, "ROW_CACHE_NBYTES", 1000)
    held = plan_memory(checkpoint, module.rename)
    assert held.rows.memory_nbytes == 2 * 1000
    assert joined.total.memory_nbytes - held.total.memory_nbytes == joined.rows.memory_nbytes - 2 * 1000
    assert held.total.nbytes == joined.total.nbytes == sum(checkpoint.sizes().values())


def test_table_modified_during_use_is_refused(tmp_path: Path):
    folder = convert(
        open_checkpoint(save(qwen4(), tmp_path / "hf")), family({"model_type": "qwen4_exp"}), tmp_path / "mlx", group=32
    )
    model = auraflux.load(folder, device="cpu", kv="none", context=64)
    assert str(folder / "rows.safetensors") not in Path("/proc/self/maps").read_text()
    before = list(model.tokens([5, 6, 7], max_tokens=6, temperature=0))
    with (folder / "rows.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    os.utime(folder / "rows.safetensors", ns=(0, 12345))
    with pytest.raises(FormatError, match=r"rows.safetensors was changed while the model was in use; load it again"):
        list(model.tokens([99, 98, 97], max_tokens=6, temperature=0))
    # cached rows stay valid
    assert list(model.tokens([5, 6, 7], max_tokens=6, temperature=0)) == before


def test_ngram_rows_match_transformers():
    config = Qwen4ExpTextConfig(**SMALL)
    for layer in range(2):
        theirs = Qwen4ExpTextNGramEmbedding(config, config.ple_embed_dim, 0, layer)
        grams = Grams(3, 2, 211, 1234, 7)
        assert torch.equal(grams.multipliers(layer, 259), theirs.layer_multipliers)
        assert torch.equal(grams.head_rows(layer), theirs.ngram_heads_vocab_sizes)
        assert torch.equal(offsets(grams.head_rows(layer)), theirs.ngram_heads_offsets)


def test_is_prime_matches_trial_division():
    tried = range(3000)
    assert [n for n in tried if _is_prime(n)] == [n for n in tried if n > 1 and all(n % d for d in range(2, n))]
    # strong pseudoprimes to some of the bases
    assert not any(map(_is_prime, (2047, 3215031751, 3825123056546413051)))
    assert _is_prime((1 << 61) - 1)
