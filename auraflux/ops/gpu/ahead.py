"""Kernels compiled on all cores, before the steps that launch them run.

Steps run without launching: the variant of each launch goes to processes that compile it into Triton's cache, unless it is
there (`compile_process.py`). Outputs of kernels are zeros, so that indices computed from them by torch stay in range; tables
that are computed once and cached come from torch, and are correct.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch import Tensor
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.compiler.compiler import make_backend
from triton.runtime import driver
from triton.runtime.cache import get_cache_key, get_cache_manager

from auraflux.errors import BackendError
from auraflux.machine import usable_cores
from auraflux.ops.gpu.capture import KernelVariant, variant_of
from auraflux.ops.gpu.compile_process import Compiled, CompileProcess, build_launcher, has_launcher
from auraflux.ops.gpu.launch import TRITON_VERSION, redirect_launches, supported_options
from auraflux.ops.gpu.prebuilt import installed_for

log = logging.getLogger("auraflux")

# functions of torch that leave memory uninitialised
EMPTY = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (Tensor, "new_empty"),
    (Tensor, "new_empty_strided"),
)


@contextmanager
def zeroed_empty_tensors() -> Iterator[None]:
    """Make torch's uninitialised tensors zeros inside the block.

    A dispatch mode would do the same, and import torch's compiler for seconds.
    """

    def zeroed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **named: function(*args, **named).zero_()

    own = [(place, name, vars(place).get(name)) for place, name in EMPTY]
    for place, name, _ in own:
        setattr(place, name, zeroed(getattr(place, name)))
    try:
        yield
    finally:
        for place, name, before in own:
            if before is None:
                # inherited again
                delattr(place, name)
            else:
                setattr(place, name, before)


class Compiler:
    """Compiles what is neither prebuilt nor cached, in a process that is started for the first such kernel.

    compiled  names of the kernels that were compiled
    begun     number of kernels of which anything had to be compiled
    """

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.begun = 0
        self._process: CompileProcess | None = None
        self._threads = ThreadPoolExecutor(usable_cores())
        self._known: set[str] = set()
        self._waiting: list[Future[Compiled]] = []

    def add(self, variant: KernelVariant) -> None:
        """Begin to compile a variant, unless it is cached."""
        if (key := repr(variant)) in self._known:
            return
        self._known.add(key)
        if (prebuilt := load_prebuilt(variant)) is not None:
            # its launcher depends on the version of Python
            if not has_launcher(prebuilt.src, prebuilt.metadata):
                self.begun += 1
                self._waiting.append(self._threads.submit(_with_launcher, prebuilt))
            return
        if is_cached(variant):
            return
        self.begun += 1
        if self._process is None:
            self._process = CompileProcess(usable_cores())
        try:
            self._waiting.append(self._process.submit(variant))
        # what cannot be sent is compiled when it is launched
        except (BackendError, TypeError, AttributeError, ValueError) as err:
            log.debug("%s is not compiled ahead: %s", variant.name, err)

    def wait(self, report: Callable[[int, int], None]) -> None:
        """Wait for all kernels; errors are raised again when the kernels are launched.

        report  called with the number of kernels compiled, and of all
        """
        waiting, self._waiting = self._waiting, []
        for done, future in enumerate(as_completed(waiting)):
            compiled = future.result()
            if compiled.error is not None:
                log.debug("a kernel was not compiled ahead: %s", compiled.error)
            elif compiled.name is not None:
                self.compiled.append(compiled.name)
            report(done, len(waiting))

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        if self._process is not None:
            self._process.close()
            self._process = None


@contextmanager
def compiler() -> Iterator[Compiler]:
    """Yield a compiler whose processes end with the block."""
    made = Compiler()
    try:
        yield made
    finally:
        made.close()


@contextmanager
def compile_launches_ahead(compiler: Compiler) -> Iterator[list[str]]:
    """Compile the kernels launched inside the block without launching them, also after its end.

    Yields a list to which a key of the kernel of every launch is added.
    """
    known: set[str] = set()
    launched: list[str] = []
    device = driver.active.get_current_device()

    def receive(kernel: Any, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        named = supported_options(named)
        _, specialization, options = kernel.device_caches[device][-1](*args, **named)
        launched.append(f"{id(kernel)} {specialization} {options}")
        if launched[-1] not in known:
            known.add(launched[-1])
            compiler.add(variant_of(kernel, args, named, device))

    with redirect_launches(receive), zeroed_empty_tensors():
        yield launched


def load_prebuilt(variant: KernelVariant) -> Any:
    """Load a variant of the installed prebuilt kernels; None if they lack it."""
    prebuilt = installed_for(variant.target.arch)
    return None if prebuilt is None else prebuilt.load(variant.source(), variant.parsed_options())


def _with_launcher(compiled: Any) -> Compiled:
    build_launcher(compiled.src, compiled.metadata)
    return Compiled()


def is_cached(variant: KernelVariant) -> bool:
    """Return whether Triton's cache has the machine code of a variant."""
    source, backend = variant.source(), make_backend(variant.target)
    options = backend.parse_options(dict(variant.options))
    key = get_cache_key(source, backend, options, env_vars=get_cache_invalidating_env_vars())
    name = f"{source.name[:150]}.json"
    return name in (get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).get_group(name) or {})


def is_supported() -> bool:
    """Return whether this version of Triton can compile launches ahead."""
    return triton.__version__.startswith(TRITON_VERSION)
