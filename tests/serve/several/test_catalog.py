"""The models of a server: a TOML file, or a folder."""

from pathlib import Path

import pytest

from auraflux.errors import AurafluxError, InputError
from auraflux.serve.keep_alive import parse_keep_alive
from auraflux.serve.several.catalog import is_models_folder, read_catalog

FILE = """
memory = "12GB"
keep_alive = "10m"
load_timeout = 60

[models.small]
path = "small.gguf"
aliases = ["gpt-4o", "qwen3:4b"]
pinned = true
kv = "k8v4"
max-sequences = 4

[models."org/large"]
path = "org/large"
keep_alive = -1
"""


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (None, None),
        ("", None),
        (0, 0),
        (300, 300),
        ("300", 300),
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5s", 1.5),
        ("200ms", 0.2),
        (-1, float("inf")),
        ("-1m", float("inf")),
    ],
)
def test_keep_alive(given: float | str | None, seconds: float | None):
    assert parse_keep_alive(given) == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize("given", ["soon", "5 minutes", "m", float("nan"), "1h" * 100, "٣m", "1e5"])
def test_invalid_keep_alive_is_refused(given: float | str):
    with pytest.raises(InputError, match="keep_alive is"):
        parse_keep_alive(given)


def test_file(tmp_path: Path):
    (tmp_path / "models.toml").write_text(FILE)
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    for path in (tmp_path, tmp_path / "models.toml"):
        catalog = read_catalog(path)
        small, large = catalog.entries
        assert (catalog.memory, catalog.keep_alive_s, catalog.load_timeout_s) == ("12GB", 600, 60)
        assert (small.model, small.aliases, small.pinned) == (str(tmp_path / "small.gguf"), ("gpt-4o", "qwen3:4b"), True)
        assert small.settings == {"kv": "k8v4", "max-sequences": 4}
        assert (large.name, large.model, large.keep_alive_s) == ("org/large", "org/large", float("inf"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lists no models"),
        ("models = 3", "lists no models"),
        ("[models.a]\npath = 3", "has no path"),
        ("[models.a]", "has no path"),
        ("models = {a = 3}", "write a table"),
        ("[models.a]\npath = 'a'\npinned = 1", "pinned is 1"),
        ("[models.a]\npath = 'a'\naliases = 'b'", "aliases is 'b'"),
        ("[models.a]\npath = 'a'\nkeep_alive = 'soon'", "keep_alive is 'soon'"),
        ("[models.a]\npath = 'a'\nkeep_alive = [1]", "keep_alive is"),
        ("[models.a]\npath = 'a'\naliases = ['b']\n[models.b]\npath = 'b'", "two models have the name 'b'"),
        ("[models.' ']\npath = 'a'", "is no name"),
        ("load_timeout = 'x'\n[models.a]\npath = 'a'", "load_timeout is 'x'"),
        ("memry = '1GB'\n[models.a]\npath = 'a'", "has memry; it may have memory"),
        ("[models", "cannot be read"),
        ("\udcff", "cannot be read"),
    ],
)
def test_invalid_file_is_refused(tmp_path: Path, text: str, message: str):
    path = tmp_path / "models.toml"
    path.write_text(text, "utf-8", "surrogateescape")
    with pytest.raises(AurafluxError, match=message):
        read_catalog(path)


def test_folder(tmp_path: Path):
    for name in ("a.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf", "mmproj-a.gguf", "repo/c.gguf"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"GGUF")
    for name in ("d", "org/e", ".hidden"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    assert [entry.name for entry in read_catalog(tmp_path).entries] == ["a", "b", "d", "org/e", "repo/c"]
    assert is_models_folder(tmp_path)
    assert not is_models_folder(tmp_path / "d")
    assert not is_models_folder(tmp_path / "a.gguf")


def test_a_single_model_is_refused(tmp_path: Path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(AurafluxError, match="is one model: serve it without --models"):
        read_catalog(tmp_path / "a.gguf")


def test_empty_folder_is_refused(tmp_path: Path):
    assert not is_models_folder(tmp_path)
    with pytest.raises(AurafluxError, match="holds no models"):
        read_catalog(tmp_path)
