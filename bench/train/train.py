"""Train one of the four tiny models for a fixed time, measure it and write a folder that transformers and auraflux load.

    python -m bench.train.train qwen3_moe --seconds 300 --data tokens --out FOLDER --device cuda

AdamW on float32 weights with bfloat16 products; sequences of 1024 tokens, later also of 4096 and 8192. The last part is
quantization-aware: every pass quantizes the weights to 4 bits, with the rounding of `auraflux convert`.
"""

import argparse
import json
import math
import shutil
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from bench.train import measure
from bench.train.documents import Documents, Producers
from bench.train.forward import forward
from bench.train.shapes import CONFIGS, Config, Parameters, checkpoint, init_parameters

GROUP, LEVELS = 64, 15
RATE, WARM, LAST = 1.5e-3, 0.03, 0.05  # peak learning rate; warm-up as a share of the time; final share of the peak
QUANTIZED_FROM = 0.6  # share of the time
BALANCE = 0.01  # weight of the load-balancing loss
NUDGE = 1e-3  # step of the router bias towards underused experts
PREFETCH = 6  # batches
HELD_OUT_TOKENS = 512  # per row of the loss that log lines show
DENSE = ("gate.weight", "router.weight", "conv1d.weight")


def fake_quantize(weight: Tensor) -> Tensor:
    """Quantize to 4 bits with a scale and a bias per group of the last dimension, as MLX does; gradients pass through."""
    # weights, scales and biases of a checkpoint are bfloat16
    groups = weight.detach().bfloat16().float().unflatten(-1, (-1, GROUP))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = ((high - low) / LEVELS).clamp_min(1e-7)
    far = low.abs() > high.abs()
    scale, edge = torch.where(far, scale, -scale), torch.where(far, low, high)
    steps = torch.round(edge / scale)
    scale = torch.where(steps != 0, edge / torch.where(steps != 0, steps, 1), scale)
    bias = torch.where(steps != 0, edge, 0)
    near = torch.round((groups - bias) / scale).clamp(0, LEVELS) * scale.bfloat16() + bias.bfloat16()
    return weight + (near.flatten(-2) - weight.detach())


def cast_parameters(config: Config, parameters: Parameters, dtype: torch.dtype, codes: bool) -> Parameters:
    """Cast parameters for a pass: matrices to dtype, quantized if `codes`; vectors to float32."""
    made = {}
    for name, value in parameters.items():
        matrix = value.dim() > 1 and "bias" not in name
        if matrix and codes and not name.endswith(DENSE):
            value = _fake_quantize_latent(config, value) if "kv_b_proj" in name else fake_quantize(value)
        made[name] = value.to(dtype) if matrix else value
    return made


def _fake_quantize_latent(config: Config, weight: Tensor) -> Tensor:
    """Quantize kv_b_proj; the key rows of every head are quantized transposed."""
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    keys, values = weight.unflatten(0, (-1, nope + value)).split([nope, value], 1)
    return torch.cat([fake_quantize(keys.mT.contiguous()).mT, fake_quantize(values.contiguous())], 1).flatten(0, 1)


def rate(passed: float) -> float:
    """Return the learning rate after a share of the time."""
    if passed < WARM:
        return RATE * (passed / WARM + 0.01)
    along = min((passed - WARM) / (1 - WARM), 1.0)
    return RATE * (LAST + (1 - LAST) * 0.5 * (1 + math.cos(math.pi * along)))


def lengths(passed: float, step: int, tokens: int) -> tuple[int, int]:
    """Return rows and length of a batch requested after a share of the time."""
    length = 1024
    if passed > 0.7:
        length = (1024, 4096, 1024, 8192)[step % 4]
    elif passed > 0.4:
        length = (1024, 1024, 4096)[step % 3]
    elif passed < 0.1:
        length = 512
    length = min(length, tokens)
    return max(tokens // length, 1), length


def loss_of(config: Config, p: Parameters, ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the loss, the load-balancing loss, and the expert load by layer."""
    hidden, routed = forward(config, p, ids[:, :-1])
    scores = F.linear(hidden.flatten(0, 1), p["model.embed_tokens.weight"])
    each = F.cross_entropy(scores.float(), ids[:, 1:].flatten(), reduction="none")
    weight = counts[:, 1:].flatten()
    return (each * weight).sum() / weight.sum(), routed.loss, routed.loads


def write(config: Config, parameters: Parameters, data: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.cpu().to(torch.bfloat16) for name, value in checkpoint(config, parameters).items()}
    for name, value in tensors.items():
        if name.endswith("e_score_correction_bias"):
            tensors[name] = value.float()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(data / name, out / name)


class Progress:
    """Log lines: throughput since the last line, training loss, loss on held-out documents, expert load."""

    def __init__(self, config: Config, data: Path, every_s: float):
        self.config, self.every_s = config, every_s
        self.documents = Documents(data, seed=12345)
        self.begun = self.logged = time.monotonic()
        self.step = self.seen = self.logged_tokens = 0

    def add(self, tokens: int) -> bool:
        """Count a step; return whether a log line is due."""
        self.step, self.seen = self.step + 1, self.seen + tokens
        return self.step == 1 or time.monotonic() - self.logged > self.every_s

    @torch.no_grad()
    def log(self, p: Parameters, length: int, loss: Tensor, loads: dict[str, Tensor]) -> None:
        throughput = (self.seen - self.logged_tokens) / (time.monotonic() - self.logged)
        most = max(float(load.max()) for load in loads.values()) * len(next(iter(loads.values())))
        held_out = measure.loss(self.config, p, self.documents, HELD_OUT_TOKENS, rows=4)
        print(
            f"{time.monotonic() - self.begun:6.1f} s  step {self.step:6d}  {self.seen / 1e6:7.2f} M tokens  "
            f"{throughput:9.0f} tokens/s  length {length:5d}  loss {float(loss):.4f}  held out {held_out:.4f}  "
            f"busiest expert {most:.1f}x",
            flush=True,
        )
        self.logged, self.logged_tokens = time.monotonic(), self.seen


def optimizer_for(learnt: Parameters, fused: bool) -> torch.optim.Optimizer:
    """Return AdamW with weight decay on matrices alone."""
    groups = [
        {"params": [value for value in learnt.values() if value.dim() > 1], "weight_decay": 0.1},
        {"params": [value for value in learnt.values() if value.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8, fused=fused)


def train(config: Config, given: argparse.Namespace) -> Parameters:
    started = time.monotonic()
    producers = Producers(given.data, given.seed, given.workers)
    device, dtype = torch.device(given.device), torch.bfloat16 if given.device == "cuda" else torch.float32
    parameters = {name: value.to(device).requires_grad_() for name, value in init_parameters(config, given.seed).items()}
    nudged = [name for name in parameters if name.endswith("e_score_correction_bias")]
    for name in nudged:
        parameters[name].requires_grad_(False)
    learnt = {name: value for name, value in parameters.items() if value.requires_grad}
    print(f"{sum(value.numel() for value in parameters.values()) / 1e6:.2f} M parameters", flush=True)
    optimizer, progress, asked = optimizer_for(learnt, device.type == "cuda"), Progress(config, given.data, given.every), 0
    seconds = given.seconds - (progress.begun - started)
    while (passed := (time.monotonic() - progress.begun) / seconds) < 1 and progress.step < given.steps:
        while asked < progress.step + PREFETCH:
            producers.ask(*lengths(passed, asked, given.tokens))
            asked += 1
        ids, counts = (torch.from_numpy(each).to(device) for each in producers.take())
        for group in optimizer.param_groups:
            group["lr"] = rate(passed)
        p = cast_parameters(config, parameters, dtype, passed > QUANTIZED_FROM)
        loss, routers, loads = loss_of(config, p, ids.long(), counts)
        (loss + BALANCE * routers).backward()
        torch.nn.utils.clip_grad_norm_(learnt.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for name in nudged:
            load = loads[name.removesuffix(".gate.e_score_correction_bias")]
            parameters[name] += NUDGE * torch.sign(load.mean() - load)
        if progress.add(ids.shape[0] * (ids.shape[1] - 1)):
            progress.log(p, ids.shape[1] - 1, loss.detach(), loads)
    producers.stop()
    return {name: value.detach() for name, value in parameters.items()}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("shape", choices=CONFIGS)
    options.add_argument("--seconds", type=float, default=300)
    options.add_argument("--steps", type=int, default=1 << 31, help="most training steps")
    options.add_argument("--data", type=Path, required=True, help="output folder of prepare.py")
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options.add_argument("--tokens", type=int, default=16384, help="tokens per batch")
    options.add_argument("--longest", type=int, default=8192, help="longest sequence to measure, in tokens")
    options.add_argument("--workers", type=int, default=3, help="processes that make batches")
    options.add_argument("--every", type=float, default=10, help="seconds between log lines")
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    if given.device == "cuda":
        # for the routers and the delta rule; slower on a CPU
        torch.set_float32_matmul_precision("high")
    config = CONFIGS[given.shape]
    parameters = train(config, given)
    write(config, parameters, given.data, given.out)
    print(f"written to {given.out.name}", flush=True)
    dtype = torch.bfloat16 if given.device == "cuda" else torch.float32
    with torch.no_grad():
        found = measure.measure_all(config, cast_parameters(config, parameters, dtype, True), given.data, given.longest)
    print("4 bits", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
