"""`find_quantizations`: the quantizations of a model that a repository of the Hugging Face hub, or a folder, offers."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from auraflux.errors import AurafluxError, FetchError, FormatError
from auraflux.weights.formats.headers import chosen_share, expert_share
from auraflux.weights.formats.model_files import SPLIT, read_config
from auraflux.weights.formats.untrusted import named

# parts of GGUF repositories that are not models
OTHERS = re.compile(r"mmproj|imatrix", re.IGNORECASE)
# such as 30B-A3B: parameters, and those that a token uses
SIZES = re.compile(r"(?<![\dA-Za-z.])(\d+(?:\.\d+)?)(B|T)(?:-?A(\d+(?:\.\d+)?)B)?(?![A-Za-z\d])", re.IGNORECASE)
USUAL_EXPERT_SHARE = 0.93  # of a mixture's bytes, where only its name is known


@dataclass(frozen=True)
class Mixture:
    """The division of a mixture's bytes.

    experts  share of routed experts in all bytes
    chosen   share of the experts that a token uses
    """

    experts: float
    chosen: float

    @property
    def active(self) -> float:
        """Share of the bytes that a token reads."""
        return 1 - self.experts * (1 - self.chosen)


@dataclass(frozen=True)
class Quantization:
    """One quantization of a model.

    name    that a command takes
    label   of the quantization, such as Q4_K_M
    files   of which it consists
    nbytes  of all of them
    """

    name: str
    label: str
    files: int
    nbytes: int


@dataclass(frozen=True)
class Offer:
    """The quantizations of one model.

    mixture     None for a model that reads all of its bytes for each token, as far as is known
    parameters  None where nothing tells them
    local       the files are here
    """

    quantizations: tuple[Quantization, ...]
    mixture: Mixture | None
    parameters: int | None
    local: bool


def find_quantizations(name: str) -> Offer:
    """Return what a folder, a file or a repository ("org/name") offers, the largest first."""
    path = Path(name).expanduser()
    if path.exists():
        return _of_folder(path)
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) is None:
        raise FormatError(
            f"there is no folder {named(name)!r:.200}, and it is no repository on the Hugging Face hub (org/name)."
        )
    return _of_hub(name)


def group_files(sizes: Iterable[tuple[str, int]], prefix: str) -> list[Quantization]:
    """Return the quantizations that files are: each GGUF file or split one, and all safetensors of a folder together.

    sizes   relative path and bytes of each file
    prefix  of the names
    """
    found: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for file, nbytes in sorted(sizes):
        path = PurePosixPath(file)
        split = SPLIT.fullmatch(path.name)
        if path.suffix.lower() == ".gguf" and not OTHERS.search(path.name):
            stem = path.stem if split is None else split[1]
            found.setdefault((str(path.parent / stem), "gguf"), []).append((file, nbytes))
        elif path.suffix == ".safetensors" and not path.name.startswith(("mtp", "adapter")):
            found.setdefault((str(path.parent), "safetensors"), []).append((file, nbytes))
    made = []
    for (stem, kind), files in found.items():
        total = sum(nbytes for _, nbytes in files)
        if kind == "gguf":
            made.append(Quantization(_joined(prefix, files[0][0]), _label(PurePosixPath(stem).name), len(files), total))
        else:
            label = "safetensors" if stem == "." else PurePosixPath(stem).name
            made.append(Quantization(prefix if stem == "." else _joined(prefix, stem), label, len(files), total))
    return sorted(made, key=lambda each: -each.nbytes)


def _joined(prefix: str, file: str) -> str:
    return f"{prefix}/{file}" if prefix else file


def _label(stem: str) -> str:
    """Return the quantization that a file's name says, such as UD-Q2_K_XL; else the name."""
    found = re.search(r"(?:UD-)?(?:IQ\d_\w+|TQ\d_\d|Q\d_\w+|[BF]F?16|F32|MXFP4\w*|NVFP4\w*)$", stem, re.IGNORECASE)
    return found[0] if found else stem


def _of_folder(path: Path) -> Offer:
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    root = path.parent if path.is_file() else path
    found = group_files(((str(each.relative_to(root)), each.stat().st_size) for each in files), str(root))
    if not found:
        raise FormatError(f"{named(path)} has neither GGUF files nor safetensors.")
    smallest = Path(found[-1].name)
    experts, parameters = expert_share(smallest)
    return Offer(tuple(found), None if experts is None else Mixture(*experts), parameters, local=True)


def _of_hub(repository: str) -> Offer:
    import huggingface_hub as hub

    try:
        about = hub.model_info(repository, files_metadata=True)
        sizes = [(each.rfilename, each.size or 0) for each in about.siblings or []]
        found = group_files(sizes, repository)
        if not found:
            raise FetchError(f"{repository} on the Hugging Face hub has neither GGUF files nor safetensors.")
        share = _chosen_share(repository, {name for name, _ in sizes})
    except AurafluxError:
        raise
    # the hub's client raises its own errors and those of its HTTP library
    except Exception as err:
        said = (str(err).strip().splitlines() or [type(err).__name__])[0].rstrip(".")
        raise FetchError(f"the files of {repository} could not be listed on the Hugging Face hub: {said}.") from err
    parameters, active = sizes_in_name(repository)
    mixture = None
    if share is not None:
        mixture = Mixture(USUAL_EXPERT_SHARE, share)
    elif parameters and active:
        chosen = (active / parameters - (1 - USUAL_EXPERT_SHARE)) / USUAL_EXPERT_SHARE
        mixture = Mixture(USUAL_EXPERT_SHARE, max(chosen, 0.005))
    return Offer(tuple(found), mixture, parameters, local=False)


def _chosen_share(repository: str, files: set[str]) -> float | None:
    """Return the share of experts that a token uses, from a repository's config.json; None if that does not tell."""
    import huggingface_hub as hub

    if "config.json" not in files:
        return None
    try:
        return chosen_share(read_config(Path(hub.hf_hub_download(repository, "config.json")).parent))
    except FormatError:
        return None


def sizes_in_name(name: str) -> tuple[int | None, int | None]:
    """Return the parameters that a model's name says, and those of a token: Qwen3-30B-A3B has 30 and 3 billion."""
    found = SIZES.search(name.rpartition("/")[2])
    if found is None:
        return None, None
    scale = 10**12 if found[2].upper() == "T" else 10**9
    return int(float(found[1]) * scale), None if found[3] is None else int(float(found[3]) * 10**9)
