"""Qwen4, whose tokens have several vectors, choose blocks and read n-grams from disk, against transformers."""

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
from auraflux.errors import FormatError, SettingsError
from auraflux.models import family
from auraflux.models.ngram_rows import Grams, _is_prime, offsets
from auraflux.models.qwen4_exp import Config
from auraflux.ops.simd.isa import ISA
from auraflux.quant import quantize
from auraflux.run.engine import Engine
from auraflux.weights import plan
from auraflux.weights.checkpoint import open_checkpoint
from auraflux.weights.convert import convert
from auraflux.weights.loader import Weights
from auraflux.weights.pack import pack
from auraflux.weights.plan import survey
from tests.models.oracles import agreement, error, prefill, save, scores, tokens, truth

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
    """A model whose parts all matter: indexers decide clearly, n-grams say something, memories last for some tokens."""
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


def some_tokens(model: Any, count: int = 150) -> list[int]:
    """Tokens of which some end texts, so that n-grams stop there."""
    ids = tokens(model, count)
    ends = model.config.eos_token_id
    return [ends[0] if isinstance(ends, list) else ends if at % 17 == 11 else token for at, token in enumerate(ids)]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in MODELS])
def test_logits_are_those_of_transformers(name: str, tmp_path: Path):
    model = MODELS[name]()
    save(model, tmp_path)
    ids = some_tokens(model)
    wanted = truth(model, ids)
    for chunk in (512, 37, 1):
        assert error(scores(tmp_path, ids, chunk=chunk), wanted) < 1e-5


def test_text_parts_of_models_with_images_are_read(tmp_path: Path):
    """As they will be published: names and settings of the text part are inner ones, others are passed over."""
    model = qwen4()
    ids = some_tokens(model, 40)
    save(model, tmp_path)
    wanted, files = scores(tmp_path, ids), load_file(tmp_path / "model.safetensors")
    inner = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in files.items()}
    inner |= {"model.visual.patch_embed.proj.weight": torch.zeros(3), "mtp.fc.weight": torch.zeros(3)}
    save_file(inner, tmp_path / "model.safetensors")
    settings = json.loads((tmp_path / "config.json").read_text())
    kinds = ["full_attention" if kind == ATTENTION else kind for kind in settings["layer_types"]]
    outer = {"model_type": "qwen4_exp", "text_config": {**settings, "layer_types": kinds}, "eos_token_id": 3}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    found = scores(tmp_path, ids)
    assert torch.equal(found, wanted)
    assert error(found, truth(model, ids)) < 1e-5


def test_coded_keys_are_close(tmp_path: Path):
    model = qwen4()
    ids = some_tokens(model)
    save(model, tmp_path)
    wanted = scores(tmp_path, ids)
    coded = scores(tmp_path, ids, kv="k8v8")
    # blocks are chosen by keys that are not coded
    assert error(coded, wanted) < 0.02
    assert agreement(coded, wanted) >= 0.98


def test_positions_kept_as_they_are_are_refused(tmp_path: Path):
    folder = save(qwen4(), tmp_path)
    with pytest.raises(SettingsError, match="chosen by blocks are all coded: leave --first and --newest out"):
        engine_of(folder, CacheSettings("k8v4", newest=4))


def engine_of(folder: Path, settings: CacheSettings | None = None, **options: Any) -> Engine:
    checkpoint = open_checkpoint(folder)
    module = family(checkpoint.config)
    config = module.Config.from_hf(checkpoint.config)
    weights = Weights(checkpoint, module.rename)
    model = module.Model(config, weights)
    weights.done()
    settings = settings or CacheSettings("none")
    return Engine(model, module.make_caches(config), settings, context=256, sequences=6, exact=True, **options)


def test_a_text_is_the_same_beside_others_after_a_fork_and_after_a_cut(tmp_path: Path):
    """N-grams go on across pieces, forks and cuts: the last tokens lie with the states."""
    model = qwen4()
    engine, ids = engine_of(save(model, tmp_path)), some_tokens(model, 90)
    wanted = engine.all_scores(engine.cache.open(), ids)
    long, short = engine.cache.open(), engine.cache.open()
    prefill(engine, long, ids[:61])
    prefill(engine, short, ids[:1])
    batch = engine.cache.batch([long, short])
    for at, token in enumerate(ids[61:75]):
        found = engine.decode(batch, [token, ids[1 + at]])
        assert torch.equal(found, wanted[[61 + at, 1 + at]])
    other = long.fork()
    engine.all_scores(other, ids[::-1][:9])
    assert torch.equal(engine.all_scores(long, ids[75:]), wanted[75:])
    kept = other.truncate(70)
    assert torch.equal(engine.all_scores(other, ids[70 - kept :])[kept:], wanted[70:])
    image = long.snapshot()
    long.close()
    again = engine.cache.restore(image)
    assert torch.equal(engine.all_scores(again, ids[:3]), _after(engine, ids, ids[:3]))


def _after(engine: Engine, ids: list[int], more: list[int]) -> torch.Tensor:
    sequence = engine.cache.open()
    engine.all_scores(sequence, ids)
    return engine.all_scores(sequence, more)


def rewrite(folder: Path, files: dict[str, torch.Tensor], **changes: Any) -> None:
    save_file({name: tensor.contiguous() for name, tensor in files.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_what_is_chosen_and_recalled_matters(tmp_path: Path):
    """More blocks, and other rows, give other scores from the first token on that notices."""
    model = qwen4()
    ids = tokens(model, 60)
    save(model, tmp_path)
    wanted = scores(tmp_path, ids)
    files = load_file(tmp_path / "model.safetensors")
    rewrite(tmp_path, files, indexer_budget=500)
    # the ninth block is full with the 45th token
    found = scores(tmp_path, ids)
    assert torch.equal(found[:44], wanted[:44])
    assert error(found[44:], wanted[44:]) > 0.003
    name = next(name for name in files if "ngram_embedding.shard_1" in name)
    rewrite(tmp_path, {**files, name: files[name].roll(1, 0)}, indexer_budget=40)
    assert error(scores(tmp_path, ids), wanted) > 0.01


def test_an_ngram_ends_where_a_text_does(tmp_path: Path):
    """What comes before the token that ends texts is not read: only what is recalled is looked at, the rest is other."""
    model = qwen4()
    engine = engine_of(save(model, tmp_path))
    recall = engine.model.layers[1].recall
    seen: list[torch.Tensor] = []
    fetch = recall.table.fetch
    recall.table.fetch = lambda ids: (seen.append(ids.view(-1, recall.grams.count)), fetch(ids))[1]
    for text in ([7, 30, 31], [5, 7, 30, 31], [5, 6, 7, 30, 31], [30, 31]):
        engine.all_scores(engine.cache.open(), text)
    assert all(torch.equal(rows[-2:], seen[0][-2:]) for rows in seen)


@pytest.mark.parametrize("layout", ["one", "mlx", "buffers"])
def test_tables_are_read_however_they_lie(layout: str, tmp_path: Path):
    """As one tensor, in codes with scales beside them, and without the numbers that the config tells anyway."""
    model = qwen4()
    ids = some_tokens(model, 40)
    save(model, tmp_path)
    wanted, files = scores(tmp_path, ids), load_file(tmp_path / "model.safetensors")
    shards: dict[str, dict[int, torch.Tensor]] = {}
    for name in [name for name in files if ".shard_" in name]:
        stem, _, rest = name.partition(".shard_")
        shards.setdefault(stem, {})[int(rest.split(".")[0])] = files.pop(name)
    assert {len(parts) for parts in shards.values()} == {3}
    whole = {stem: torch.cat([parts[number] for number in sorted(parts)]) for stem, parts in shards.items()}
    if layout == "mlx":
        for stem, table in whole.items():
            codes = quantize(torch.nn.functional.pad(table, (0, 16)), 8, 32)
            assert codes.biases is not None
            files |= {f"{stem}.weight": codes.packed.view(torch.uint32), f"{stem}.scales": codes.scales}
            files[f"{stem}.biases"] = codes.biases
        # rows twice as wide, of which the second half says nothing
        for name in [name for name in files if name.endswith(("ple.key_proj.weight", "ple.value_proj.weight"))]:
            apart = files[name].unflatten(1, (4, 16))
            files[name] = torch.nn.functional.pad(apart, (0, 16)).flatten(1)
        rewrite(tmp_path, files, quantization={"bits": 8, "group_size": 32}, ple_embed_dim=128)
        # folders in this form have norms with the 1 added
        for name in [name for name in files if "norm" in name and not name.endswith("linear_attn.norm.weight")]:
            files[name] = files[name] + 1
        for name in [name for name in files if name.endswith("linear_attn.conv1d.weight")]:
            files[name] = files[name].transpose(1, 2)
        rewrite(tmp_path, files)
        assert 0 < error(scores(tmp_path, ids), wanted) < 0.01
        return
    files |= {f"{stem}.weight": table for stem, table in whole.items()}
    if layout == "buffers":
        files = {name: tensor for name, tensor in files.items() if not name.endswith(BUFFERS)}
    rewrite(tmp_path, files)
    assert torch.equal(scores(tmp_path, ids), wanted)


BUFFERS = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")


def test_experts_are_packed_and_tables_converted(tmp_path: Path):
    model = qwen4(ple_embed_dim=128)
    ids = some_tokens(model, 40)
    checkpoint = open_checkpoint(save(model, tmp_path / "hf"))
    module = family(checkpoint.config)
    exact = truth(model, ids)
    converted = convert(checkpoint, module, tmp_path / "mlx", bits=8, group=32)
    wanted = scores(converted, ids)
    assert 1e-6 < error(wanted, exact) < 0.05
    names = [*open_checkpoint(converted).sizes()]
    assert [name for name in names if "ngram_embedding" in name] == [
        f"model.layers.{layer}.ple.ple_embedding.ngram_embedding.rows_0.affine8_32_float32" for layer in (1, 3)
    ]
    packed = pack(open_checkpoint(converted), module, tmp_path / "packed", lanes=ISA.lanes)
    assert error(scores(packed, ids), wanted) < 1e-5


def test_weights_in_bf16_are_what_transformers_reads(tmp_path: Path):
    model = qwen4()
    ids = some_tokens(model, 60)
    save(model.to(torch.bfloat16), tmp_path)
    wanted = truth(Qwen4ExpForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), ids)
    for chunk in (512, 7):
        assert error(scores(tmp_path, ids, chunk=chunk), wanted) < 1e-5


def test_four_bits_are_the_same_from_a_converted_folder_and_a_packed_one(tmp_path: Path):
    """Rows of 16 are too narrow for groups of 32: tables stay as they are, with checksums."""
    model = qwen4()
    ids = some_tokens(model, 40)
    checkpoint = open_checkpoint(save(model, tmp_path / "hf"))
    module, form = family(checkpoint.config), {"bits": 4, "group": 32}
    wanted = scores(tmp_path / "hf", ids, **form)
    converted = convert(checkpoint, module, tmp_path / "mlx", **form)
    assert any(name.endswith("rows_0.float32") for name in open_checkpoint(converted).sizes())
    assert error(scores(converted, ids), wanted) < 1e-5
    packed = pack(open_checkpoint(tmp_path / "hf"), module, tmp_path / "packed", lanes=ISA.lanes, **form)
    assert error(scores(packed, ids), wanted) < 1e-5


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
        ({"seed": "x"}, "has seed 'x'; a whole number is needed"),
        ({"heads_per_ngram": 8192, "ple_embed_dim": 16384, "ple_layer_ids": [1, 2]}, "32768 heads of n-grams; 16384"),
        ({"output_gate_type": "tanh"}, "output_gate_type 'tanh'; only silu or sigmoid"),
        ({"num_experts": 0}, "layers without experts"),
        ({"layer_types": [DELTA] * 3}, "lists 3 layer_types for num_hidden_layers 4"),
    ],
)
def test_configs_that_cannot_be_honoured_are_refused(change: dict[str, Any], message: str):
    with pytest.raises(FormatError, match=message):
        Config.from_hf({**Qwen4ExpTextConfig(**SMALL).to_dict(), **change})


def test_a_table_that_is_too_small_is_told_with_all_else(tmp_path: Path):
    save(qwen4(), tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    gone = next(name for name in files if "ngram_embedding.shard_1" in name)
    rewrite(tmp_path, {name: tensor for name, tensor in files.items() if name != gone})
    with pytest.raises(FormatError, match=r"1 missing: model.layers.1.ple.ple_embedding.ngram_embedding.shard_1.weight"):
        scores(tmp_path, [1, 2])
    last = gone.replace("shard_1", "shard_2")
    rewrite(tmp_path, {name: tensor for name, tensor in files.items() if name != last})
    with pytest.raises(FormatError, match=r"is a table of \[\d+, 16\], \[\d+, 16\] is needed"):
        scores(tmp_path, [1, 2])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(qwen4(ple_embed_dim=128), tmp_path_factory.mktemp("qwen4"))


def test_a_text_is_written_and_its_prefix_is_found_again_on_disk(saved: Path, tmp_path: Path):
    options: dict[str, Any] = {"device": "cpu", "kv": "k8v4", "context": 128, "exact": True}
    prompt = [5, 30, 7, 31, 32, 33, 200, 201, 30, 7, 31] * 7
    plain = auraflux.load(saved, **options)
    wanted = list(plain.tokens(prompt, max_tokens=8, temperature=0))
    for _ in range(2):
        made = auraflux.load(saved, **options, prefix_disk="1GB", prefix_folder=tmp_path)
        assert list(made.tokens(prompt, max_tokens=8, temperature=0)) == wanted
        assert list(made.tokens([*prompt, *wanted], max_tokens=4, temperature=0)) == list(
            plain.tokens([*prompt, *wanted], max_tokens=4, temperature=0)
        )
        made.reset()


def test_inspect_says_what_stays_on_disk(saved: Path):
    done = CliRunner().invoke(main, ["inspect", str(saved), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    table = sum(tensor.nbytes for name, tensor in load_file(saved / "model.safetensors").items() if "ngram_embedding" in name)
    assert found["rows"]["nbytes"] == found["parts"]["rows on disk"]["nbytes"] == table
    # these tables are smaller than what may be held of them
    assert found["rows"]["memory_nbytes"] == table
    assert found["rows"]["parameters"] == table // 4
    assert "are read row by row as tokens need them; at most" in " ".join(
        CliRunner().invoke(main, ["inspect", str(saved)]).stdout.split()
    )


def test_large_tables_are_counted_as_what_is_held_of_them(saved: Path, monkeypatch: pytest.MonkeyPatch):
    checkpoint = open_checkpoint(saved)
    module = family(checkpoint.config)
    whole = survey(checkpoint, module.rename)
    monkeypatch.setattr(plan, "HOT_NBYTES", 1000)
    held = survey(checkpoint, module.rename)
    assert held.rows.memory_nbytes == 2 * 1000
    assert whole.total.memory_nbytes - held.total.memory_nbytes == whole.rows.memory_nbytes - 2 * 1000
    assert held.total.nbytes == whole.total.nbytes == sum(checkpoint.sizes().values())


def test_a_table_that_changes_under_a_running_model_is_refused(tmp_path: Path):
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
    # what is held still says what it said
    assert list(model.tokens([5, 6, 7], max_tokens=6, temperature=0)) == before


def test_rows_are_those_that_transformers_looks_up():
    config = Qwen4ExpTextConfig(**SMALL)
    for layer in range(2):
        theirs = Qwen4ExpTextNGramEmbedding(config, config.ple_embed_dim, 0, layer)
        grams = Grams(3, 2, 211, 1234, 7)
        assert torch.equal(grams.multipliers(layer, 259), theirs.layer_multipliers)
        assert torch.equal(grams.head_rows(layer), theirs.ngram_heads_vocab_sizes)
        assert torch.equal(offsets(grams.head_rows(layer)), theirs.ngram_heads_offsets)


def test_primes_are_primes():
    tried = range(3000)
    assert [n for n in tried if _is_prime(n)] == [n for n in tried if n > 1 and all(n % d for d in range(2, n))]
    # products of two primes that fool some of the witnesses
    assert not any(map(_is_prime, (2047, 3215031751, 3825123056546413051)))
    assert _is_prime((1 << 61) - 1)
