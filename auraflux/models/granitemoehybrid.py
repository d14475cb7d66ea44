"""Granite 4: Granite 3's mixtures, or MLPs, with Mamba-2 in most layers; attention mostly without RoPE."""

from dataclasses import dataclass, replace
from typing import Any

from auraflux.cache import AttentionShape, ScanShape
from auraflux.errors import FormatError
from auraflux.models import granitemoe
from auraflux.models.config import Keys
from auraflux.models.granitemoe import rename
from auraflux.models.layer import FeedForward, Mixer
from auraflux.models.mlp import FusedMLP
from auraflux.models.nemotron_h import ATTENTION, KINDS, SCAN, Mamba, Scan, check_step_limit
from auraflux.models.qwen3_5_moe import TAPS
from auraflux.models.rotation import no_rotation
from auraflux.weights.fields import COUNT, HEAD, NAME, WIDTH_OR_NONE
from auraflux.weights.formats.untrusted import either
from auraflux.weights.loader import Weights

__all__ = ["Config", "Model", "make_caches", "rename"]

MIXERS = "mamba", "attention", SCAN, ATTENTION


@dataclass(frozen=True, eq=False)
class Config(granitemoe.Config):
    """Granite 3's config.

    kinds       SCAN or ATTENTION of each layer
    scan_eps    of the norms within Mamba
    shared      the width of the MLP that every token goes to
    """

    kinds: tuple[str, ...]
    scan: Scan
    scan_eps: float
    shared: int

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Config":
        keys = Keys(config)
        keys.only("mamba_d_conv", TAPS)
        keys.only("mamba_proj_bias", False)
        keys.only("position_embedding_type", "rope", "nope")
        check_step_limit(keys)
        base = granitemoe.Config.from_hf(config)
        if keys.get("position_embedding_type", NAME, None) != "rope":
            base = replace(base, rotation=no_rotation(base.head_width))
        return cls(
            **vars(base),
            kinds=_kinds(keys),
            scan=_scan(keys),
            scan_eps=keys.eps(1e-6),
            shared=_shared(keys),
        )


def _kinds(keys: Keys) -> tuple[str, ...]:
    key = "layer_types" if "layer_types" in keys else "layers_block_type"
    if key not in keys:
        return (SCAN,) * keys.layers
    return tuple(KINDS[kind] for kind in keys.layer_types(*MIXERS, key=key))


def _shared(keys: Keys) -> int:
    if (found := keys.get("shared_intermediate_size", WIDTH_OR_NONE, 1024)) < 1:
        raise FormatError(f"{keys.title} has shared_intermediate_size 0, which is not supported.")
    return found


def _scan(keys: Keys) -> Scan:
    heads, wide = keys.get("mamba_n_heads", COUNT, 128), keys.get("mamba_expand", COUNT, 2) * keys.hidden
    given = keys.get("mamba_d_head", either(HEAD, NAME), "auto")
    width = given if isinstance(given, int) else wide // heads
    found = Scan(heads, width, keys.get("mamba_n_groups", COUNT, 1), keys.get("mamba_d_state", HEAD, 256))
    if found.wide != wide or heads % found.groups:
        raise FormatError(
            f"{keys.title} has {heads} Mamba heads of {width} channels in {found.groups} groups, which do not make {wide}."
        )
    return found


class Model(granitemoe.Model):
    """Granite 3's model with Mamba-2 in some layers, and an MLP where there are no experts."""

    config: Config

    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        config = self.config
        if config.kinds[index] == ATTENTION:
            return super().make_mixer(weights, name, index)
        return Mamba(weights, f"{name}.mamba", config.hidden, config.scan, config.scan_eps, norm_groups=1)

    def make_mlp(self, weights: Weights, name: str, index: int) -> FeedForward:
        if self.config.mixture is not None:
            return super().make_mlp(weights, name, index)
        return FusedMLP(weights, f"{name}.shared_mlp", self.config.hidden, self.config.shared)


def make_caches(config: Config) -> list[AttentionShape | ScanShape]:
    attention, memory = AttentionShape(config.kv_heads, config.head_width), config.scan.cache
    return [attention if kind == ATTENTION else memory for kind in config.kinds]
