"""Short names, and the commands about models by name: run, ps, show, rm, list --remote."""

import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from auraflux.cli import main
from auraflux.cli.models import server
from auraflux.errors import InputError
from auraflux.serve.auth import Access
from auraflux.serve.transport.http_process import HttpSettings
from auraflux.weights.download import local_models, pull
from auraflux.weights.download.short_names import full_name, short_name, short_names
from tests.engine.tiny import tiny
from tests.serve.server import NAME, running
from tests.weights.formats.gguf_files import llama_tensors, write_gguf

QWEN = "Qwen/Qwen3-4B-GGUF/Qwen3-4B-Q4_K_M.gguf"


def call(*words: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words], input=stdin, catch_exceptions=False)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub's cache that holds qwen3:4b, as a link to its content, and no built-in model."""
    repository = tmp_path / "hub" / "models--Qwen--Qwen3-4B-GGUF"
    snapshot, blobs = repository / "snapshots" / "abc", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    write_gguf(blobs / "content", llama_tensors(), "Q8_0")
    (snapshot / "Qwen3-4B-Q4_K_M.gguf").symlink_to(blobs / "content")
    monkeypatch.setattr(local_models, "_hub_folder", lambda: tmp_path / "hub")
    monkeypatch.setenv("AURAFLUX_HOME", str(tmp_path / "home"))
    return blobs / "content"


def test_names_are_unique_and_well_formed():
    names = [each for row in short_names() for each in (row.name, *row.aliases)]
    assert len(set(names)) == len(names)
    for row in short_names():
        assert row.name.count(":") == 1
        assert row.name == row.name.lower()
        if row.model not in pull.BUILT_IN:
            repository, revision, file = pull._on_hub(row.model)
            assert (repository.count("/"), revision) == (1, None)
            assert file is not None
        assert short_name(row.model) == row.name


def test_short_names_stand_for_models():
    assert full_name("qwen3:4b") == full_name("Qwen3:4B") == full_name("qwen3:4b:latest") == QWEN
    assert full_name("smollm2:latest") == "smollm2-135m-instruct"
    assert full_name("org/name") == "org/name"
    assert pull.find_local("qwen3:4b") is None


def test_a_file_of_that_name_is_taken_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("qwen3:4b").mkdir()
    assert pull.find_local("qwen3:4b") == Path("qwen3:4b")


def test_downloads_are_asked_for_by_full_names(monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(pull, "from_hub", lambda *words: asked.append(words[:3]) or Path("x"))
    monkeypatch.setattr(pull, "_built_in", lambda name, report: asked.append(name) or Path("x"))
    pull.locate("qwen3:4b")
    pull.locate("smollm2")
    assert asked == [("Qwen/Qwen3-4B-GGUF", None, "Qwen3-4B-Q4_K_M.gguf"), "smollm2-135m-instruct"]


def test_list_remote(hub: Path):
    rows = {row["name"]: row for row in json.loads(call("list", "--remote", "--json").stdout)}
    assert rows["qwen3:4b"]["model"] == QWEN
    assert {name for name, row in rows.items() if row["downloaded"]} == {"qwen3:4b"}
    assert "qwen2.5-coder:7b" in call("list", "--remote").stdout


def test_run_offline_says_so(hub: Path, monkeypatch: pytest.MonkeyPatch):
    def unreachable(*_: object) -> None:
        raise OSError(-2, "Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", unreachable)
    done = call("run", "qwen3:8b", "hello")
    assert done.exit_code == 1
    assert done.stderr.startswith("error: Qwen/Qwen3-8B-GGUF ")
    assert "Name or service not known" in done.stderr
    assert done.stderr.count("\n") == 1


def test_run_answers_once_and_chats():
    options = ("--temperature", 0, "--max-tokens", 4, "--context", 64)
    once = call("run", tiny(), "hello", *options)
    assert once.exit_code == 0, once.stderr
    assert call("run", tiny(), *options, stdin="hello\n").stdout == once.stdout
    assert "/help lists the commands" not in once.stderr


def test_rm_asks(hub: Path):
    kept = call("rm", "qwen3:4b", stdin="n\n")
    assert "Delete qwen3:4b (" in kept.stderr
    assert "was kept" in kept.stderr
    unanswered = call("rm", "qwen3:4b", stdin="")
    assert unanswered.exit_code == 1
    assert "--yes deletes without asking" in unanswered.stderr
    assert hub.exists()
    unknown = call("rm", "qwen3:4b", "qwen3:8b", "--yes")
    assert unknown.exit_code == 1
    assert "no downloaded model 'qwen3:8b'" in unknown.stderr
    assert hub.exists()
    assert call("rm", "qwen3:4b", stdin="y\n").stdout.endswith("freed.\n")
    assert not hub.exists()
    assert dict(local_models.local_models()) == {}


def test_rm_deletes_no_path(hub: Path, tmp_path: Path):
    shutil.copytree(tiny(), tmp_path / "mine")
    assert call("rm", tmp_path / "mine", "--yes").exit_code == 1
    assert (tmp_path / "mine" / "config.json").exists()


def test_show_a_downloaded_model_and_a_short_name(hub: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "DEFAULT_URLS", ("http://127.0.0.1:9",))
    found = json.loads(call("show", "qwen3:4b", "--json").stdout)
    assert (found["model_type"], found["form"]) == ("llama", "gguf")
    assert "is Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf, about 5.03 GB; it is not downloaded" in call("show", "qwen3").stdout
    assert json.loads(call("show", "qwen3", "--json").stdout)["downloaded"] is False
    unknown = call("show", "nothing")
    assert unknown.exit_code == 1
    assert "neither downloaded nor served" in unknown.stderr


def test_ps_and_show_ask_a_server(monkeypatch: pytest.MonkeyPatch):
    with running(settings=HttpSettings(access=Access(keys=("sk-a",)), grace_s=0.5)) as served:
        refused = call("ps", "--url", served.url)
        assert refused.exit_code == 1
        assert re.match(r"error: the server at \S+ answered 401: .*\.\n$", refused.stderr)
        monkeypatch.setenv("AURAFLUX_API_KEY", "sk-a")
        [row] = json.loads(call("ps", "--url", f"{served.url}/v1", "--json").stdout)
        assert (row["name"], row["device"], row["context"], row["unloaded_in_s"]) == (NAME, "cpu", 512, None)
        monkeypatch.setattr(server, "DEFAULT_URLS", (served.url, "http://127.0.0.1:9"))
        assert NAME in call("ps").stdout
        shown = call("show", NAME).stdout
        assert f"{NAME} at {served.url}" in shown
        assert "context       512" in shown
        assert json.loads(call("show", NAME, "--url", served.url, "--json").stdout)["server"] == served.url
        missing = call("show", "other", "--url", served.url)
        assert "answered 404" in missing.stderr


def test_ps_without_a_server(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "DEFAULT_URLS", ("http://127.0.0.1:9",))
    assert "no server runs on ports 8000 and 11434" in call("ps").stderr
    assert call("ps", "--url", "127.0.0.1:9").stderr.startswith("error: no server answers at http://127.0.0.1:9: ")
    assert "give the address of a server" in call("ps", "--url", "file:///etc/passwd").stderr


def test_an_answer_that_is_no_json_object(monkeypatch: pytest.MonkeyPatch):
    class Answer:
        def read(self, _: int) -> bytes:
            return b"[]"

        def __enter__(self) -> "Answer":
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(server.urllib.request, "urlopen", lambda *_, **__: Answer())
    with pytest.raises(InputError, match="is no server of auraflux"):
        server.ask("http://x", "/api/ps")
