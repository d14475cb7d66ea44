"""Operations on tensors. Each name here is an `Op`: call it, and the first argument's device chooses the kernel."""

from auraflux.ops._dispatch import Declined, Op, all_ops, exact, use_backend
from auraflux.ops.activation.reference import clamped_swiglu, geglu, sigmoid_gate, split_q_gate, swiglu
from auraflux.ops.attention.pages import KVPages, LatentPages
from auraflux.ops.attention.reference import (
    append_kv,
    append_latent,
    attention,
    attention_partials,
    latent_attention,
    latent_output,
    latent_query,
    merge_partials,
    split_latent,
)
from auraflux.ops.delta.reference import delta_gates, delta_layer_step, gated_delta_prefill, gated_delta_step, short_conv
from auraflux.ops.linear.reference import (
    add_norm_gate_up,
    add_norm_linears,
    add_norm_scores,
    embed,
    gate_up_swiglu,
    linear,
    linears,
)
from auraflux.ops.moe.experts import Clamp, Experts, SharedExpert
from auraflux.ops.moe.reference import combine, expert_mlp, expert_parts, mixture, route, sum_parts
from auraflux.ops.moe.routing import Routing
from auraflux.ops.norm.reference import add_rms_norm, gated_rms_norm, qk_norm, rms_norm
from auraflux.ops.rope.frequencies import linear_frequencies, llama3_frequencies, rope_frequencies, yarn_frequencies
from auraflux.ops.rope.reference import norm_rope, rope
from auraflux.ops.sample.reference import penalize, sample
from auraflux.ops.turboquant.pages import CodePages, LatentCodes
from auraflux.ops.turboquant.reference import (
    append_codes,
    append_latent_codes,
    decode,
    encode,
    rope_append_codes,
    rotate,
    turboquant_attention,
    turboquant_latent_attention,
    turboquant_partials,
    turboquant_values,
)

__all__ = [
    "Clamp",
    "CodePages",
    "Declined",
    "Experts",
    "KVPages",
    "LatentCodes",
    "LatentPages",
    "Op",
    "Routing",
    "SharedExpert",
    "add_norm_gate_up",
    "add_norm_linears",
    "add_norm_scores",
    "add_rms_norm",
    "all_ops",
    "append_codes",
    "append_kv",
    "append_latent",
    "append_latent_codes",
    "attention",
    "attention_partials",
    "clamped_swiglu",
    "combine",
    "decode",
    "delta_gates",
    "delta_layer_step",
    "embed",
    "encode",
    "exact",
    "expert_mlp",
    "expert_parts",
    "gate_up_swiglu",
    "gated_delta_prefill",
    "gated_delta_step",
    "gated_rms_norm",
    "geglu",
    "latent_attention",
    "latent_output",
    "latent_query",
    "linear",
    "linear_frequencies",
    "linears",
    "llama3_frequencies",
    "merge_partials",
    "mixture",
    "norm_rope",
    "penalize",
    "qk_norm",
    "rms_norm",
    "rope",
    "rope_append_codes",
    "rope_frequencies",
    "rotate",
    "route",
    "sample",
    "short_conv",
    "sigmoid_gate",
    "split_latent",
    "split_q_gate",
    "sum_parts",
    "swiglu",
    "turboquant_attention",
    "turboquant_latent_attention",
    "turboquant_partials",
    "turboquant_values",
    "use_backend",
    "yarn_frequencies",
]
