"""Expert MLPs: an independent sum, blobs, rejected inputs."""

import pytest
import torch

from auraflux.errors import FormatError, InputError
from auraflux.ops import expert_mlp, expert_parts, sum_parts
from auraflux.ops._cases import relative_rms
from auraflux.ops._dispatch import exact
from auraflux.ops.moe._expert_cases import dense_stack, from_blobs, gpt_oss, layer, routed
from auraflux.ops.moe.experts import Experts


def by_hand(x, ids, weights, experts):
    """Compute one (token, slot) pair after the other, in float64."""
    gate, up, down = (s.dequantize(torch.float32).double() for s in (experts.gate, experts.up, experts.down))
    out = torch.zeros_like(x, dtype=torch.float64)
    for token in range(len(x)):
        for slot, expert in enumerate(ids[token].tolist()):
            vector = x[token].double()
            hidden = torch.nn.functional.silu(gate[expert] @ vector) * (up[expert] @ vector)
            out[token] += weights[token, slot].double() * (down[expert] @ hidden)
    return out


@pytest.mark.parametrize("tokens", [1, 2, 7, 40])
def test_equals_the_sum_over_pairs(tokens: int):
    torch.manual_seed(tokens)
    args = routed(tokens, 3, layer(7, 64, 128))
    with exact():
        assert relative_rms(expert_mlp(**args).double(), by_hand(**args)) < 1e-5


def test_tokens_do_not_depend_on_the_batch():
    torch.manual_seed(0)
    args = routed(33, 2, layer(5, 64, 128))
    together = expert_mlp(**args)
    for token in (0, 13, 32):
        one = {**args, **{name: args[name][token : token + 1] for name in ("x", "ids", "weights")}}
        assert relative_rms(expert_mlp(**one)[0], together[token]) < 1e-6


@pytest.mark.parametrize("is_exact", [False, True], ids=["fast", "exact"])
def test_duplicate_experts_of_a_token_count_each_time(is_exact: bool):
    torch.manual_seed(0)
    args = routed(1, 3, layer(5, 64, 128))
    args["ids"][:] = 2
    once = {**args, "ids": args["ids"][:, :1], "weights": args["weights"].sum(1, keepdim=True)}
    with exact(is_exact):
        assert relative_rms(expert_mlp(**args), expert_mlp(**once)) < 1e-6


def test_blobs_give_the_same_bits_as_stacks():
    torch.manual_seed(0)
    blobs = from_blobs(6, 64, 128)
    stacked = Experts(*(s._map(torch.clone) for s in (blobs.gate, blobs.up, blobs.down)))
    assert not blobs.gate.packed.is_contiguous()
    args = routed(9, 3, blobs)
    assert torch.equal(expert_mlp(**args), expert_mlp(**{**args, "experts": stacked}))


EXPERTS = {
    "codes": lambda: layer(7, 64, 128),
    "row order": lambda: layer(7, 64, 128, lanes=1),
    "blobs": lambda: from_blobs(7, 64, 128),
    "mxfp4": lambda: gpt_oss(7, 64, 96),
    "dense": lambda: dense_stack(7, 63, 100, torch.bfloat16),
}


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("tokens", [1, 5, 70, 600])
@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_split_over_calls_give_the_same_bits(kind: str, tokens: int, is_exact: bool):
    torch.manual_seed(tokens)
    args = routed(tokens, 3, EXPERTS[kind]())
    ids, parts = args["ids"], torch.full((tokens, 3, args["experts"].hidden), torch.nan)
    with exact(is_exact):
        for group in ([4, 1], [6], [], [0, 2, 3, 5]):
            present = torch.isin(ids, torch.tensor(group, dtype=torch.int32))
            expert_parts(args["x"], torch.where(present, ids, -1), args["experts"], parts)
        assert torch.equal(sum_parts(parts, args["weights"], args["x"].dtype), expert_mlp(**args))


def test_parts_with_an_invalid_expert_id_are_rejected():
    args = routed(3, 2, layer(4, 64, 128))
    args["ids"][1, 1] = 4
    parts = torch.zeros(3, 2, 64)
    for call in (expert_parts, expert_parts.reference):
        with pytest.raises(InputError, match="there are 4 experts"):
            call(args["x"], args["ids"], args["experts"], parts)
    assert not parts.any()


def test_a_weight_of_zero_drops_an_expert():
    torch.manual_seed(0)
    args = routed(4, 2, layer(4, 64, 128))
    args["weights"][:, 1] = 0
    first = {**args, "ids": args["ids"][:, :1].contiguous(), "weights": args["weights"][:, :1].contiguous()}
    assert torch.equal(expert_mlp(**args), expert_mlp(**first))


@pytest.mark.parametrize("bad", [4, -1, 2**30])
def test_an_invalid_expert_id_is_rejected(bad: int):
    args = routed(3, 2, layer(4, 64, 128))
    args["ids"][1, 1] = bad
    with pytest.raises(InputError, match="there are 4 experts"):
        expert_mlp(**args)
    with pytest.raises(InputError, match="there are 4 experts"):
        expert_mlp.reference(**args)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: {**a, "x": torch.randn(3, 32)}, r"'x' has shape \[3, 32\]; \[any, 64\] is needed"),
        (lambda a: {**a, "ids": a["ids"].long()}, "'ids' has dtype int64; int32 is needed"),
        (lambda a: {**a, "weights": a["weights"][:, :1].contiguous()}, r"'weights' has shape \[3, 1\]"),
        (lambda a: {**a, "x": a["x"].T.contiguous().T}, "'x' .* is not contiguous"),
    ],
)
def test_mismatched_inputs_are_rejected(change, message: str):
    with pytest.raises(InputError, match=message):
        expert_mlp(**change(routed(3, 2, layer(4, 64, 128))))


def test_mismatched_stacks_are_rejected():
    stack = dense_stack(4, 64, 96, torch.float32)
    with pytest.raises(FormatError, match="'down' has shape"):
        Experts(stack.gate, stack.up, stack.gate)


def test_a_blob_that_is_too_short_is_rejected():
    made = layer(2, 64, 128)
    one = {"gate": made.gate[0], "up": made.up[0], "down": made.down[0]}
    with pytest.raises(FormatError, match="a blob of 100 bytes ends before the arrays of 'gate' do"):
        Experts.from_blobs(torch.zeros(3, 100, dtype=torch.uint8), one)
