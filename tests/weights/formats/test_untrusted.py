"""Validation of untrusted model files: invalid values give one short, specific error."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

import auraflux
from auraflux.errors import FormatError
from auraflux.weights.formats.checkpoint import open_checkpoint
from auraflux.weights.formats.untrusted import (
    LARGEST_JSON,
    check,
    either,
    integer,
    list_of,
    listed,
    mapping_of,
    number,
    read_json,
    regular_file,
    string,
)
from tests.engine.tiny import tiny


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Copy the tiny model."""
    folder = tmp_path / "model"
    folder.mkdir()
    for path in tiny().iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def rewritten(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (integer(1, 8), [1, 8], [0, 9, 1.0, True, "1", None, [1], 10**400]),
        (number(0, 1e6), [0, 1.5, 1e6], [-1, float("nan"), float("inf"), True, "1", 10**400]),
        (string(3), ["", "abc"], ["abcd", 1, b"a", ["a"]]),
        (list_of(integer(0, 9), 2), [[], [1, 2]], [[1, 2, 3], ["a"], {}, 1, [1, True], [9, 10], [-1]]),
        (list_of(string(2), 3), [[], ["", "ab", "a"]], [["abc", "a"], ["a", 1], ["a", None], ["a"] * 4]),
        (mapping_of(string(1), 1), [{}, {"x": "a"}], [{"x": 1}, {"a": "", "b": ""}, []]),
        (either(integer(0, 1), string(1)), [0, "a"], [2, "ab", None]),
    ],
)
def test_kinds(kind, good: list[Any], bad: list[Any]):
    assert all(kind.accepts(value) for value in good)
    assert not any(kind.accepts(value) for value in bad)


def test_error_names_file_key_value_and_expected_kind():
    with pytest.raises(FormatError, match=r"^a/config\.json has x = 'y'; an integer from 1 to 5 is needed\.$"):
        check(Path("a/config.json"), {"x": "y"}, {"x": integer(1, 5)})
    with pytest.raises(FormatError, match=r"^f has no x; an integer from 1 to 5 is needed\.$"):
        check("f", {"x": None}, {"x": integer(1, 5)}, ("x",))
    with pytest.raises(FormatError) as caught:
        check("f\n\x1b[31m", {"x": ["\n" * 9999]}, {"x": integer(1, 5)})
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 200
    check("f", {"x": None}, {"x": integer(1, 5)})


REFUSED = {
    "layers": ({"num_hidden_layers": 100_000}, "num_hidden_layers = 100000; an integer from 1 to 1,024"),
    "head": ({"head_dim": 10**9}, "head_dim = 1000000000; an integer from 1 to 1,024"),
    "window": ({"sliding_window": 1 << 40}, "sliding_window = 1099511627776; an integer"),
    "type": ({"model_type": ["llama"]}, r"model_type = \['llama'\]; a string"),
    "inner": ({"text_config": {"hidden_size": "64"}}, "hidden_size = '64'; an integer"),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads = 0; an integer"),
    "heads": ({"num_attention_heads": 4, "num_key_value_heads": 3}, "which 3 num_key_value_heads cannot share"),
    "rope": ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor = '2'; a number"),
    "rope of a layer": ({"rope_parameters": {"full_attention": {"rope_theta": -1}}}, "rope_theta = -1; a number"),
    "bits": ({"quantization": {"bits": 99, "group_size": 64}}, "bits = 99; an integer from 1 to 8"),
    "module": ({"quantization": {"bits": 4, "group_size": 64, "lm_head": {"bits": []}}}, r"lm_head has bits = \[\]"),
    "ends": ({"eos_token_id": [[1]]}, r"eos_token_id = \[\[1\]\]; an integer"),
    "eps": ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan; a number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_values_are_refused(name: str, model: Path):
    changes, message = REFUSED[name]
    with pytest.raises(FormatError, match=rf"^{model}/config\.json.*{message}"):
        auraflux.load(rewritten(model, **changes), device="cpu")


def test_largest_accepted_sizes_allocate_nothing(model: Path):
    rewritten(model, num_hidden_layers=1024, head_dim=1024, num_attention_heads=1 << 16, num_key_value_heads=1 << 16)
    with pytest.raises(FormatError, match="do not fit the model"):
        auraflux.load(model, device="cpu")


def test_loading_stops_after_many_missing_experts(model: Path):
    experts = {"num_experts": 1 << 16, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}
    rewritten(model, model_type="qwen3_moe", decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True, **experts)
    with pytest.raises(FormatError, match=r"do not fit the model\. Too many are missing: .*mlp\.gate\.weight"):
        auraflux.load(model, device="cpu")


def test_mismatched_tensors_give_a_short_error(model: Path):
    path = model / "model.safetensors"
    whole = path.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    header.pop("__metadata__", None)
    norm, *others = sorted(header, key=lambda name: not name.endswith("norm.weight"))
    odd = {norm: {**header[norm], "shape": [1] * 999 + header[norm]["shape"]}}
    odd |= {f"layers.{at}.{name}" if at < 9 else name: header[name] for at, name in enumerate(others)}
    odd |= {f"{'odd.' * 500}weight": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}
    written = json.dumps(odd).encode()
    path.write_bytes(len(written).to_bytes(8, "little") + written + whole[8 + size :])
    with pytest.raises(
        FormatError, match=r"\d+ missing: .* and \d+ more; 1 of the wrong shape: .* has shape \[1, 1, "
    ) as refusal:
        auraflux.load(model, device="cpu")
    assert len(str(refusal.value).replace(str(model), "")) < 2000


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"])
def test_pipe_is_refused_without_blocking(name: str, model: Path):
    (model / name).unlink()
    os.mkfifo(model / name)
    with pytest.raises(FormatError, match=f"{name} is not a regular file"):
        auraflux.load(model, device="cpu")


def test_gguf_pipe_is_refused_without_blocking(tmp_path: Path):
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(FormatError, match=r"m\.gguf is not a regular file"):
        open_checkpoint(tmp_path / "m.gguf")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer_config.json"])
def test_links_outside_the_folder_are_refused(name: str, model: Path):
    outside = model.parent / "outside"
    (model / name).rename(outside)
    (model / name).symlink_to(outside)
    with pytest.raises(FormatError, match=rf"{name} is a link to .*outside, which lies outside of the model's folder"):
        auraflux.load(model, device="cpu")


def test_links_within_a_folder_or_hub_cache_are_followed(model: Path, tmp_path: Path):
    (model / "config.json").rename(model / "other.json")
    (model / "config.json").symlink_to("other.json")
    open_checkpoint(model)
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0123", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in model.iterdir():
        (blobs / path.name).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    open_checkpoint(snapshot)
    (tmp_path / "link").symlink_to(snapshot)
    open_checkpoint(tmp_path / "link")


def test_broken_links_raise(tmp_path: Path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for name in ("a", "missing", "x" * 300, "null\0"):
        with pytest.raises(FormatError, match="cannot be read: "):
            regular_file(tmp_path / name)


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "..", "", "a/b.safetensors", "a\\b", "a\0b", None, 3, ["x"]]
)
def test_index_may_only_name_files_in_its_folder(name: Any, model: Path):
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(FormatError, match=r"index\.json"):
        open_checkpoint(model).sizes()


def test_an_index_that_does_not_name_the_single_file_is_out_of_date(model: Path):
    """Check that model.safetensors is read alone then, as transformers does."""
    expected = open_checkpoint(model).sizes()
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": "gone.safetensors"}}))
    assert open_checkpoint(model).sizes() == expected


def test_json_has_limits(tmp_path: Path):
    path = tmp_path / "x.json"
    path.write_text("{" + '"a":{' * 40 + "}" * 41)
    with pytest.raises(FormatError, match="deeper than 32"):
        read_json(path)
    path.write_text("[" * 100_000)
    with pytest.raises(FormatError, match="deeper than 32"):
        read_json(path)
    path.write_text("[1]")
    with pytest.raises(FormatError, match="holds list, not an object"):
        read_json(path)
    with path.open("wb") as file:
        file.truncate(LARGEST_JSON + 1)
    with pytest.raises(FormatError, match="has more than 67,108,864 bytes"):
        read_json(path)


def test_lone_surrogates_are_refused(tmp_path: Path):
    path = tmp_path / "x.json"
    path.write_text(r'{"a": "\ud83e\udd99"}')
    assert read_json(path) == {"a": "🦙"}
    path.write_text(r'{"a": ["\uD83E"]}')
    with pytest.raises(FormatError, match="cannot be read as JSON"):
        read_json(path)


def test_null_counts_as_missing(model: Path):
    ids = [3, 4, 5, 6]
    wanted = list(auraflux.load(model, device="cpu", context=64).tokens(ids, max_tokens=4, temperature=0, ignore_eos=True))
    rewritten(model, head_dim=None, sliding_window=None)
    assert (
        list(auraflux.load(model, device="cpu", context=64).tokens(ids, max_tokens=4, temperature=0, ignore_eos=True)) == wanted
    )
    rewritten(model, rope_parameters={"rope_type": "default", "rope_theta": None})
    assert (
        len(list(auraflux.load(model, device="cpu", context=64).tokens(ids, max_tokens=4, temperature=0, ignore_eos=True))) == 4
    )


def test_end_tokens_must_be_integers(model: Path):
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    rewritten(model, text_config={"eos_token_id": "2"})
    with pytest.raises(FormatError, match="eos_token_id = '2'; an integer"):
        auraflux.load(model, device="cpu")


def test_long_name_lists_are_shortened():
    names = [f"{at:03}{'x' * 77}" for at in range(100)]
    assert len(listed(names, 100)) < 1500
    assert listed(names, 100).endswith("and 84 more")
    assert listed(["a", "b", "c"], 2) == "a, b and 1 more"
