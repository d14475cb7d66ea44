"""What is timed on a GPU and beside what: the shapes, what they count, and peers that compute what our references do."""

import pytest
from torch.nn.attention import SDPBackend

from auraflux.bench.gpu.peers import PEERS, Peer, attention, linear, moe
from auraflux.bench.gpu.run import gpu_cases
from auraflux.errors import InputError
from auraflux.ops._cases import Case, relative_rms
from auraflux.ops._gpu_inputs import BF16, as_cached, experts, moe_flops, moe_nbytes, mx_product, product_of, routed
from auraflux.ops._gpu_inputs import moe as moe_args
from auraflux.ops.attention._latent_cases import latent_queries
from auraflux.ops.attention.cases import queries
from auraflux.ops.attention.reference import attention as attend_dense
from auraflux.ops.attention.reference import latent_attention
from auraflux.ops.gpu_cases import CASES
from auraflux.ops.linear.reference import linear as multiply
from auraflux.ops.moe.reference import expert_mlp
from auraflux.ops.moe.routing import Routing
from auraflux.ops.turboquant._inputs import attend
from auraflux.ops.turboquant.reference import turboquant_attention


def test_every_shape_of_the_table_is_there():
    ids = [case.id for case in CASES]
    assert len(ids) == len(set(ids))
    assert {"linear-4bit-8192x8192-2048", "turboquant_attention-k4v4-8x32k", "mixture-one-token"} <= set(ids)
    assert {"delta_layer_step-batch-32", "gated_delta_prefill-64-heads-32k", "latent_attention-128-heads-32k"} <= set(ids)
    assert set(PEERS) <= {case.op.name for case in CASES}


def test_ops_and_cases_are_chosen_by_name():
    assert {case.op.name for case in gpu_cases(["linear"])} == {"linear"}
    assert [case.name for case in gpu_cases(["linear"], "4bit-8192x8192-1*")] == ["4bit-8192x8192-1", "4bit-8192x8192-16"]
    # an op without a large shape has those of the CPU
    assert {case.op.name for case in gpu_cases(["rms_norm"])} == {"rms_norm"}
    with pytest.raises(InputError, match="no op 'tripled' has benchmark cases"):
        gpu_cases(["tripled"])


def test_a_mixture_counts_the_experts_that_are_met():
    layer = experts(8, 64, 128)
    args = moe_args(1, layer, Routing(2, "softmax", renormalize=True))
    one_expert = (layer.gate.nbytes + layer.up.nbytes + layer.down.nbytes) // 8
    assert moe_nbytes(args) == 2 * one_expert + 2 * args["x"].nbytes
    assert moe_flops(args) == 2 * 6 * 64 * 128
    assert moe_nbytes(routed(64, layer)) == 8 * one_expert + 2 * 64 * 64 * 2


def agrees(peer: Peer, case: Case, tol: float) -> None:
    """Hold a peer to the reference, and see that its copies are several."""
    args = case.args()
    assert peer.serves(case, args)
    made = peer.make(args, 2)
    expected = case.op.reference(**args)
    assert len(made.calls) == 2
    for call in made.calls:
        found = peer.read(call())
        assert relative_rms(found.reshape(expected.shape).to(expected.dtype), expected) < tol


def test_the_product_of_the_written_out_weight_agrees():
    for make in (lambda: product_of(3, 64, 128, 4), lambda: mx_product(3, 64, 128)):
        agrees(linear.PEERS[-1], Case(multiply, "any", make), 1e-2)


@pytest.mark.parametrize(
    ("op", "rows", "make"),
    [
        (attend_dense, attention.dense_rows, lambda: queries([50, 50], [1, 1], (8, 2), 64, dtype=BF16)),
        (attend_dense, attention.dense_rows, lambda: queries([40], [40], (8, 2), 64, dtype=BF16)),
        (turboquant_attention, attention.decoded_rows, lambda: as_cached(attend, [70, 70], [1, 1], (8, 2), 64, (8, 4))),
    ],
    ids=["decode", "prompt", "codes"],
)
def test_attention_of_others_is_laid_out_right(op, rows, make):
    plain = Peer("math", attention._sdpa(SDPBackend.MATH, rows), attention._read, attention._equal)
    agrees(plain, Case(op, "any", make), 2e-2)


def test_attention_over_latents_as_two_products_agrees():
    (peer,) = PEERS["latent_attention"]
    agrees(peer, Case(latent_attention, "any", lambda: latent_queries([70], [1], 8, 64, 16, dtype=BF16)), 2e-2)


# on ARM torch says that it multiplies bf16 slowly
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_grouped_products_agree():
    (peer,) = PEERS["expert_mlp"]
    case = Case(expert_mlp, "any", lambda: {**routed(9, experts(8, 64, 128))})
    try:
        agrees(peer, case, 2e-2)
    except (RuntimeError, NotImplementedError) as err:
        pytest.skip(f"torch has no grouped product here: {err}")
    assert moe._nbytes(case.args()) <= 8 * 3 * 64 * 128 * 2
