"""What no kernel should be given is refused before one runs, on every backend with the same sentence."""

from collections.abc import Callable

import pytest
import torch

from auraflux.errors import InputError
from auraflux.ops import (
    attention,
    combine,
    embed,
    gated_rms_norm,
    merge_partials,
    norm_rope,
    qk_norm,
    rms_norm,
    rope,
    rotate,
    sample,
    sigmoid_gate,
    split_latent,
    swiglu,
    turboquant_values,
)
from auraflux.ops._dispatch import use_backend
from auraflux.ops.attention.pages import KVPages

WHOLE = [torch.int32, torch.int64, torch.uint8, torch.bool]
ONE, ROWS = torch.ones(1), torch.ones(2, 8)


def heads(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(2, 1, 8).to(dtype)


def pages() -> KVPages:
    return KVPages(
        torch.ones(1, 1, 4, 8), torch.ones(1, 1, 4, 8), torch.zeros(1, 1, dtype=torch.int32), torch.tensor([2]).int()
    )


def chosen(**changed: torch.Tensor) -> torch.Tensor:
    settings = {"temperature": ONE, "top_k": ONE.int(), "top_p": ONE, "min_p": 0 * ONE}
    return sample(torch.ones(1, 4), uniform=0 * ONE, **settings | changed)


TURN = torch.ones(4), torch.arange(2)
TRUNCATED: dict[str, Callable[[torch.dtype], object]] = {
    "swiglu": lambda dtype: swiglu(ROWS.to(dtype), ROWS.to(dtype)),
    "swiglu's up": lambda dtype: swiglu(ROWS, ROWS.to(dtype)),
    "sigmoid_gate": lambda dtype: sigmoid_gate(ROWS.to(dtype), ROWS),
    "rope": lambda dtype: rope(heads(dtype), *TURN),
    "norm_rope": lambda dtype: norm_rope(heads(dtype), heads(dtype), *TURN),
    "combine": lambda dtype: combine(ROWS.to(dtype), ROWS),
    "combine's shared": lambda dtype: combine(ROWS, ROWS, ROWS.to(dtype)),
}
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "threshold": (
        lambda: turboquant_values(torch.ones(1, 2), torch.zeros(1, 2, 2).int(), torch.ones(1, 2), 4, 16, float("nan")),
        "'threshold' is nan",
    ),
    "seed": (lambda: rotate(ROWS, 1.5), r"'seed' is 1\.5; a whole number"),
    "nope": (lambda: split_latent(torch.ones(1, 8), torch.ones(1, 24), 1, -1), "1 heads of -1"),
    "rms_norm": (lambda: rms_norm(ROWS, torch.ones(8), -1e-6), "'eps' is -1e-06"),
    "rms_norm nan": (lambda: rms_norm(ROWS, torch.ones(8), float("nan")), "'eps' is nan"),
    "gated_rms_norm": (lambda: gated_rms_norm(ROWS, ROWS, torch.ones(8), -1.0), "'eps' is -1"),
    "qk_norm": (lambda: qk_norm(ROWS, ROWS, -1.0), "'eps' is -1"),
    "norm_rope": (lambda: norm_rope(heads(), heads(), *TURN, (torch.ones(8), torch.ones(8)), -1.0), "'eps' is -1"),
    "temperature": (lambda: chosen(temperature=-ONE), "'temperature' is -1.0 for a row"),
    "top_p": (lambda: chosen(top_p=ONE * float("nan")), "'top_p' is nan for a row"),
    "min_p": (lambda: chosen(min_p=-ONE), "'min_p' is -1.0 for a row"),
    "no blocks": (lambda: merge_partials(torch.ones(2, 0, 8), torch.ones(2, 0), torch.ones(2, 0)), "one block at least"),
    "ids": (lambda: embed(torch.zeros(2, 2).int(), torch.ones(4, 8)), r"'ids' has shape \[2, 2\]"),
    "window": (
        lambda: attention(heads(), pages(), torch.tensor([0, 2]).int(), 1.0, window=2.5),
        "'window' is 2.5; a whole number or None is needed",
    ),
}


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", WHOLE, ids=str)
@pytest.mark.parametrize("name", TRUNCATED)
def test_activations_that_are_no_floats_are_refused(name: str, dtype: torch.dtype, backend: str):
    with use_backend(backend), pytest.raises(InputError, match="a floating-point one is needed"):
        TRUNCATED[name](dtype)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", REFUSED)
def test_numbers_that_mean_nothing_are_refused(name: str, backend: str):
    call, match = REFUSED[name]
    with use_backend(backend), pytest.raises(InputError, match=match):
        call()


def test_what_is_just_allowed_is_not_refused():
    assert rms_norm(ROWS, torch.ones(8), 0.0).tolist() == ROWS.tolist()
    assert chosen(temperature=0 * ONE, top_p=0 * ONE).tolist() == [0]
    assert attention(heads(), pages(), torch.tensor([0, 2]).int(), 1.0, window=0).abs().sum() == 0
