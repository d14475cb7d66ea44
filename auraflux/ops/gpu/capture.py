"""Kernel variants that a call launches, found without a GPU and without computing anything.

The op's CUDA function runs on CPU tensors that pass for a GPU's, and its launches go to a list. Triton itself says which
variant each of them means: types, multiples of 16, constants. Large tensors are never filled (see `fake_tensor.py`), so the
weights of a real model cost nothing.
"""

import importlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime import driver

from auraflux.ops._cases import Case, in_row_layout
from auraflux.ops._dispatch import Declined, exact, invariant
from auraflux.ops.fake_gpu import AMPERE, HOPPER, Capability, fake_capability, use_fake_gpu
from auraflux.ops.fake_tensor import FakeTensors
from auraflux.ops.gpu.launch import redirect_launches

ALIGNED = [["tt.divisibility", 16]]
GPUS = HOPPER, AMPERE  # between them all kernels are launched


@dataclass(frozen=True)
class KernelVariant:
    """One specialisation of a kernel, as Triton compiles it for a launch.

    kernel      of a module: "auraflux.ops.norm.cuda:_rms"
    signature   types of the arguments by name, members of a tuple in a tuple; "constexpr" for constants
    constants   values of these, by position; a member of a tuple has the tuple's position and its own
    attributes  known properties of the others, by position: multiples of 16
    options     of the launch: num_warps, num_stages, maxnreg
    capability  of the GPU that launches it
    """

    kernel: str
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], list[Any]]
    options: dict[str, Any]
    capability: Capability = HOPPER

    @property
    def target(self) -> GPUTarget:
        return target_of(self.capability)

    @property
    def family(self) -> str:
        return self.kernel.split(".")[2]

    @property
    def types(self) -> list[str]:
        """Types of the arguments that are not constant: i32:16 is a multiple of 16, as are pointers except *bf16:1."""
        return [self._type(place, kind) for place, kind in _leaves(self.signature.values()) if kind != "constexpr"]

    @property
    def name(self) -> str:
        """Kernel, types, constants, options."""
        constants = [each for place, value in self.constants.items() for each in _assigned(self._name_at(place), value)]
        options = [f"{name}={value}" for name, value in self.options.items()]
        return " ".join([self.kernel.rpartition(":")[2], *self.types, *constants, *options])

    def _type(self, place: tuple[int, ...], kind: str) -> str:
        aligned = self.attributes.get(place) == ALIGNED
        return kind + (":1" * (not aligned) if kind.startswith("*") else ":16" * aligned)

    def _name_at(self, place: tuple[int, ...]) -> str:
        """Return an argument's name: a, a.b as a member of a named tuple, or a.0 of a tuple without names."""
        kinds: Any
        name, kinds = list(self.signature.items())[place[0]]
        for at in place[1:]:
            name, kinds = f"{name}.{getattr(kinds, '_fields', range(len(kinds)))[at]}", kinds[at]
        return name

    def find(self) -> Any:
        """Return the kernel itself."""
        module, _, name = self.kernel.partition(":")
        return getattr(importlib.import_module(module), name)

    def source(self) -> Any:
        """Return the kernel with its types and constants, as Triton compiles it."""
        from triton.compiler import ASTSource
        from triton.experimental.gluon._runtime import GluonASTSource

        kernel = self.find()
        make = GluonASTSource if kernel.is_gluon() else ASTSource
        return make(kernel, self.signature, self.constants, self.attributes)

    def parsed_options(self) -> dict[str, Any]:
        """Return all options, as Triton completes those of the launch."""
        return dict(make_backend(self.target).parse_options(dict(self.options)).__dict__)

    def compile(self) -> Any:
        """Compile the variant, or find it in Triton's cache; without a GPU too."""
        return triton.compile(self.source(), target=self.target, options=dict(self.options))


def _leaves(kinds: Iterable[Any], place: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield the types of arguments with their positions, members of tuples one by one."""
    for at, kind in enumerate(kinds):
        if isinstance(kind, tuple):
            yield from _leaves(kind, (*place, at))
        else:
            yield (*place, at), kind


def _assigned(name: str, value: Any) -> list[str]:
    """Return a constant with its value; of a named tuple every member."""
    if not hasattr(value, "_fields"):
        return [f"{name}={value}"]
    members = zip(value._fields, value, strict=True)
    return [each for member, its in members for each in _assigned(f"{name}.{member}", its)]


def target_of(capability: Capability) -> GPUTarget:
    """Return what Triton compiles for on a GPU."""
    major, minor = capability
    return GPUTarget("cuda", 10 * major + minor, 32)


class CompileOnly:
    """Stand-in for the driver of the fake GPU, which only says what to compile for."""

    def get_current_target(self) -> GPUTarget:
        return target_of(fake_capability() or HOPPER)


def variant_of(kernel: Any, args: tuple[Any, ...], named: dict[str, Any], device: int | None = None) -> KernelVariant:
    """Return the variant that a launch means; every step is Triton's own, as in `JITFunction.run`.

    device  number of the GPU; None for the fake one
    """
    # Triton caches these per device: the target is the key of the fake one
    *_, target, backend, binder = kernel.device_caches[target_of(fake_capability() or HOPPER) if device is None else device]
    capability: Any = divmod(target.arch, 10)
    bound, specialization, options = binder(*args, **named)
    _, signature, constants, attributes = kernel._pack_args(backend, named, bound, specialization, options)
    name = f"{kernel.fn.__module__}:{kernel.fn.__name__}"
    return KernelVariant(name, signature, constants, attributes, options, capability)


@contextmanager
def capture_variants() -> Iterator[list[KernelVariant]]:
    """Collect the variants launched inside the block, each once."""
    known: set[str] = set()
    variants: list[KernelVariant] = []

    def receive(kernel: Any, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        variant = variant_of(kernel, args, named)
        # the same for two GPUs is compiled for the first
        if (key := repr(replace(variant, capability=HOPPER))) not in known:
            known.add(key)
            variants.append(variant)

    before = driver._active
    driver.set_active(CompileOnly())
    try:
        with redirect_launches(receive), FakeTensors():
            yield variants
    finally:
        driver._active = before


def variants_of(case: Case, gpus: Sequence[Capability] = GPUS) -> tuple[list[KernelVariant], list[KernelVariant]]:
    """Return the variants that a case launches on some GPUs; then those inside `invariant`."""
    kernel = case.op.kernel("cuda")
    if kernel is None:
        return [], []
    with FakeTensors():
        made = {capability: _arguments(case, capability) for capability in gpus}
    with capture_variants() as variants:
        _call(kernel, case, made)
    with capture_variants() as invariants, invariant():
        _call(kernel, case, made)
    return variants, invariants


def _arguments(case: Case, capability: Capability) -> dict[str, Any]:
    with use_fake_gpu(capability):
        # pages of codes are arranged for the GPU
        return in_row_layout(case.args())


def _call(kernel: Any, case: Case, made: dict[Capability, dict[str, Any]]) -> None:
    for capability, args in made.items():
        with use_fake_gpu(capability), exact(case.exact), suppress(Declined):
            kernel(**args)
