"""The files of a model: which there are, and whether they look like one. Imports no torch, so that a wrong path fails fast."""

import re
from pathlib import Path

from auraflux.errors import FormatError
from auraflux.weights.fields import ConfigFile
from auraflux.weights.formats.untrusted import listed, named, read_index, read_json, regular_file

MAGIC = b"GGUF"
LFS_POINTER = b"version https://git-lfs"
WEB_PAGES = (b"<!doctype", b"<html")
SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PROJECTOR = re.compile(r"(^|[-_./])mmproj", re.IGNORECASE)
# formats of towers, the preferred first; others are quantized
PROJECTOR_FORMATS = "BF16", "F16", "F32"
OLD_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.onnx", "*.npz")


def check_files(path: Path) -> ConfigFile | None:
    """Refuse a path that is no model of a known format; return the config of a folder, None for a GGUF file."""
    if path.is_dir():
        found = read_config(path)
        for file in safetensors_files(path):
            _check_start(regular_file(file, path), None)
        return found
    check_gguf(path)
    return None


def check_gguf(path: Path) -> None:
    """Refuse a path that is not a GGUF file, or is one of a split model that is not complete."""
    if not path.exists():
        raise FormatError(f"there is no model at {named(path)}. A folder with config.json, or a .gguf file, is needed.")
    if path.suffix.lower() != ".gguf":
        instead = f" Give its folder, {named(path.resolve().parent)}." if (path.parent / "config.json").exists() else ""
        raise FormatError(f"{named(path)} is neither a folder nor a .gguf file.{instead}")
    for part in gguf_parts(path):
        _check_start(regular_file(part), MAGIC)


def read_config(folder: Path) -> ConfigFile:
    """Return the config.json of a folder."""
    path = folder / "config.json"
    if path.exists():
        return ConfigFile(read_json(path, folder), path)
    others = {
        "*.gguf": "Give the path of a GGUF file in it",
        "*/config.json": "Give a folder in it",
        "snapshots/*/config.json": "Give a folder of its snapshots",
        "adapter_config.json": "It holds a LoRA adapter: merge that into its model first",
    }
    for pattern, advice in others.items():
        found = (each.parent if each.suffix == ".json" else each for each in folder.glob(pattern))
        names = sorted(str(each.relative_to(folder)) for each in found)
        if names:
            shown = "" if names == ["."] else f": {listed(names, 4)}"
            raise FormatError(f"{named(folder)} has no config.json, so it is not a model folder. {advice}{shown}.")
    raise FormatError(f"{named(folder)} has no config.json, so it is not a model folder.")


def safetensors_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder: those of its index, or all.

    An index that does not name the model.safetensors next to it is out of date.
    """
    index, single = folder / INDEX, folder / SINGLE
    files = sorted(folder.glob("*.safetensors"))
    if index.exists():
        wanted = sorted(set(read_index(index, folder).values()))
        if single.exists() and SINGLE not in wanted:
            return [single]
        missing = [name for name in wanted if not (folder / name).exists()]
        if missing:
            raise FormatError(f"{named(index)} lists files that do not exist: {listed(missing)}.")
        files = [folder / name for name in wanted]
    if not files:
        others = sorted(each.name for pattern in OLD_WEIGHTS for each in folder.glob(pattern))
        instead = f" It has {listed(others, 4)}; such weights are not read." if others else ""
        raise FormatError(f"{named(folder)} has no .safetensors file.{instead}")
    return files


def gguf_parts(path: Path) -> list[Path]:
    """Return all files of a split GGUF model, given any of them; otherwise the file itself."""
    found = SPLIT.fullmatch(path.name)
    if found is None:
        return [path]
    stem, number, count = found[1], int(found[2]), int(found[3])
    if not 1 <= number <= count:
        raise FormatError(f"{named(path)} says that it is file {number} of {count}. Restore its name.")
    paths = [path.with_name(f"{stem}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    if missing := [each.name for each in paths if not each.exists()]:
        raise FormatError(f"{named(path)} is one of {len(paths)} files, and these are missing: {listed(missing)}.")
    return paths


def find_projectors(model: Path) -> list[Path]:
    """Return the mmproj files beside a GGUF model, the preferred format first."""
    files = [each for each in model.parent.glob("*.gguf") if PROJECTOR.search(each.name) and each != model]
    return sorted(files, key=lambda each: (projector_rank(each.name), each.name))


def projector_rank(name: str) -> int:
    """Return the place of a tower's format, which its file's name says, among `PROJECTOR_FORMATS`."""
    words = re.split(r"[-_.]", name.upper())
    return next((place for place, kind in enumerate(PROJECTOR_FORMATS) if kind in words), len(PROJECTOR_FORMATS))


def _check_start(file: Path, magic: bytes | None) -> None:
    """Refuse a file that is empty, the pointer or the web page of a download that went wrong, or begins without the magic."""
    try:
        with file.open("rb") as opened:
            start = opened.read(32)
    except OSError as err:
        raise FormatError(f"{named(file)} cannot be read: {err.strerror or err}.") from err
    if not start:
        raise FormatError(f"{named(file)} is empty. Download it again.")
    if start.startswith(LFS_POINTER):
        raise FormatError(f"{named(file)} is a Git LFS pointer, not the weights. Run 'git lfs pull' in its folder.")
    if start.lower().startswith(WEB_PAGES):
        raise FormatError(f"{named(file)} is a web page, not the weights. Download the file itself.")
    if magic is not None and not start.startswith(magic):
        raise FormatError(f"{named(file)} is not a GGUF file: it begins with {start[:4]!r}, not {magic!r}.")
