"""Which builds of kernels a call launches, found without a GPU and without computing anything.

The op's CUDA function runs on CPU tensors that pass for a GPU's, and its launches go to a list. Triton itself says which build
each of them means: types, multiples of 16, what is constant. Large tensors are never filled (see `Unfilled`), so a real model's
weights cost nothing.
"""

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from auraflux.ops._cases import Args, Case, in_row_order
from auraflux.ops._dispatch import Declined, exact, invariant
from auraflux.ops.assumed import AMPERE, HOPPER, assume_gpu
from auraflux.ops.hopper.launch import diverted
from auraflux.ops.unfilled import Unfilled

TARGET = GPUTarget("cuda", 90, 32)
ALIGNED = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class Build:
    """One specialisation of a kernel, as Triton compiles it for a launch.

    kernel      of a module: "auraflux.ops.norm.cuda:_rms"
    signature   types of the arguments by name, those of a tuple in a tuple; "constexpr" for those that are constant
    constants   values of these, by place; a member of a tuple has the tuple's place and its own
    attributes  what is known of the others, by place: multiples of 16
    options     of the launch: num_warps, num_stages, maxnreg
    """

    kernel: str
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], list[Any]]
    options: dict[str, Any]

    @property
    def family(self) -> str:
        return self.kernel.split(".")[2]

    @property
    def types(self) -> list[str]:
        """Types in order of what is not constant: i32:16 is a multiple of 16, and so are pointers but for *bf16:1."""
        return [self._type(place, kind) for place, kind in _leaves(self.signature.values()) if kind != "constexpr"]

    @property
    def name(self) -> str:
        """The kernel, types, constants, options."""
        constants = [each for place, value in self.constants.items() for each in _assigned(self._name_at(place), value)]
        options = [f"{name}={value}" for name, value in self.options.items()]
        return " ".join([self.kernel.rpartition(":")[2], *self.types, *constants, *options])

    def _type(self, place: tuple[int, ...], kind: str) -> str:
        aligned = self.attributes.get(place) == ALIGNED
        return kind + (":1" * (not aligned) if kind.startswith("*") else ":16" * aligned)

    def _name_at(self, place: tuple[int, ...]) -> str:
        """What an argument is called: a, a.b as a member of a named tuple, or a.0 as one of a tuple without names."""
        kinds: Any
        name, kinds = list(self.signature.items())[place[0]]
        for at in place[1:]:
            name, kinds = f"{name}.{getattr(kinds, '_fields', range(len(kinds)))[at]}", kinds[at]
        return name

    def find(self) -> Any:
        """The kernel itself."""
        module, _, name = self.kernel.partition(":")
        return getattr(importlib.import_module(module), name)


def _leaves(kinds: Iterable[Any], place: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], str]]:
    """The types of arguments with their places, members of tuples one by one."""
    for at, kind in enumerate(kinds):
        if isinstance(kind, tuple):
            yield from _leaves(kind, (*place, at))
        else:
            yield (*place, at), kind


def _assigned(name: str, value: Any) -> list[str]:
    """A constant with its value; of a named tuple every member."""
    if not hasattr(value, "_fields"):
        return [f"{name}={value}"]
    members = zip(value._fields, value, strict=True)
    return [each for member, its in members for each in _assigned(f"{name}.{member}", its)]


class CompileOnly:
    """Stands in for the driver of a GPU, of which Triton only asks what to compile for."""

    def get_current_target(self) -> GPUTarget:
        return TARGET


def build_of(kernel: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Build:
    """The build that a launch means; every step is Triton's own, as `JITFunction.run` takes them."""
    # made once for a device: this one has a name of its own
    *_, backend, binder = kernel.device_caches[TARGET]
    bound, specialization, options = binder(*args, **named)
    _, signature, constants, attributes = kernel._pack_args(backend, named, bound, specialization, options)
    return Build(f"{kernel.fn.__module__}:{kernel.fn.__name__}", signature, constants, attributes, options)


@contextmanager
def captured() -> Iterator[list[Build]]:
    """Collect the builds that are launched inside the block, each once."""
    known: set[str] = set()
    builds: list[Build] = []

    def receive(kernel: Any, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        build = build_of(kernel, args, named)
        if (key := repr(build)) not in known:
            known.add(key)
            builds.append(build)

    before = driver._active
    driver.set_active(CompileOnly())
    try:
        with diverted(receive), Unfilled():
            yield builds
    finally:
        driver._active = before


def launched(case: Case) -> tuple[list[Build], list[Build]]:
    """The builds that a case launches on Hopper, and on the oldest GPU that is served; then those inside `invariant`."""
    kernel = case.op.kernel("cuda")
    if kernel is None:
        return [], []
    with captured() as builds:
        with assume_gpu(HOPPER):
            args = in_row_order(case.args())
        _call(kernel, case, args)
    with captured() as alike, invariant():
        _call(kernel, case, args)
    return builds, alike


def _call(kernel: Any, case: Case, args: Args) -> None:
    for capability in (HOPPER, AMPERE):
        with assume_gpu(capability), exact(case.exact), suppress(Declined):
            kernel(**args)
