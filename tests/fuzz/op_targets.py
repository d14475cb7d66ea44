"""Op calls with mutated arguments; a refused call changes neither its arguments nor later results."""

import copy
import random
import warnings
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from auraflux.errors import AurafluxError
from auraflux.ops._cases import Args, Case, all_cases
from auraflux.ops._dispatch import Op, exact, use_backend
from tests.fuzz.harness import Target
from tests.fuzz.mutate import odd

LARGEST = 1 << 18  # total elements of a case's arguments
DTYPES = [
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
]
NUMBERS = [0, -1, 1, 2, 3, 7, 10**6, 1 << 31, 1 << 63, -(1 << 63), 10**30, True, 0.5, -1.0, 1e300, float("nan"), float("inf")]


def tensors(value: Any) -> list[Tensor]:
    """List all tensors within a value."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in tensors(each)]
    if is_dataclass(value) and not isinstance(value, type):
        return [tensor for field in fields(value) for tensor in tensors(getattr(value, field.name))]
    return []


@cache
def by_op() -> dict[Op, list[Case]]:
    found: dict[Op, list[Case]] = {}
    for case in all_cases():
        if not (case.slow or case.bench):
            found.setdefault(case.op, []).append(case)
    return found


@cache
def args_of(case: Case) -> Args:
    return case.args()


def some_case(rng: random.Random) -> Case:
    """Return a random small case of a random op."""
    ours = rng.choice(list(by_op().values()))
    while True:
        case = rng.choice(ours)
        if sum(tensor.numel() for tensor in tensors(args_of(case))) < LARGEST:
            return case


def _sizes(rng: random.Random, x: Tensor) -> Tensor:
    """Return a tensor with another shape or layout."""
    ways: list[Callable[[], Tensor]] = [
        lambda: x.unsqueeze(0),
        lambda: x.flatten(),
        lambda: x[:0],
        lambda: x[:1],
        lambda: x[..., :1],
        lambda: x[..., ::2],
        lambda: x.transpose(0, -1),
        lambda: torch.cat([x, x]),
        lambda: torch.cat([x, x], -1),
        lambda: x.reshape(-1)[0],
        lambda: x[..., None].expand(*x.shape, 3),
        lambda: x.new_zeros(rng.choice([0, 1, 5]), rng.choice([0, 1, 5])),
    ]
    try:
        return rng.choice(ways)()
    except (IndexError, RuntimeError):
        return x.new_zeros(1)


def _values(rng: random.Random, x: Tensor) -> Tensor:
    """Return a tensor of the same shape with other values."""
    made = x.clone()
    if made.numel() and made.dtype != torch.bool:
        small = [-1, 0, 1, 2, 100]
        some = small if made.dtype in (torch.uint8, torch.int8) else [*small, 1 << 20, -(1 << 30), (1 << 31) - 1]
        some = [*some, float("nan"), float("inf"), -1e30] if made.is_floating_point() else some
        value = rng.choice(some)
        if made.dtype == torch.uint8:
            value = abs(value)
        made.view(-1)[rng.randrange(made.numel())] = value
    return made


def _tensor(rng: random.Random, x: Tensor) -> Any:
    how = rng.randrange(8)
    if how == 0:
        return x.to(rng.choice(DTYPES))
    if how <= 3:
        return _sizes(rng, x)
    if how == 4 and x.is_contiguous():
        return _values(rng, x)
    if how == 5:
        return rng.choice([x.to("meta"), x.to_sparse() if x.is_floating_point() and x.dim() else x, x.tolist()])
    return rng.choice([None, x.numpy() if x.dtype != torch.bfloat16 else None, *NUMBERS])


def changed(rng: random.Random, value: Any) -> Any:
    """Return a mutated argument, close to the original or arbitrary."""
    if rng.random() < 0.1:
        return odd(rng)
    if isinstance(value, Tensor):
        return _tensor(rng, value)
    if isinstance(value, int | float):
        return rng.choice(NUMBERS)
    if isinstance(value, list | tuple) and value:
        at = rng.randrange(len(value))
        return rng.choice(
            [value[1:], (*value, value[0]), (*value[:at], changed(rng, value[at]), *value[at + 1 :]), list(value), set()]
        )
    named = [field for field in fields(value) if field.init] if is_dataclass(value) and not isinstance(value, type) else []
    if named:
        field = rng.choice(named)
        return replace(value, **{field.name: changed(rng, getattr(value, field.name))})
    return odd(rng)


def called(case: Case, args: Args, backend: str) -> Any:
    with use_backend(backend), exact(case.exact), warnings.catch_warnings():
        warnings.simplefilter("error")
        return case.op(**args)


@cache
def expected_result(case: Case, backend: str) -> list[Tensor]:
    """Return a case's result and its arguments after the call."""
    args = copy.deepcopy(args_of(case))
    return tensors([called(case, args, backend), args])


def ops(rng: random.Random) -> None:
    case, backend, check_state = some_case(rng), rng.choice(["cpu", "cpu", "reference"]), rng.random() < 0.1
    if check_state:
        expected_result(case, backend)
    args = copy.deepcopy(args_of(case))
    for name in rng.sample(sorted(args), min(len(args), rng.choice([1, 1, 1, 2]))):
        if rng.random() < 0.05:
            args[rng.choice(["x", "out", "extra"])] = args.pop(name)
        else:
            args[name] = changed(rng, args[name])
    before = copy.deepcopy(tensors(args)) if check_state else []
    try:
        called(case, args, backend)
    except AurafluxError:
        assert all(map(_same, before, tensors(args))), f"{case.id}: a refused call changed its arguments"
        raise
    except Exception as err:
        given = {name: _summary(value) for name, value in args.items()}
        raise RuntimeError(f"{case.id} on {backend}: {type(err).__name__}: {str(err)[:150]} with {given}"[:900]) from err
    finally:
        if check_state:
            again = copy.deepcopy(args_of(case))
            found = tensors([called(case, again, backend), again])
            assert all(map(_same, expected_result(case, backend), found)), f"{case.id} gives a different result than before"


def _same(a: Tensor, b: Tensor) -> bool:
    if a.is_meta or a.is_sparse or a.numel() == 0:
        return True
    # bitwise, so that NaN equals itself
    return _bytes_of(a).equal(_bytes_of(b))


def _bytes_of(x: Tensor) -> Tensor:
    # the stride of a single element is arbitrary
    return x.flatten().clone().as_strided((x.numel(),), (1,)).view(torch.uint8)


def _summary(value: Any) -> str:
    if isinstance(value, Tensor):
        noncontiguous = value.layout == torch.strided and not value.is_contiguous()
        return f"{str(value.dtype)[6:]}{list(value.shape)}{' noncontiguous' if noncontiguous else ''}"
    return f"{type(value).__name__} {str(value)[:20]}" if not is_dataclass(value) else type(value).__name__


# the first call of a kernel compiles it
TARGETS = [Target("ops", ops, 150, 120.0, memory=2 << 30)]
