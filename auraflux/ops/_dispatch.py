"""How a call to an op finds its kernel.

`@op` turns a torch function into an `Op`: the function is the op's meaning, and a function of the same name in the sibling
`cpu` or `cuda`, a module or a package, is its kernel for that device. Kernels are looked up on first use. One that cannot serve
a call raises `Declined` before it writes anything; the reference then runs and the reason is kept, logged once and shown by
`auraflux ops`.
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
from auraflux.kinds import Kinds
from auraflux.ops._recording import recorder

log = logging.getLogger("auraflux")

BACKENDS = ("reference", "cpu", "cuda")
COMPILERS = {"numba", "llvmlite", "triton"}
IMPORTING = threading.RLock()  # kernels

# from the environment, or None; a default reaches every thread
_wanted = os.environ.get("AURAFLUX_BACKEND") or None
if _wanted not in (None, *BACKENDS):
    raise BackendError(f"AURAFLUX_BACKEND is {_wanted!r}. It may be one of: {', '.join(BACKENDS)}.")

_forced: ContextVar[str | None] = ContextVar("backend", default=_wanted)
_exact: ContextVar[bool] = ContextVar("exact", default=False)
_invariant: ContextVar[bool] = ContextVar("invariant", default=False)


def _settle_torch() -> None:
    """Have torch choose its code for the exponential and its like, from one thread.

    Of two threads that make the first call together, one has been seen to get code of lower accuracy: its half of a
    reference's exp was wrong by 1.5e-4, and right in the next call (torch 2.13, x86, in one of ten fresh processes).
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype)
        for function in (torch.exp, torch.log, torch.tanh, torch.sin, torch.cos):
            function(one)


_settle_torch()


class Declined(Exception):
    """A kernel will not serve this call; the message says why."""


class Op:
    """One operation: its reference, its kernels, and what they declined."""

    def __init__(self, reference: Callable[..., Any], origins: tuple[str, ...], check: Callable[..., None] | None):
        self.reference = reference
        self.check = check
        self.origins = origins
        self.name = reference.__name__
        self.family = reference.__module__.split(".")[-2]
        self.declined: dict[str, set[str]] = {}
        self._kernels: dict[str, Callable[..., Any] | None] = {"reference": None}
        # makes calls of the CPU's kernel that are like earlier ones, see `simd/prepared.py`
        self._prepared: Callable[[tuple[Any, ...]], Any] | None = None
        self._first = next(iter(inspect.signature(reference).parameters))
        self.kinds = Kinds(reference)
        self.__doc__ = reference.__doc__
        self.__name__ = self.name
        self.__wrapped__ = reference

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        prepared = self._prepared
        if prepared is None or kwargs or recorder or _forced.get() is not None:
            return self.run(*args, **kwargs)
        return prepared(args)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Check the arguments, then have the kernel or the reference do its work."""
        kinds, values, key = self.kinds, args, tuple(map(type, args))
        if kwargs or kinds.lists:
            values, key = kinds.spread(args, kwargs)
        plain = kinds.fitting.get(key)
        if plain is None:
            kinds.check(args, kwargs)
            plain = kinds.keep(key, values)
        if not plain(values):
            kinds.refuse(args, kwargs)
        if self.check is not None:
            try:
                if recorder and (recording := recorder.recording) is not None:
                    # checks read values that need not be read again
                    with recording.paused():
                        self.check(*args, **kwargs)
                else:
                    self.check(*args, **kwargs)
            except (AurafluxError, MemoryError):
                raise
            # a tensor such that asking about it fails: sparse, without storage, with fewer dimensions than are asked for
            except Exception as err:
                kinds.refuse(args, kwargs)
                raise InputError(f"{self.name}: its arguments do not fit together: {brief(err)}.") from err
        backend = _forced.get()
        first = args[0] if args else kwargs[self._first]
        if backend is None:
            backend = "cpu" if first.is_cpu else first.device.type
        elif backend == "cpu" and not first.is_cpu:
            raise InputError(f"{self.name}: the cpu backend is forced, but '{self._first}' is on {first.device}.")
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
                self._refuse_invariant(backend, "it has no kernel")
            return self.reference(*args, **kwargs)
        except (AurafluxError, MemoryError):
            raise
        except Exception as err:
            kinds.refuse(args, kwargs)
            # torch has no class for a number that is too large for a tensor's dtype or shape
            if not isinstance(err, OverflowError | struct.error) and "overflow" not in str(err).lower():
                raise
            raise InputError(f"{self.name}: a number is too large: {brief(err)}.") from err

    def _refuse_invariant(self, backend: str, reason: str) -> None:
        """Refuse to run the reference on a GPU where results may not depend on company: torch's products there do."""
        if backend == "cuda" and _invariant.get():
            raise InputError(
                f"{self.name}: no kernel gives a token the same result in any company here ({reason}). Leave --invariant out."
            )

    def kernel(self, backend: str) -> Callable[..., Any] | None:
        """Find the kernel for a backend, or None when there is none."""
        if backend not in self._kernels:
            # two threads that import modules of one another would be given them half made
            with IMPORTING:
                self._kernels[backend] = self._find(backend) if backend in BACKENDS else None
                if backend == "cpu" and self._kernels[backend] is not None:
                    self._prepared = importlib.import_module("auraflux.ops.simd.prepared").Prepared(self)
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

    origins  the kernels of moeflux, metaltile and mlx-native that it stands for
    check    called with the same arguments first; raises InputError, so that no kernel ever sees a shape that does not fit
    """

    def wrap(reference: Callable[..., Any]) -> Op:
        made = Op(reference, origins, check)
        if made.name in OPS:
            raise ValueError(f"two ops are named {made.name!r}: {OPS[made.name]!r} and {made!r}")
        OPS[made.name] = made
        return made

    return wrap


def all_ops() -> list[Op]:
    """Every op of every family, in the order of their names within families."""
    for family in families():
        importlib.import_module(f"auraflux.ops.{family}.reference")
    return sorted(OPS.values(), key=lambda o: (o.family, o.name))


def families() -> list[str]:
    return sorted(path.parent.name for path in Path(__file__).parent.glob("*/reference.py"))


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run the ops inside the block on the named backend, whatever the device of their arguments."""
    if name not in BACKENDS:
        raise BackendError(f"there is no backend {name!r}. Those there are: {', '.join(BACKENDS)}.")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


@contextmanager
def exact(on: bool = True) -> Iterator[None]:
    """Inside the block kernels multiply float32 activations; outside, CPU kernels round them to int8 per group first."""
    token = _exact.set(on)
    try:
        yield
    finally:
        _exact.reset(token)


def is_exact() -> bool:
    return _exact.get()


@contextmanager
def invariant(on: bool = True) -> Iterator[None]:
    """Inside the block CUDA kernels are chosen by the kind of work: a token's result does not depend on others of the call.

    CPU kernels are always so.
    """
    token = _invariant.set(on)
    try:
        yield
    finally:
        _invariant.reset(token)


def is_invariant() -> bool:
    return _invariant.get()


def brief(err: Exception) -> str:
    """What torch or Python say, in one line."""
    said = str(err).partition("Exception raised from")[0]
    return " ".join(said.split())[:300].rstrip(".") or type(err).__name__


def check_dense(**tensors: Any) -> None:
    """Refuse tensors that are not contiguous or not on the first one's device; None is passed over."""
    for tensor in tensors.values():
        # most calls end here: a device costs more to ask for than `is_cpu`
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
    """Refuse a tensor [T, H, D] that is not contiguous, unless only its heads lie apart, all at one distance."""
    if not tensor.is_contiguous():
        between = tensor.stride(1)
        if tensor.stride(2) != 1 or (len(tensor) > 1 and tensor.stride(0) != tensor.shape[1] * between):
            shape, strides = tuple(tensor.shape), tensor.stride()
            raise InputError(f"'{name}' {shape} has no even heads (strides {strides}). Call .contiguous() on it first.")


def check_shape(name: str, tensor: Any, *shape: int | None) -> None:
    """Refuse a tensor whose shape is not the given one; None in a place allows any size there."""
    found = tensor.shape
    if found == shape:
        return
    if len(found) == len(shape):
        for want, have in zip(shape, found, strict=True):
            if want is not None and want != have:
                break
        else:
            return
    wanted = ", ".join("any" if n is None else str(n) for n in shape)
    raise InputError(f"'{name}' has shape {list(found)}; [{wanted}] is needed.")


def check_floating(**tensors: Any) -> None:
    """Refuse whole numbers and booleans, which a result in their dtype would truncate; None is passed over."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_floating_point():
            raise InputError(f"'{name}' has dtype {str(tensor.dtype).removeprefix('torch.')}; a floating-point one is needed.")


def check_dtype(name: str, tensor: Any, *dtypes: Any) -> None:
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise InputError(f"'{name}' has dtype {str(tensor.dtype).removeprefix('torch.')}; {wanted} is needed.")
