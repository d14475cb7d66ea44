"""Peers match our reference: otherwise their timings mean nothing."""

from operator import itemgetter

import pytest
import torch

from auraflux.bench.arguments import storage_nbytes
from auraflux.bench.peers import PEERS, Peer
from auraflux.ops._cases import Case, all_cases, relative_rms, tensors
from auraflux.ops._dispatch import Op, all_ops
from auraflux.ops.linear.reference import linear
from auraflux.quant import quantize

# bf16 peers round activations to 8 bits of mantissa, the int8 one to 127 steps; mlx in bf16 was 7% off at 11008 x 4096
TOLERANCE = {"mlx bf16": 0.1, "torch bf16": 0.01, "torch int4pack bf16": 0.01, "onnxruntime int8": 0.02}


def product(bits: int, tokens: int) -> dict:
    torch.manual_seed(bits)
    return {"x": torch.randn(tokens, 256), "weight": quantize(torch.randn(64, 256) * 0.1, bits)}


@pytest.mark.parametrize("peer", PEERS["linear"], ids=lambda peer: peer.name)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("copies", [1, 2])
def test_linear_peers_agree(peer, bits, copies):
    args = product(bits, 3)
    if peer.missing():
        pytest.skip(f"{peer.missing()} not installed")
    if not peer.serves(Case(linear, "any", lambda: args, exact=False), args):
        pytest.skip("does not do this width")
    contender = peer.make(args, copies)
    found = peer.read(contender.calls[-1]())
    assert len(contender.calls) * contender.work == copies
    assert relative_rms(found, linear.reference(**args)) < TOLERANCE.get(peer.name, 1e-5)


def test_a_dense_bf16_weight_has_its_peer():
    args = {"x": torch.randn(3, 128), "weight": torch.randn(32, 128).bfloat16()}
    (narrow,) = [peer for peer in PEERS["linear"] if peer.name == "torch bf16"]
    assert narrow.serves(Case(linear, "any", lambda: args), args)
    found = narrow.read(narrow.make(args, 2).calls[1]())
    assert relative_rms(found, linear.reference(**args)) < TOLERANCE[narrow.name]


def test_every_peers_op_exists():
    assert set(PEERS) <= {op.name for op in all_ops()}


def smallest(peer: Peer, op: str) -> Case:
    """Return the smallest finite case of an op that a peer supports, preferring cases outside of the benchmark."""
    mine = [case for case in all_cases() if case.op.name == op]
    for late in (False, True):
        sizes = []
        for case in (case for case in mine if (case.bench or case.slow) == late):
            args = case.args()
            if peer.serves(case, args) and all(tensor.isfinite().all() for _, tensor in tensors(args)):
                sizes.append((storage_nbytes(args), case))
        if sizes:
            break
    return min(sizes, key=itemgetter(0))[1]


OTHERS = [(op, peer) for op, peers in PEERS.items() for peer in peers if op != "linear"]


@pytest.mark.parametrize(("op", "peer"), OTHERS, ids=[f"{op}-{peer.name}" for op, peer in OTHERS])
def test_other_peers_agree(op: str, peer: Peer):
    if peer.missing():
        pytest.skip(f"{peer.missing()} not installed")
    case = smallest(peer, op)
    expected = case.op.reference(**case.args())
    expected = expected[0] if isinstance(expected, tuple) else expected
    found = peer.read(peer.make(case.args(), 1).calls[0]())
    assert relative_rms(found.reshape(expected.shape).to(expected.dtype), expected) < max(1e-4, 3 * case.tol), case.name


def test_fast_peers_run_on_fast_cases_only():
    (int8,) = [peer for peer in PEERS["linear"] if peer.contract == "fast"]
    args, op = product(4, 1), Op(linear.reference, (), None)
    assert int8.serves(Case(op, "any", lambda: args, exact=False), args)
    assert not int8.serves(Case(op, "any", lambda: args, exact=True), args)
