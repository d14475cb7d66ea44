"""Prebuilt kernels: machine code that the package auraflux-kernels-cuda installs, loaded without Triton's compiler.

A folder is named after its GPU's architecture and a digest of the kernels' sources and Triton's version, so code of other
sources is never found. An entry is named after everything else that the machine code depends on: kernel, types of arguments,
constants, multiples of 16, options. It has the metadata that Triton's launch needs, and a digest of the machine code.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.compiler.compiler import CompiledKernel
from triton.runtime.jit import JITCallable

from auraflux.ops.gpu.as_gpu import VARIABLE

log = logging.getLogger("auraflux")

PACKAGE = "auraflux_kernels_cuda"
METADATA, CODE = ".json", ".cubin"
OPS = Path(__file__).parents[1]
SITE = OPS.parents[1]  # the folder that this package is in
PLAIN = (bool, int, float, str, type(None))
# folders and modules of ops that GPU kernels do not depend on
ELSEWHERE = {"cases", "cpu", "simd"}


def gpu_sources() -> list[Path]:
    """Return the modules that a GPU kernel may depend on: all ops except CPU kernels and test inputs."""
    found = (path for path in OPS.rglob("*.py") if not ELSEWHERE & {*path.relative_to(OPS).parts[:-1], path.stem})
    return sorted(path for path in found if not path.stem.endswith(("cases", "_inputs")))


@cache
def _sources_digest() -> str:
    digest = hashlib.sha256(triton.__version__.encode())
    for path in gpu_sources():
        source = path.read_bytes()
        digest.update(f"{path.relative_to(OPS).as_posix()} {len(source)}".encode() + source)
    return digest.hexdigest()[:16]


class Prebuilt:
    """The machine code of one architecture.

    folder  of its entries
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def find(self, source: Any, options: Mapping[str, Any]) -> dict[str, str] | None:
        """Return the files of a kernel's variant, as Triton names them; None if they are missing or corrupt."""
        # an unreadable entry is compiled, as an unknown one
        with suppress(OSError, ValueError, TypeError, KeyError):
            entry = entry_name(source, options)
            metadata, code = self.folder / f"{entry}{METADATA}", self.folder / f"{entry}{CODE}"
            if json.loads(metadata.read_text())["code_sha256"] == hashlib.sha256(code.read_bytes()).hexdigest():
                return {metadata.name: str(metadata), code.name: str(code)}
        return None

    def load(self, source: Any, options: Mapping[str, Any]) -> CompiledKernel | None:
        """Load a kernel's variant; None if it must be compiled."""
        if (files := self.find(source, options)) is None:
            return None
        with suppress(OSError, ValueError, TypeError, KeyError):
            return CompiledKernel(source, files, next(iter(files)))
        return None

    def save(self, source: Any, options: Mapping[str, Any], compiled: CompiledKernel) -> None:
        """Write an entry; the wheel is built."""
        entry, code = entry_name(source, options), compiled.asm["cubin"]
        [path] = [path for name, path in compiled.metadata_group.items() if name.endswith(METADATA)]
        # libraries are linked already, and their paths are of this machine
        metadata = json.loads(Path(path).read_text()) | {"extern_libs": [], "code_sha256": hashlib.sha256(code).hexdigest()}
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{entry}{CODE}").write_bytes(code)
        (self.folder / f"{entry}{METADATA}").write_text(json.dumps(metadata, sort_keys=True))


def entry_name(source: Any, options: Mapping[str, Any]) -> str:
    """Return the name of a variant's entry; raise TypeError if it cannot be told apart from others.

    source   kernel, types, constants and properties of arguments, as Triton compiles them
    options  all of Triton's, parsed
    """
    # a path of this machine; the libraries are Triton's own
    used = {name: value for name, value in options.items() if name != "extern_libs"}
    facts = (source.fn, source.signature, source.constants, source.attrs, used)
    return f"{source.name[:100]}.{hashlib.sha256(_described(facts).encode()).hexdigest()[:32]}"


def _described(value: Any) -> str:
    """Describe a value by type and content; the same in every process and folder."""
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{_described(key)}: {_described(each)}' for key, each in value.items()))}}}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(map(_described, value))})"
    if isinstance(value, JITCallable):
        return f"{value.fn.__module__}.{value.fn.__qualname__}"
    if isinstance(value, triton.language.constexpr):
        return f"constexpr({_described(value.value)})"
    if isinstance(value, triton.language.dtype):
        return f"dtype({value})"
    if is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__qualname__}({', '.join(f'{name}={_described(each)}' for name, each in vars(value).items())})"
    raise TypeError(f"{value!r} is neither a kernel nor a plain value")


def folder_name(arch: int) -> str:
    """Return the name of an architecture's folder, such as 90 for Hopper's."""
    return f"sm_{arch}-{_sources_digest()}"


@cache
def _is_installed() -> bool:
    return (SITE / PACKAGE).is_dir()


@cache
def installed_for(arch: int) -> Prebuilt | None:
    """Return the prebuilt kernels of an architecture; None if there are none for these sources and this Triton."""
    # the user chooses how Triton compiles, or another GPU's routes
    if knobs.compilation.always_compile or get_cache_invalidating_env_vars() or os.environ.get(VARIABLE):
        return None
    if not _is_installed():
        return None
    folder = SITE / PACKAGE / folder_name(arch)
    if not folder.is_dir():
        log.debug("%s has no kernels for sm_%d of these sources and triton %s", SITE / PACKAGE, arch, triton.__version__)
        return None
    return Prebuilt(folder)


def use_prebuilt(kernel: Any, device: int) -> None:
    """Have Triton load a kernel's prebuilt variants on a device before it compiles others."""
    if not _is_installed():
        return
    # looked up first: Triton sets the compiler when it sees a device for the first time
    *_, target, _, _ = kernel.device_caches[device]
    if not isinstance(kernel.compile, partial) and installed_for(target.arch) is not None:
        kernel.compile = partial(_load_or_compile, kernel.compile)


def _load_or_compile(
    compile_it: Callable[..., Any], source: Any, target: Any = None, options: Any = None, **others: Any
) -> Any:
    """Return a prebuilt variant, or else what Triton compiles."""
    prebuilt = None if target is None or options is None else installed_for(target.arch)
    found = None if prebuilt is None else prebuilt.load(source, options)
    return compile_it(source, target=target, options=options, **others) if found is None else found
