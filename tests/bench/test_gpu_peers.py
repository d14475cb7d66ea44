"""GPU benchmark cases: their shapes and counts, and peers that agree with our references."""

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
from auraflux.ops.turboquant.cases.inputs import attend
from auraflux.ops.turboquant.reference import turboquant_attention


def test_every_shape_has_a_case():
    ids = [case.id for case in CASES]
    assert len(ids) == len(set(ids))
    assert {"linear-4bit-8192x8192-2048", "turboquant_attention-k4v4-8x32k", "mixture-one-token"} <= set(ids)
    assert {"delta_layer_step-batch-32", "gated_delta_prefill-64-heads-32k", "latent_attention-128-heads-32k"} <= set(ids)
    assert set(PEERS) <= {case.op.name for case in CASES}


def test_ops_and_cases_are_selected_by_name():
    assert {case.op.name for case in gpu_cases(["linear"])} == {"linear"}
    assert [case.name for case in gpu_cases(["linear"], "4bit-8192x8192-1*")] == ["4bit-8192x8192-1", "4bit-8192x8192-16"]
    # an op without GPU shapes uses the CPU's
    assert {case.op.name for case in gpu_cases(["rms_norm"])} == {"rms_norm"}
    with pytest.raises(InputError, match="no op 'tripled' has benchmark cases"):
        gpu_cases(["tripled"])


def test_moe_counts_only_routed_experts():
    layer = experts(8, 64, 128)
    args = moe_args(1, layer, Routing(2, "softmax", renormalize=True))
    one_expert = (layer.gate.nbytes + layer.up.nbytes + layer.down.nbytes) // 8
    assert moe_nbytes(args) == 2 * one_expert + 2 * args["x"].nbytes
    assert moe_flops(args) == 2 * 6 * 64 * 128
    assert moe_nbytes(routed(64, layer)) == 8 * one_expert + 2 * 64 * 64 * 2


def check_peer(peer: Peer, case: Case, tol: float) -> None:
    """Compare a peer with the reference and check that it gets several copies."""
    args = case.args()
    assert peer.serves(case, args)
    made = peer.make(args, 2)
    expected = case.op.reference(**args)
    assert len(made.calls) == 2
    for call in made.calls:
        found = peer.read(call())
        assert relative_rms(found.reshape(expected.shape).to(expected.dtype), expected) < tol


def test_dequantized_matmul_matches_reference():
    for make in (lambda: product_of(3, 64, 128, 4), lambda: mx_product(3, 64, 128)):
        check_peer(linear.PEERS[-1], Case(multiply, "any", make), 1e-2)


@pytest.mark.parametrize(
    ("op", "rows", "make"),
    [
        (attend_dense, attention.dense_rows, lambda: queries([50, 50], [1, 1], (8, 2), 64, dtype=BF16)),
        (attend_dense, attention.dense_rows, lambda: queries([40], [40], (8, 2), 64, dtype=BF16)),
        (turboquant_attention, attention.decoded_rows, lambda: as_cached(attend, [70, 70], [1, 1], (8, 2), 64, (8, 4))),
    ],
    ids=["decode", "prompt", "codes"],
)
def test_sdpa_peer_matches_reference(op, rows, make):
    plain = Peer("math", attention._sdpa(SDPBackend.MATH, rows), attention._read, attention._equal)
    check_peer(plain, Case(op, "any", make), 2e-2)


def test_latent_attention_peer_matches_reference():
    (peer,) = PEERS["latent_attention"]
    check_peer(peer, Case(latent_attention, "any", lambda: latent_queries([70], [1], 8, 64, 16, dtype=BF16)), 2e-2)


# on ARM torch warns of slow bf16 products
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_grouped_matmul_matches_reference():
    (peer,) = PEERS["expert_mlp"]
    case = Case(expert_mlp, "any", lambda: {**routed(9, experts(8, 64, 128))})
    try:
        check_peer(peer, case, 2e-2)
    except (RuntimeError, NotImplementedError) as err:
        pytest.skip(f"torch has no grouped product here: {err}")
    assert moe._nbytes(case.args()) <= 8 * 3 * 64 * 128 * 2
