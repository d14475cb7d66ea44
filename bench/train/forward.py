"""Forward passes of the four architectures for training: plain torch, whole sequences, every expert for every token.

Experts this small run faster as one wide MLP with zero weights for unselected experts than sorted by token. Matrix products
run in one dtype; the residual stream, norms and routers are float32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.train.shapes import DELTA, FULL, SLIDING, Config, Parameters

CHUNK = 64  # tokens per chunk of a delta layer
UNIT_EPS = 1e-6
ALPHA = 1.702


class Routed:
    """The load-balancing loss of all routers, and the expert load of each layer, [E]."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.loads: dict[str, Tensor] = {}

    def add(self, name: str, chances: Tensor, chosen: Tensor) -> None:
        load = chosen.float().mean(0)
        self.loads[name] = load.detach() / load.sum()
        self.losses.append(chances.shape[-1] * (self.loads[name] * chances.mean(0)).sum())

    @property
    def loss(self) -> Tensor:
        return torch.stack(self.losses).sum()


def forward(config: Config, p: Parameters, ids: Tensor) -> tuple[Tensor, Routed]:
    """Run the layers on tokens [B, S]; return the final hidden states [B, S, D] and the router statistics."""
    table, routed = p["model.embed_tokens.weight"], Routed()
    x = F.embedding(ids, table).float()
    turn = angles(config, ids.shape[1], ids.device)
    shift = 1.0 if config["model_type"] == "qwen3_5_moe_text" else 0.0
    for index in range(config["num_hidden_layers"]):
        name = f"model.layers.{index}"
        eps = config["rms_norm_eps"]
        h = norm(x, p[f"{name}.input_layernorm.weight"] + shift, eps).to(table.dtype)
        x = x + mix(config, p, index, h, turn)
        h = norm(x, p[f"{name}.post_attention_layernorm.weight"] + shift, eps)
        x = x + feed_forward(config, p, f"{name}.mlp", h, table.dtype, routed)
    return norm(x, p["model.norm.weight"] + shift, config["rms_norm_eps"]).to(table.dtype), routed


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], weight, eps)


def angles(config: Config, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the RoPE cosines and sines, [S, R / 2] each."""
    settings = config["rope_parameters"]
    width = config.get("qk_rope_head_dim") or int(config["head_dim"] * settings.get("partial_rotary_factor", 1.0))
    rates = settings["rope_theta"] ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    turned = torch.arange(length, device=device, dtype=torch.float32)[:, None] * rates
    return turned.cos(), turned.sin()


def rotate(x: Tensor, turn: tuple[Tensor, Tensor], interleaved: bool = False) -> Tensor:
    """Apply RoPE to the first channels of heads [B, H, S, W]."""
    cos, sin = turn
    width = 2 * cos.shape[-1]
    turned, rest = x[..., :width].float(), x[..., width:]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    parts = [(a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), rest]
    return torch.cat(parts, -1)


def heads_of(x: Tensor, width: int) -> Tensor:
    """Reshape [B, S, H * W] to [B, H, S, W]."""
    return x.unflatten(-1, (-1, width)).transpose(1, 2)


def mix(config: Config, p: Parameters, index: int, h: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    name = f"model.layers.{index}"
    if config["model_type"] == "deepseek_v3":
        return latent_attention(config, p, f"{name}.self_attn", h, turn)
    kind = config.get("layer_types", [FULL] * 99)[index]
    if kind == DELTA:
        return delta(config, p, f"{name}.linear_attn", h)
    return attention(config, p, f"{name}.self_attn", h, turn, config["sliding_window"] if kind == SLIDING else None)


def attention(config: Config, p: Parameters, name: str, h: Tensor, turn: tuple[Tensor, Tensor], window: int | None) -> Tensor:
    width, kind = config["head_dim"], config["model_type"]
    q, k, v = (F.linear(h, p[f"{name}.{part}.weight"]) for part in ("q_proj", "k_proj", "v_proj"))
    gate = None
    if kind == "gpt_oss":
        q, k, v = (x + p[f"{name}.{part}.bias"].to(x.dtype) for x, part in ((q, "q_proj"), (k, "k_proj"), (v, "v_proj")))
    if kind == "qwen3_5_moe_text":
        q, gate = (each.flatten(2) for each in q.unflatten(-1, (-1, 2 * width)).chunk(2, -1))
    q, k, v = (heads_of(x, width) for x in (q, k, v))
    if kind != "gpt_oss":
        shift = 1.0 if kind == "qwen3_5_moe_text" else 0.0
        q, k = (
            norm(x, p[f"{name}.{part}.weight"] + shift, config["rms_norm_eps"]).to(h.dtype)
            for x, part in ((q, "q_norm"), (k, "k_norm"))
        )
    q, k = rotate(q, turn), rotate(k, turn)
    share = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(share, 1) for x in (k, v))
    if kind != "gpt_oss":
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    elif window is None:
        out = with_sinks(q, k, v, p[f"{name}.sinks"])
    else:
        out = within_window(q, k, v, p[f"{name}.sinks"], window)
    out = out.transpose(1, 2).flatten(2)
    if gate is not None:
        out = out * gate.sigmoid()
    out = F.linear(out, p[f"{name}.o_proj.weight"])
    return out + p[f"{name}.o_proj.bias"].to(out.dtype) if kind == "gpt_oss" else out


def with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """Attend with a sink: an extra first key, read through a channel that is 1 in all queries, with a zero value."""
    batch, heads, _, width = q.shape
    scale, extra = width**-0.5, 8
    sink = F.pad((sinks / scale).to(k.dtype).view(1, heads, 1, 1), (width, extra - 1)).expand(batch, -1, -1, -1)
    ones = F.pad(torch.ones_like(q[..., :1]), (0, extra - 1))
    q = F.pad(torch.cat([q, ones], -1), (0, 0, 1, 0))
    k = torch.cat([sink, F.pad(k, (0, extra))], 2)
    v = F.pad(v, (0, extra, 1, 0))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)[:, :, 1:, :width]


def within_window(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int) -> Tensor:
    """Run sliding-window attention with a sink, in blocks of `window` queries and twice as many keys."""
    length, width = q.shape[2:]
    short = -length % window
    q, k, v = (F.pad(x, (0, 0, 0, short)).unflatten(2, (-1, window)) for x in (q, k, v))
    k, v = (torch.cat([F.pad(x, (0, 0, 0, 0, 1, 0))[:, :, :-1], x], 3) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)).float() * width**-0.5
    near = torch.arange(window, device=q.device)
    distance = near[:, None] + window - torch.arange(2 * window, device=q.device)
    hidden = ((distance < 0) | (distance >= window)).expand(q.shape[2], -1, -1).clone()
    hidden[0, :, :window] = True
    scores = scores.masked_fill(hidden, float("-inf"))
    sink = sinks.float().view(1, -1, 1, 1, 1).expand(*scores.shape[:-1], 1)
    shares = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    return (shares.to(v.dtype) @ v).flatten(2, 3)[:, :, :length]


def latent_attention(config: Config, p: Parameters, name: str, h: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    low = norm(F.linear(h, p[f"{name}.q_a_proj.weight"]), p[f"{name}.q_a_layernorm.weight"], UNIT_EPS).to(h.dtype)
    q = heads_of(F.linear(low, p[f"{name}.q_b_proj.weight"]), nope + rope)
    latent, k_rope = F.linear(h, p[f"{name}.kv_a_proj_with_mqa.weight"]).split([config["kv_lora_rank"], rope], -1)
    latent = norm(latent, p[f"{name}.kv_a_layernorm.weight"], UNIT_EPS).to(h.dtype)
    k, v = heads_of(F.linear(latent, p[f"{name}.kv_b_proj.weight"]), nope + value).split([nope, value], -1)
    k_rope = rotate(k_rope.unsqueeze(1), turn, interleaved=True).expand(-1, k.shape[1], -1, -1)
    q = torch.cat([q[..., :nope], rotate(q[..., nope:], turn, interleaved=True)], -1)
    k = torch.cat([k, k_rope], -1)
    # flash attention needs one head width
    out = F.scaled_dot_product_attention(q, k, F.pad(v, (0, nope + rope - value)), is_causal=True)[..., :value]
    return F.linear(out.transpose(1, 2).flatten(2), p[f"{name}.o_proj.weight"])


def delta(config: Config, p: Parameters, name: str, h: Tensor) -> Tensor:
    """Run a Gated DeltaNet layer."""
    key_width, width = config["linear_key_head_dim"], config["linear_value_head_dim"]
    keys, heads = config["linear_num_key_heads"] * key_width, config["linear_num_value_heads"]
    qkv, z, b, a = (F.linear(h, p[f"{name}.in_proj_{part}.weight"]) for part in ("qkv", "z", "b", "a"))
    taps = p[f"{name}.conv1d.weight"][:, 0].to(qkv.dtype)
    late = F.pad(qkv, (0, 0, taps.shape[1] - 1, 0))
    qkv = F.silu(sum(late[:, i : i + h.shape[1]] * taps[:, i] for i in range(taps.shape[1])))
    q, k, v = (
        heads_of(x, w).float()
        for x, w in zip(qkv.split([keys, keys, heads * width], -1), (key_width, key_width, width), strict=True)
    )
    q, k = (x * (x.square().sum(-1, keepdim=True) + UNIT_EPS).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(heads // x.shape[1], 1) for x in (q * key_width**-0.5, k))
    decay = -p[f"{name}.A_log"].exp() * F.softplus(a.float() + p[f"{name}.dt_bias"])
    out = delta_rule(q, k, v, decay.transpose(1, 2), b.float().sigmoid().transpose(1, 2))
    out = norm(out, p[f"{name}.norm.weight"], config["rms_norm_eps"]) * F.silu(heads_of(z, width).float())
    return F.linear(out.transpose(1, 2).flatten(2).to(h.dtype), p[f"{name}.out_proj.weight"])


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Run the gated delta rule over a sequence, in float32, chunk by chunk.

    q, k [B, H, S, K], v [B, H, S, V]; decay (its logarithm) and beta [B, H, S]
    """
    length = q.shape[2]
    short = -length % CHUNK
    q, k, v = (F.pad(x, (0, 0, 0, short)).unflatten(2, (-1, CHUNK)) for x in (q, k, v))
    decay, beta = (F.pad(x, (0, short)).unflatten(2, (-1, CHUNK)) for x in (decay, beta))
    total = decay.cumsum(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, float("-inf")).exp()
    k_beta = k * beta.unsqueeze(-1)
    system = (k_beta @ k.mT) * between
    # only the part below the diagonal is used
    wanted = torch.cat([v * beta.unsqueeze(-1), k_beta * total.exp().unsqueeze(-1)], -1)
    new, old = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], -1
    )
    kept = k * (total[..., -1:] - total).exp().unsqueeze(-1)
    # a chunk maps the state S to M S + N
    grown = kept.mT @ new
    carried = torch.diag_embed(total[..., -1:].exp().expand(*total.shape[:-1], k.shape[-1])) - kept.mT @ old
    memory, states = torch.zeros_like(grown[:, :, 0]), []
    for m, n in zip(carried.unbind(2), grown.unbind(2), strict=True):
        states.append(memory)
        memory = n + m @ memory
    before = torch.stack(states, 2)
    inside = (q @ k.mT) * between
    out = (q * total.exp().unsqueeze(-1)) @ before + inside @ (new - old @ before)
    return out.flatten(2, 3)[:, :, :length]


def feed_forward(config: Config, p: Parameters, name: str, h: Tensor, dtype: torch.dtype, routed: Routed) -> Tensor:
    if f"{name}.experts.gate" not in p:
        return mlp(p, name, h.to(dtype))
    kind, flat = config["model_type"], h.flatten(0, 1)
    weights = route(config, p, name, flat, routed)
    x = flat.to(dtype)
    gate, up, down = (p[f"{name}.experts.{part}"] for part in ("gate", "up", "down"))
    g, u = F.linear(x, gate.flatten(0, 1)), F.linear(x, up.flatten(0, 1))
    if kind == "gpt_oss":
        g, u = (y + p[f"{name}.experts.{part}_bias"].flatten().to(dtype) for y, part in ((g, "gate"), (u, "up")))
        g, u = g.clamp(max=config["swiglu_limit"]), u.clamp(-config["swiglu_limit"], config["swiglu_limit"])
        inner = g * torch.sigmoid(ALPHA * g) * (u + 1)
    else:
        inner = F.silu(g) * u
    inner = inner.unflatten(-1, gate.shape[:2]) * weights.to(dtype).unsqueeze(-1)
    out = inner.flatten(1) @ down.transpose(1, 2).flatten(0, 1)
    if kind == "gpt_oss":
        out = out + weights.to(dtype) @ p[f"{name}.experts.down_bias"].to(dtype)
    if kind == "deepseek_v3":
        out = out + mlp(p, f"{name}.shared_experts", x)
    if kind == "qwen3_5_moe_text":
        chance = F.linear(flat, p[f"{name}.shared_expert_gate.weight"].float()).sigmoid()
        out = out + chance.to(dtype) * mlp(p, f"{name}.shared_expert", x)
    return out.view_as(h)


def mlp(p: Parameters, name: str, x: Tensor) -> Tensor:
    gate, up, down = (p[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def route(config: Config, p: Parameters, name: str, x: Tensor, routed: Routed) -> Tensor:
    """Return the expert weights of every token, [T, E]; zero for unselected experts."""
    kind, count = config["model_type"], config["num_experts_per_tok"]
    if kind == "gpt_oss":
        scores = F.linear(x, p[f"{name}.router.weight"].float(), p[f"{name}.router.bias"])
        chosen = top(scores, count)
        weights = scores.masked_fill(~chosen, float("-inf")).softmax(-1)
        routed.add(name, scores.softmax(-1), chosen)
        return weights
    scores = F.linear(x, p[f"{name}.gate.weight"].float())
    if kind == "deepseek_v3":
        chances = scores.sigmoid()
        chosen = top(chances + p[f"{name}.gate.e_score_correction_bias"], count)
        routed.add(name, chances / chances.sum(-1, keepdim=True), chosen)
    else:
        chances = scores.softmax(-1)
        chosen = top(chances, count)
        routed.add(name, chances, chosen)
    weights = chances * chosen
    return weights / weights.sum(-1, keepdim=True)


def top(scores: Tensor, count: int) -> Tensor:
    """Return a mask of the largest entries of each row."""
    best = scores.detach().topk(count, -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
