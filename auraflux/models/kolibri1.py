"""Kolibri 1: attention and experts, each between two norms; experts are chosen by biased logits and weighted by sigmoids."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from auraflux.adapters.linears import linear, run_experts, shared_output
from auraflux.models import llama, output_norms, qwen3_moe
from auraflux.models.attention import Heads
from auraflux.models.config import Keys
from auraflux.models.layer import FeedForward, LayerInput, Mixer, PreparedInput, Residual
from auraflux.models.mixture import MixtureConfig, biased_mixture
from auraflux.models.output_norms import NormedMixture
from auraflux.models.rotation import no_rotation
from auraflux.ops import Routing, combine, rms_norm, route, weigh_experts
from auraflux.weights.fields import HEAD, WIDTH, WIDTH_OR_NONE
from auraflux.weights.formats.untrusted import FLAG
from auraflux.weights.loader import Weights

BIAS = "gate.e_score_correction_bias"
FULL_EVERY = 5
# names in published files -> ours
NAMES = {
    ".moe.router.expert_bias": f".mlp.{BIAS}",
    ".post_attn_norm.": ".post_self_attn_layernorm.",
    ".post_ffn_norm.": ".post_mlp_layernorm.",
}


class Config(qwen3_moe.Config):
    """Qwen3's config."""

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys = Keys(config)
        keys.get("intermediate_size", WIDTH, None)
        # all of its layers are mixtures
        changes = {"intermediate_size": keys.expert_inner, "head_dim": keys.get("head_dim", HEAD, 128)}
        plain = llama.Config.from_hf(keys.changed(changes).found)
        kinds = llama.listed_kinds(keys, FULL_EVERY)
        still = no_rotation(plain.head_width)
        # transformers writes the second name
        count, chosen = keys.experts("num_experts" if "num_experts" in keys else "num_local_experts")
        routing = Routing(chosen, "sigmoid", renormalize=keys.get("norm_topk_prob", FLAG, False))
        shared = keys.get("shared_expert_intermediate_size", WIDTH_OR_NONE, 512) or None
        own = {
            "windows": llama.windows_of(keys, kinds),
            "others": {index: still for index, kind in enumerate(kinds) if kind == llama.FULL},
        }
        return cls(
            **vars(plain) | own,
            mixture=MixtureConfig(count, keys.expert_inner, routing, shared),
            sparse=frozenset(range(keys.layers)),
            home="mlp",
        )


class Model(qwen3_moe.Model):
    """Attention, then experts, each between two norms."""

    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        config = self.config
        heads, rotation = Heads(config.heads, config.kv_heads, config.head_width), config.rotation_of(index)
        made = output_norms.Attention(
            weights, f"{name}.self_attn", config.hidden, heads, rotation.to(weights.device), config.eps
        )
        made.output_norm, made.output_eps = self.make_norm(weights, f"{name}.post_self_attn_layernorm"), config.eps
        return made

    def make_mlp(self, weights: Weights, name: str, index: int) -> FeedForward:
        config = self.config
        assert config.mixture is not None
        made = biased_mixture(weights, f"{name}.mlp", config.hidden, config.mixture, BIAS)
        norm = self.make_norm(weights, f"{name}.post_mlp_layernorm")
        return LogitBiasMixture(**vars(made), norm=norm, eps=config.eps, join=weights.slices.all_reduce)


@dataclass(frozen=True, eq=False, kw_only=True)
class LogitBiasMixture(NormedMixture):
    """A mixture with a normalised output that adds the bias to logits, not to scores, where it chooses experts."""

    def __call__(self, inputs: LayerInput | PreparedInput) -> Residual:
        """Return the residual stream with its delta added, and the next delta, both [T, H]."""
        h, residual, (logits,) = inputs.scores((self.router,))
        ids = self._best(logits)
        found = run_experts(self.experts, h, ids, weigh_experts(logits, ids, self.routing))
        shared = shared_output(h, self.shared)
        return residual, rms_norm(found if shared is None else combine(self.join(shared), found), self.norm, self.eps)

    def choose(self, x: Tensor) -> Tensor:
        """Return the expert ids of x [T, H]: [T, k]."""
        return self._best(linear(x, self.router))

    def _best(self, logits: Tensor) -> Tensor:
        return route(logits if self.choice_bias is None else logits + self.choice_bias, self.routing)[0]


def rename(name: str) -> str | None:
    ours = qwen3_moe.rename(name)
    for theirs, mine in NAMES.items():
        ours = ours and ours.replace(theirs, mine)
    return ours


make_caches = qwen3_moe.make_caches
