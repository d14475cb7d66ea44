"""Routing against transformers' routers, ties, non-finite logits, invalid settings; and combining the results."""

from types import SimpleNamespace

import pytest
import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from auraflux.errors import InputError
from auraflux.ops._dispatch import use_backend
from auraflux.ops.moe.reference import combine, route
from auraflux.ops.moe.routing import Routing

BACKENDS = pytest.mark.parametrize("backend", ["reference", "cpu"])


def router(kind: type[torch.nn.Module], experts: int, k: int, **settings: object) -> torch.nn.Module:
    """Return a router whose projection is the identity, so that its input is the logits."""
    config = SimpleNamespace(
        hidden_size=experts, num_experts=experts, num_local_experts=experts, num_experts_per_tok=k, **settings
    )
    made = kind(config)
    made.load_state_dict({"weight": torch.eye(experts)}, strict=False)
    return made.requires_grad_(False)


def assert_same(found: tuple[torch.Tensor, torch.Tensor], expected_ids: torch.Tensor, expected_weights: torch.Tensor) -> None:
    """Compare selection and weights in any order."""
    ids, weights = found
    assert ids.dtype is torch.int32
    assert weights.dtype is torch.float32
    ours, theirs = ids.long().sort(-1), expected_ids.sort(-1)
    assert torch.equal(ours.values, theirs.values)
    torch.testing.assert_close(weights.gather(1, ours.indices), expected_weights.gather(1, theirs.indices))


@BACKENDS
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("experts", "k"), [(128, 8), (512, 10), (512, 16), (100, 7), (6, 6)])
def test_softmax_is_the_router_of_qwen3_moe(backend, experts, k, renormalize):
    logits = torch.randn(33, experts) * 2
    _, weights, ids = router(Qwen3MoeTopKRouter, experts, k, norm_topk_prob=renormalize)(logits)
    with use_backend(backend):
        found = route(logits, Routing(k, "softmax", renormalize))
    assert torch.equal(found[0].long(), ids)
    torch.testing.assert_close(found[1], weights)


@BACKENDS
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(
    ("experts", "k", "groups", "selected_groups"), [(256, 8, 8, 4), (64, 6, 1, 1), (48, 12, 4, 1), (512, 16, 16, 5)]
)
def test_sigmoid_is_the_router_of_deepseek(backend, experts, k, groups, selected_groups, renormalize):
    logits, bias = torch.randn(50, experts) * 2, torch.randn(experts) * 0.2
    settings = {"n_group": groups, "topk_group": selected_groups, "norm_topk_prob": renormalize, "routed_scaling_factor": 2.5}
    theirs = router(DeepseekV3TopkRouter, experts, k, **settings)
    theirs.e_score_correction_bias.copy_(bias)
    _, weights, ids = theirs(logits)
    with use_backend(backend):
        found = route(logits, Routing(k, "sigmoid", renormalize, groups, selected_groups, 2.5), bias)
    assert_same(found, ids, weights)


@BACKENDS
@pytest.mark.parametrize(("experts", "k"), [(32, 4), (128, 4), (5, 5)])
def test_chosen_is_the_router_of_gpt_oss(backend, experts, k):
    logits = torch.randn(40, experts) * 3
    _, weights, ids = router(GptOssTopKRouter, experts, k)(logits)
    with use_backend(backend):
        found = route(logits, Routing(k, "chosen", False))
    assert torch.equal(found[0].long(), ids)
    torch.testing.assert_close(found[1], weights)


@BACKENDS
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "chosen"])
def test_ties_go_to_the_lower_index(backend, scoring):
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0, 0.0], [0.0] * 6, [-0.0, 0.0, -0.0, 0.0, 0.0, 0.0]])
    with use_backend(backend):
        ids, _ = route(logits, Routing(4, scoring, True))
    assert ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3], [0, 1, 2, 3]]


@BACKENDS
def test_tied_groups_go_to_the_lower_index(backend):
    with use_backend(backend):
        ids, _ = route(torch.zeros(2, 12), Routing(3, "sigmoid", True, groups=4, topk_groups=1))
    assert ids.tolist() == [[0, 1, 2]] * 2


@BACKENDS
def test_the_bias_changes_the_selection_and_not_the_weights(backend):
    logits, bias = torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([0.0, 0.0, 0.0, 5.0])
    with use_backend(backend):
        ids, weights = route(logits, Routing(2, "sigmoid", False), bias)
    assert ids.tolist() == [[3, 0]]
    torch.testing.assert_close(weights, torch.sigmoid(torch.tensor([[-1.0, 2.0]])))


@BACKENDS
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "chosen"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e30, -1e30])
def test_broken_logits_give_indices_in_range(backend, scoring, value):
    logits = torch.randn(64, 16)
    for row in range(64):
        logits[row, torch.randperm(16)[: row % 17]] = value
    groups = 4 if scoring == "sigmoid" else 1
    with use_backend(backend):
        ids, _ = route(logits, Routing(6, scoring, True, groups, max(groups // 2, 1)))
    assert ids.min() >= 0
    assert ids.max() < 16
    assert all(len(set(row)) == 6 for row in ids.tolist())


@BACKENDS
def test_scores_of_zero_are_not_divided_by_their_sum(backend):
    with use_backend(backend):
        _, weights = route(torch.full((1, 4), -200.0), Routing(2, "sigmoid", True))
    assert weights.tolist() == [[0.0, 0.0]]


def test_one_token_and_many_give_the_same():
    logits, rule = torch.randn(200, 128), Routing(8, "softmax", True)
    with use_backend("cpu"):
        ids, weights = route(logits, rule)
        for t in (0, 77, 199):
            one = route(logits[t : t + 1], rule)
            assert torch.equal(one[0][0], ids[t])
            assert torch.equal(one[1][0], weights[t])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scoring": "tanh"}, "unknown scoring 'tanh'. Supported: softmax, sigmoid, chosen"),
        ({"k": 0}, "k is 0; a token needs at least one expert"),
        ({"groups": 0}, "1 of 0 groups cannot be selected"),
        ({"groups": 4, "topk_groups": 5}, "5 of 4 groups cannot be selected"),
        ({"groups": 4, "topk_groups": 0}, "0 of 4 groups cannot be selected"),
        ({"scoring": "chosen", "groups": 4}, "4 groups with 'chosen' scoring"),
        ({"scale": 0.0}, r"scale is 0\.0; it must be positive and finite"),
        ({"scale": float("nan")}, "scale is nan"),
    ],
)
def test_invalid_settings_are_rejected(settings, message):
    with pytest.raises(InputError, match=message):
        Routing(**{"k": 2, "scoring": "sigmoid", "renormalize": True, **settings})


def test_mismatched_logits_are_rejected():
    logits = torch.randn(3, 12)
    with pytest.raises(InputError, match="13 experts per token are requested; there are 12"):
        route(logits, Routing(13, "softmax", True))
    with pytest.raises(InputError, match="12 experts do not divide into 5 equal groups"):
        route(logits, Routing(2, "sigmoid", True, 5, 2))
    with pytest.raises(InputError, match="12 experts do not divide into 12 equal groups of at least 2"):
        route(logits, Routing(2, "sigmoid", True, 12, 2))
    with pytest.raises(InputError, match="7 experts per token are requested; the top groups have 2 x 3"):
        route(logits, Routing(7, "sigmoid", True, 4, 2))
    with pytest.raises(InputError, match="a selection bias needs 'sigmoid', 'softmax' or 'sqrtsoftplus' scoring"):
        route(logits, Routing(2, "chosen", True), torch.zeros(12))
    with pytest.raises(InputError, match=r"'gain' has shape \[11\]; \[12\] is needed"):
        route(logits, Routing(2, "softmax", True), None, torch.ones(11))
    with pytest.raises(InputError, match=r"'bias' has shape \[11\]; \[12\] is needed"):
        route(logits, Routing(2, "sigmoid", True), torch.zeros(11))
    with pytest.raises(InputError, match=r"'logits' has shape \[12\]"):
        route(logits[0], Routing(2, "softmax", True))
    with pytest.raises(InputError, match=r"'logits' .* is not contiguous"):
        route(torch.randn(12, 3).T, Routing(2, "softmax", True))


@BACKENDS
def test_combine_adds_optional_terms(backend):
    h, moe, shared, gate = torch.randn(5, 9), torch.randn(5, 9), torch.randn(5, 9), torch.randn(5)
    with use_backend(backend):
        torch.testing.assert_close(combine(h, moe), h + moe)
        torch.testing.assert_close(combine(h, moe, shared), h + moe + shared)
        torch.testing.assert_close(combine(h, moe, shared, gate), h + moe + torch.sigmoid(gate)[:, None] * shared)


@BACKENDS
def test_combine_returns_the_residual_dtype(backend):
    h, moe = torch.randn(2, 8).bfloat16(), torch.randn(2, 8)
    with use_backend(backend):
        found = combine(h, moe)
    assert torch.equal(found, (h.float() + moe).bfloat16())


def test_combine_rejects_mismatched_arguments():
    h = torch.randn(5, 9)
    with pytest.raises(InputError, match=r"'moe' has shape \[4, 9\]; \[5, 9\] is needed"):
        combine(h, h[:4])
    with pytest.raises(InputError, match=r"'shared' has shape \[5, 8\]"):
        combine(h, h, torch.randn(5, 8))
    with pytest.raises(InputError, match=r"'shared_gate' has shape \[5, 1\]; \[5\] is needed"):
        combine(h, h, h, torch.randn(5, 1))
    with pytest.raises(InputError, match="shared_gate is given without shared"):
        combine(h, h, None, torch.randn(5))
