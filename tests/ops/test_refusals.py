"""Invalid arguments are refused before a kernel runs, on every backend with the same sentence."""

from collections.abc import Callable

import pytest
import torch

from auraflux.errors import AurafluxError, InputError
from auraflux.ops import (
    attention,
    collapse_streams,
    combine,
    delta_gates,
    delta_layer_step,
    embed,
    gated_rms_norm,
    grow_queries,
    latent_query,
    linear,
    merge_partials,
    norm_rope,
    qk_norm,
    rms_norm,
    rope,
    rotate,
    sample,
    sigmoid_gate,
    split_latent,
    split_q_gate,
    swiglu,
    turboquant_attention,
    turboquant_values,
)
from auraflux.ops._dispatch import use_backend
from auraflux.ops.attention.pages import KVPages
from auraflux.ops.delta.cases import CASES as DELTA
from auraflux.ops.moe.experts import Experts, SharedExpert
from auraflux.ops.moe.routing import Routing
from auraflux.ops.turboquant.calibration import Calibration
from auraflux.ops.turboquant.cases import CASES as TURBOQUANT
from auraflux.ops.turboquant.codebook import Codebook
from auraflux.ops.turboquant.full_precision import FullPrecisionKV
from auraflux.quant import QTensor, quantize

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
    "seed": (lambda: rotate(ROWS, 1.5), r"'seed' is 1\.5; an integer"),
    "nope": (lambda: split_latent(torch.ones(1, 8), torch.ones(1, 24), 1, -1), "1 heads of -1"),
    "rms_norm": (lambda: rms_norm(ROWS, torch.ones(8), -1e-6), "'eps' is -1e-06"),
    "rms_norm nan": (lambda: rms_norm(ROWS, torch.ones(8), float("nan")), "'eps' is nan"),
    "gated_rms_norm": (lambda: gated_rms_norm(ROWS, ROWS, torch.ones(8), -1.0), "'eps' is -1"),
    "qk_norm": (lambda: qk_norm(ROWS, ROWS, -1.0), "'eps' is -1"),
    "norm_rope": (lambda: norm_rope(heads(), heads(), *TURN, (torch.ones(8), torch.ones(8)), -1.0), "'eps' is -1"),
    "temperature": (lambda: chosen(temperature=-ONE), "'temperature' is -1.0 for a row"),
    "top_p": (lambda: chosen(top_p=ONE * float("nan")), "'top_p' is nan for a row"),
    "min_p": (lambda: chosen(min_p=-ONE), "'min_p' is -1.0 for a row"),
    "no blocks": (lambda: merge_partials(torch.ones(2, 0, 8), torch.ones(2, 0), torch.ones(2, 0)), "at least one block"),
    "ids": (lambda: embed(torch.zeros(2, 2).int(), torch.ones(4, 8)), r"'ids' has shape \[2, 2\]"),
    "rounds": (
        lambda: collapse_streams(torch.ones(1, 1, 8), torch.ones(1, 3), torch.ones(3), torch.ones(3), 1e-6, 1 << 31),
        "rounds is 2147483648; it must be from 1 to 1000",
    ),
    "window": (
        lambda: attention(heads(), pages(), torch.tensor([0, 2]).int(), 1.0, window=2.5),
        "'window' is 2.5; an integer or None is needed",
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


def test_limits_are_allowed():
    assert rms_norm(ROWS, torch.ones(8), 0.0).tolist() == ROWS.tolist()
    assert chosen(temperature=0 * ONE, top_p=0 * ONE).tolist() == [0]
    assert attention(heads(), pages(), torch.tensor([0, 2]).int(), 1.0, window=0).abs().sum() == 0


def codes(**changed: object) -> QTensor:
    made = quantize(torch.ones(4, 64), 4, 64)
    return QTensor(**{name: getattr(made, name) for name in made.__dataclass_fields__} | changed)


def stacks(**changed: object) -> Experts:
    return Experts(**{name: torch.ones(2, 8, 8) for name in ("gate", "up", "down")} | changed)


def vectors(**changed: object) -> Calibration:
    rows = {name: torch.ones(1, 8) for name in ("scale", "inverse", "along", "across")}
    return Calibration(**rows | {"table": torch.ones(1, 2, 8)} | changed)


HALF = torch.ones(8, dtype=torch.complex64)
SPARSE, SHAPE = torch.ones(8).to_sparse(), torch.ones(8, device="meta")
ODD: dict[str, tuple[Callable[[], object], str]] = {
    "complex": (lambda: delta_gates(ROWS, ROWS, HALF, HALF), "'a_log' has dtype complex64; real numbers"),
    "complex bias": (lambda: linear(torch.ones(1, 64), codes(), torch.ones(4).to(HALF.dtype)), "'bias' has dtype complex64"),
    "complex in a tuple": (lambda: norm_rope(heads(), heads(), *TURN, (HALF, HALF), 1e-6), "'norms' has dtype complex64"),
    "sparse": (lambda: sigmoid_gate(ROWS, ROWS.to_sparse()), r"'gate' \(2, 8\) is not contiguous"),
    "sparse in a tuple": (
        lambda: norm_rope(heads(), heads(), *TURN, (SPARSE, SPARSE), 1e-6),
        r"'weight' \(8,\) is not contiguous",
    ),
    "sparse codes": (lambda: codes(scales=torch.ones(4, 1).to_sparse()), "'scales' is a tensor of layout sparse_coo"),
    "sparse biases": (lambda: stacks(up_bias=torch.ones(2, 8).to_sparse()), "'up_bias' is a tensor of layout sparse_coo"),
    "meta": (
        lambda: sigmoid_gate(ROWS, torch.ones(2, 16, device="meta")[:, ::2]),
        "'gate' is on meta, the first argument on cpu",
    ),
    "meta first": (
        lambda: sigmoid_gate(ROWS.to("meta"), ROWS.T.contiguous().T),
        "'gate' is on cpu, the first argument on meta",
    ),
    "meta in a tuple": (
        lambda: norm_rope(heads(), heads(), *TURN, (SHAPE, SHAPE), 1e-6),
        "'weight' is on meta, the first argument on cpu",
    ),
    "meta codes": (lambda: linear(torch.ones(1, 64), codes().to("meta")), "'weight' is on meta, the first argument on cpu"),
    "beyond 64 bits": (lambda: split_q_gate(torch.ones(5, 0), 10**30), "'heads' is an integer of 100 bits"),
    "beyond 64 bits in settings": (lambda: Routing(1 << 63, "softmax", True), "'k' is an integer of 64 bits"),
    "a number for a tensor": (lambda: vectors(inverse=1.5), "'inverse' is 1.5; a tensor is needed"),
    "a dict for a tensor": (lambda: vectors(table={}), "'table' is of type dict; a tensor is needed"),
    "a tensor for pages": (
        lambda: FullPrecisionKV(ROWS, None, 0),
        "'head' is of type Tensor; KVPages or RowPages or None is needed",
    ),
    "positions without memory": (
        lambda: grow_queries(torch.ones(2, 1, 8), torch.empty(2, dtype=torch.int32, device="meta"), 0.1, 4),
        "'positions' is on meta",
    ),
    "a latent's weight of integers": (
        lambda: latent_query(torch.ones(1, 2, 4), torch.ones(12, 8, dtype=torch.int64), 6),
        "'weight' has dtype int64",
    ),
    "levels without memory": (
        lambda: Codebook(torch.empty(16, device="meta")),
        "levels of a codebook are a meta tensor",
    ),
    "a long text": (lambda: Routing(1, "x" * 5000, True), "unknown scoring 'x{79}"),
}


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", ODD)
def test_tensors_and_numbers_that_no_kernel_takes_are_refused(name: str, backend: str):
    call, match = ODD[name]
    with use_backend(backend), pytest.raises(InputError, match=match) as refused:
        call()
    assert len(str(refused.value)) < 200


def test_meta_tensors_have_shapes():
    assert codes().to("meta").is_meta
    assert not codes().is_meta
    assert SharedExpert(codes().to("meta"), torch.ones(1), torch.ones(1)).is_meta
    with use_backend("reference"):
        assert rms_norm(ROWS.to("meta"), SHAPE, 1e-6).shape == ROWS.shape


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_no_ids_take_no_rows(backend: str):
    with use_backend(backend):
        assert embed(torch.empty(0, dtype=torch.int64), torch.ones(4, 63)).shape == (0, 63)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", ["full-precision-k4v4", "pairs-full-precision-k8v4"])
def test_full_precision_pages_outside_the_pool_are_refused(name: str, backend: str):
    args = next(case for case in TURBOQUANT if case.op is turboquant_attention and case.name == name).args()
    args["pages"].full_precision.recent.table.fill_(1 << 20)
    with use_backend(backend), pytest.raises(InputError, match="is 1048576 in the table; the pool has"):
        turboquant_attention(**args)


def test_lists_that_fitted_once_do_not_let_others_in():
    assert codes(shape=[4, 64]).shape == [4, 64]
    with pytest.raises(InputError, match="'shape' is a list of 2"):
        codes(shape=["4", "64"])


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", ["taps", "norm", "unit_eps", "eps"])
def test_a_delta_layer_that_is_refused_has_not_begun(name: str, backend: str):
    case = next(case for case in DELTA if case.op is delta_layer_step and case.name == "f32")
    args = case.args()
    args[name] = args[name].int() if isinstance(args[name], torch.Tensor) else -1.0
    before = {key: value.clone() for key, value in args.items() if isinstance(value, torch.Tensor)}
    with use_backend(backend), pytest.raises(AurafluxError):
        delta_layer_step(**args)
    assert all(value.equal(args[key]) for key, value in before.items())
