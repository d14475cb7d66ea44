"""Dispatch of ops to kernels by device.

`@op` makes a torch function the reference of an `Op`; the function of the same name in the sibling module or package `cpu` or
`cuda` is its kernel for that device, imported on first use. A kernel that does not support a call raises `Declined` before it
writes anything; the reference then runs, and the reason is logged once and shown by `auraflux ops`.
"""

import importlib
import inspect
import logging
import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from auraflux.errors import AurafluxError, BackendError, InputError
from auraflux.ops._recording import recorder
from auraflux.validation import Kinds

log = logging.getLogger("auraflux")

BACKENDS = ("reference", "cpu", "cuda")
COMPILERS = {"numba", "llvmlite", "triton"}
IMPORT_LOCK = threading.RLock()

# the default of a ContextVar applies to every thread
_env_backend = os.environ.get("AURAFLUX_BACKEND") or None
if _env_backend not in (None, *BACKENDS):
    raise BackendError(f"AURAFLUX_BACKEND is {_env_backend!r}. Choose one of: {', '.join(BACKENDS)}.")

_forced: ContextVar[str | None] = ContextVar("backend", default=_env_backend)
_activation_bits: ContextVar[int] = ContextVar("activation_bits", default=8)
_invariant: ContextVar[bool] = ContextVar("invariant", default=False)
_fp8_products: ContextVar[bool] = ContextVar("fp8_products", default=False)
_uncached: ContextVar[bool] = ContextVar("uncached", default=False)


def _warm_up_torch() -> None:
    """Call torch's transcendental functions once from a single thread.

    When two threads make the first call concurrently, one may run a less accurate implementation: half of an exp was off by
    1.5e-4, and correct in the next call (torch 2.13, x86, one of ten fresh processes).
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype)
        for function in (torch.exp, torch.log, torch.tanh, torch.sin, torch.cos):
            function(one)


_warm_up_torch()


class Declined(Exception):
    """Raised by a kernel that does not support a call; the message says why."""


class Op:
    """One operation: its reference, its kernels and the reasons for which they declined calls."""

    def __init__(self, reference: Callable[..., Any], origins: tuple[str, ...], check: Callable[..., None] | None):
        self.reference = reference
        self.check = check
        self.origins = origins
        self.name = reference.__name__
        self.family = reference.__module__.split(".")[-2]
        self.declined: dict[str, set[str]] = {}
        self._kernels: dict[str, Callable[..., Any] | None] = {"reference": None}
        # replays CPU calls of a known signature; takes the arguments and `exact`
        self._call_cache: Callable[[tuple[Any, ...], int], Any] | None = None
        self._first_parameter = next(iter(inspect.signature(reference).parameters))
        self.kinds = Kinds(reference)
        self.__doc__ = reference.__doc__
        self.__name__ = self.name
        self.__wrapped__ = reference

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call_cache = self._call_cache
        if call_cache is None or kwargs or recorder or _forced.get() is not None or _uncached.get():
            return self.run(*args, **kwargs)
        return call_cache(args, _activation_bits.get())

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Check the arguments, then run the kernel, or the reference if there is none or it declines."""
        kinds, values, key = self.kinds, args, tuple(map(type, args))
        if kwargs or kinds.lists:
            values, key = kinds.spread(args, kwargs)
        validate = kinds.fitting.get(key)
        if validate is None:
            kinds.check(args, kwargs)
            validate = kinds.accept(key, values)
        if not validate(values):
            kinds.refuse(args, kwargs)
        if self.check is not None:
            try:
                if recorder and (recording := recorder.recording) is not None:
                    # values that checks read are not part of the recording
                    with recording.paused():
                        self.check(*args, **kwargs)
                else:
                    self.check(*args, **kwargs)
            except (AurafluxError, MemoryError):
                raise
            # inspecting a tensor may fail: sparse, without storage, or with too few dimensions
            except Exception as err:
                kinds.refuse(args, kwargs)
                raise InputError(f"{self.name}: inconsistent arguments: {brief(err)}.") from err
        backend = _forced.get()
        first = args[0] if args else kwargs[self._first_parameter]
        if backend is None:
            backend = "cpu" if first.is_cpu else first.device.type
        elif backend == "cpu" and not first.is_cpu:
            raise InputError(f"{self.name}: the cpu backend is forced, but '{self._first_parameter}' is on {first.device}.")
        try:
            kernel = self._kernels[backend]
        except KeyError:
            kernel = self.kernel(backend)
        try:
            if kernel is not None:
                try:
                    return kernel(*args, **kwargs)
                except Declined as reason:
                    self._refuse_invariant(backend, str(reason))
                    self._note(backend, str(reason))
            elif backend != "reference":
                self._refuse_invariant(backend, "no kernel")
            return self.reference(*args, **kwargs)
        except (AurafluxError, MemoryError):
            raise
        except Exception as err:
            kinds.refuse(args, kwargs)
            # torch has no exception class for a number too large for a dtype or shape
            if not isinstance(err, OverflowError | struct.error) and "overflow" not in str(err).lower():
                raise
            raise InputError(f"{self.name}: a number is too large: {brief(err)}.") from err

    def _refuse_invariant(self, backend: str, reason: str) -> None:
        """Refuse to run the reference on a GPU in invariant mode: torch's matrix products are not batch-invariant."""
        if backend == "cuda" and _invariant.get():
            raise InputError(f"{self.name}: no batch-invariant kernel for this call ({reason}). Run without --invariant.")

    def kernel(self, backend: str) -> Callable[..., Any] | None:
        """Return the kernel for a backend, or None when there is none."""
        if backend not in self._kernels:
            # concurrent circular imports would see half-initialized modules
            with IMPORT_LOCK:
                self._kernels[backend] = self._find(backend) if backend in BACKENDS else None
                if backend == "cpu" and self._kernels[backend] is not None:
                    # imported late: it needs Numba, which a CPU kernel has imported
                    from auraflux.ops.simd.replay.call_cache import CallCache

                    self._call_cache = CallCache(self.run)
        return self._kernels[backend]

    def backends(self) -> list[str]:
        return ["reference"] + [name for name in BACKENDS[1:] if self.kernel(name) is not None]

    def _find(self, backend: str) -> Callable[..., Any] | None:
        module = f"{self.reference.__module__.rpartition('.')[0]}.{backend}"
        try:
            return getattr(importlib.import_module(module), self.name, None)
        except ModuleNotFoundError as err:
            if err.name == module:
                return None
            if err.name is not None and err.name.split(".")[0] in COMPILERS:
                self._note(backend, f"{err.name} is not installed")
                return None
            raise

    def _note(self, backend: str, reason: str) -> None:
        reasons = self.declined.setdefault(backend, set())
        if reason not in reasons:
            reasons.add(reason)
            log.warning("%s: the %s kernel declined (%s); the reference runs instead", self.name, backend, reason)

    def __repr__(self) -> str:
        return f"<op {self.family}.{self.name}>"


OPS: dict[str, Op] = {}


def op(*, origins: tuple[str, ...] = (), check: Callable[..., None] | None = None) -> Callable[[Callable[..., Any]], Op]:
    """Make a torch function the definition of an op.

    origins  the corresponding kernels of moeflux, metaltile and mlx-native
    check    called with the same arguments first; raises InputError, so that kernels see only valid shapes
    """

    def wrap(reference: Callable[..., Any]) -> Op:
        made = Op(reference, origins, check)
        if made.name in OPS:
            raise ValueError(f"two ops are named {made.name!r}: {OPS[made.name]!r} and {made!r}")
        OPS[made.name] = made
        return made

    return wrap


def all_ops() -> list[Op]:
    """Return every op, sorted by family and name."""
    for family in families():
        importlib.import_module(f"auraflux.ops.{family}.reference")
    return sorted(OPS.values(), key=lambda o: (o.family, o.name))


def families() -> list[str]:
    return sorted(path.parent.name for path in Path(__file__).parent.glob("*/reference.py"))


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run the ops inside the block on the named backend, regardless of the device of their arguments."""
    if name not in BACKENDS:
        raise BackendError(f"unknown backend {name!r}. Choose one of: {', '.join(BACKENDS)}.")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


@contextmanager
def exact(on: bool = True) -> Iterator[None]:
    """Multiply float32 activations inside the block; outside, CPU kernels quantize them to int8 per group first."""
    with activation_bits(32 if on else 8):
        yield


@contextmanager
def activation_bits(bits: int) -> Iterator[None]:
    """Quantize activations to 8 or 16 bits in CPU kernels inside the block, or multiply float32 with 32."""
    token = _activation_bits.set(bits)
    try:
        yield
    finally:
        _activation_bits.reset(token)


def is_exact() -> bool:
    return _activation_bits.get() == 32


def current_activation_bits() -> int:
    return _activation_bits.get()


@contextmanager
def invariant(on: bool = True) -> Iterator[None]:
    """Use only batch-invariant CUDA kernels inside the block: a token's result does not depend on the rest of the batch.

    CPU kernels are always batch-invariant.
    """
    token = _invariant.set(on)
    try:
        yield
    finally:
        _invariant.reset(token)


def is_invariant() -> bool:
    return _invariant.get()


@contextmanager
def fp8_products(on: bool = True) -> Iterator[None]:
    """Let CUDA kernels round the operands of linear layers of hundreds of tokens to FP8 inside the block."""
    token = _fp8_products.set(on)
    try:
        yield
    finally:
        _fp8_products.reset(token)


def rounds_to_fp8() -> bool:
    return _fp8_products.get()


@contextmanager
def without_call_cache() -> Iterator[None]:
    """Bypass the cache of CPU calls (`simd/replay/call_cache.py`) inside the block."""
    token = _uncached.set(True)
    try:
        yield
    finally:
        _uncached.reset(token)


def brief(err: Exception) -> str:
    """Return the message of an exception in one line."""
    message = str(err).partition("Exception raised from")[0]
    return " ".join(message.split())[:300].rstrip(".") or type(err).__name__


def check_dense(**tensors: Any) -> None:
    """Refuse tensors that are not contiguous or not on the first one's device; skip None."""
    for tensor in tensors.values():
        # fast path: `is_cpu` is cheaper than `device`
        if tensor is not None and not (tensor.is_cpu and tensor.is_contiguous()):
            break
    else:
        return
    device = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if device is None:
            device = tensor.device
        elif tensor.device != device:
            raise InputError(f"'{name}' is on {tensor.device}, the first argument on {device}. Move one of them.")
        if not tensor.is_contiguous():
            shape, strides = tuple(tensor.shape), tensor.stride()
            raise InputError(f"'{name}' {shape} is not contiguous (strides {strides}). Call .contiguous() on it first.")


def check_heads(name: str, tensor: Any) -> None:
    """Refuse a tensor [T, H, D] unless it is contiguous or its heads are evenly strided."""
    if not tensor.is_contiguous():
        head_stride = tensor.stride(1)
        if tensor.stride(2) != 1 or (len(tensor) > 1 and tensor.stride(0) != tensor.shape[1] * head_stride):
            shape, strides = tuple(tensor.shape), tensor.stride()
            raise InputError(
                f"'{name}' {shape} has unevenly strided heads (strides {strides}). Call .contiguous() on it first."
            )


def check_shape(name: str, tensor: Any, *shape: int | None) -> None:
    """Refuse a tensor of another shape; None allows any size of that dimension."""
    found = tensor.shape
    if found == shape:
        return
    if len(found) == len(shape):
        for want, actual in zip(shape, found, strict=True):
            if want is not None and want != actual:
                break
        else:
            return
    wanted = ", ".join("any" if n is None else str(n) for n in shape)
    raise InputError(f"'{name}' has shape {list(found)}; [{wanted}] is needed.")


def check_floating(**tensors: Any) -> None:
    """Refuse integers and booleans, whose dtype would truncate the result; skip None."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_floating_point():
            raise InputError(f"'{name}' has dtype {str(tensor.dtype).removeprefix('torch.')}; a floating-point one is needed.")


def check_dtype(name: str, tensor: Any, *dtypes: Any) -> None:
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise InputError(f"'{name}' has dtype {str(tensor.dtype).removeprefix('torch.')}; {wanted} is needed.")
