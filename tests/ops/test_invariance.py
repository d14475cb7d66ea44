"""Batch invariance on CPU: ops with rows return the same bits for one token and for many, on one thread and on several.

An op's rows are the arguments named here. Ops over sequences process tokens one by one, each as a sequence of increasing
length; their in-place writes must be the same as well. docs/numerics.md lists the same ops.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from auraflux.ops import Adapters, LinearInput
from auraflux.ops._cases import Args, Case, all_cases, in_row_layout, tensors
from auraflux.ops._dispatch import Declined, exact
from auraflux.ops.simd.threads import set_threads, threads
from auraflux.ops.turboquant.reference_new_token import NormRope
from tests.ops.quick import beyond, params

ROWS = {
    **dict.fromkeys(("linear", "linears", "gate_up_swiglu"), ("x",)),
    **dict.fromkeys(("add_norm_linears", "add_norm_scores", "add_norm_gate_up"), ("x", "delta")),
    **dict.fromkeys(("swiglu", "geglu", "clamped_swiglu", "limited_swiglu"), ("gate", "up")),
    **dict.fromkeys(("rotate", "encode", "rms_norm", "layer_norm", "split_q_gate", "relu_square", "clip"), ("x",)),
    **dict.fromkeys(("sigmoid_gate", "gate_heads"), ("x", "gate")),
    "embed": ("ids",),
    "add_lora": ("inputs", "ys", "adapters"),
    **dict.fromkeys(("lora_linears", "lora_gate_up"), ("inputs", "adapters")),
    "decode": ("codes", "norms"),
    "add_rms_norm": ("x", "residual"),
    **dict.fromkeys(("gated_rms_norm", "group_rms_norm"), ("x", "z")),
    "qk_norm": ("q", "k"),
    "rope": ("x", "positions"),
    "norm_rope": ("q", "k", "positions"),
    "grow_queries": ("q", "positions"),
    "per_layer_inputs": ("projected", "embedded"),
    "split_latent": ("q", "kv"),
    "latent_query": ("q_nope",),
    "latent_output": ("v",),
    "delta_gates": ("a", "b"),
    "channel_gates": ("f", "b"),
    "scan_gates": ("dt",),
    "gated_delta_step": ("state", "q", "k", "v", "decay", "beta"),
    "route": ("logits",),
    "weigh_experts": ("logits", "ids"),
    **dict.fromkeys(("collapse_streams", "read_streams", "sum_streams"), ("x", "mixes")),
    "expand_streams": ("x", "found", "write", "mix"),
    **dict.fromkeys(("norm_streams", "start_streams"), ("x",)),
    "gate_streams": ("x", "gates"),
    "write_streams": ("x", "found", "mixes"),
    "gate_values": ("keys", "queries", "values"),
    "combine": ("h", "moe", "shared", "shared_gate"),
    "expert_mlp": ("x", "ids", "weights"),
    "expert_parts": ("x", "ids", "parts"),
    "sum_parts": ("parts", "weights"),
    "mixture": ("x", "scores", "h", "shared", "shared_gate"),
    "merge_partials": ("o", "m", "l"),
    "sample": ("logits", "uniform", "temperature", "top_k", "top_p", "min_p"),
    "penalize": ("logits", "prompt_mask", "output_counts", "repetition", "presence", "frequency"),
}
SEQUENCE_OPS = {
    **dict.fromkeys(("attention", "attention_partials", "turboquant_attention", "turboquant_partials"), ("q",)),
    **dict.fromkeys(
        ("latent_attention", "latent_partials", "turboquant_latent_attention", "turboquant_latent_partials"),
        ("q_latent", "q_rope"),
    ),
    **dict.fromkeys(("append_kv", "append_codes"), ("k", "v")),
    **dict.fromkeys(("append_keys", "append_key_codes"), ("k",)),
    **dict.fromkeys(("choose_positions", "choose_coded_positions"), ("q", "weights")),
    **dict.fromkeys(("append_latent", "append_latent_codes"), ("latent", "k_rope")),
    **dict.fromkeys(("rope_append_latent", "rope_append_latent_codes"), ("q", "kv", "positions")),
    "rope_append_codes": ("q", "k", "v", "positions"),
    "rope_append_attention": ("q", "k", "v", "rotation"),
    **dict.fromkeys(("gated_delta_prefill", "channel_delta"), ("q", "k", "v", "decay", "beta")),
    "selective_scan": ("xbc", "decay", "step"),
    **dict.fromkeys(("short_conv", "far_conv"), ("x",)),
    "delta_layer_step": ("qkv", "z", "a", "b"),
    "compress_windows": ("x",),
}
STATES = ("state", "conv")  # of each sequence
# rows of the first are heads; the others serve GPUs, and return or use slots of a pool that all rows share
OTHERS = {"turboquant_values", "fetch_experts", "pooled_mixture", "prefetch_expert"}
MOST = 12  # rows of a case that are computed alone: some of the first and of the last
CASES = [case for case in all_cases() if case.op.name not in OTHERS]
QUICK = 12  # cases of an op; test_parity.py has all of them


def _row(value: Any, t: int) -> Any:
    if isinstance(value, list):
        return [_row(each, t) for each in value]
    if isinstance(value, LinearInput):
        return replace(value, x=_row(value.x, t), delta=_row(value.delta, t))
    if isinstance(value, NormRope):
        return replace(value, positions=_row(value.positions, t))
    if isinstance(value, Adapters):
        return replace(value, slots=_row(value.slots, t))
    return value[t : t + 1] if isinstance(value, Tensor) and value.dim() else value


def _of_sequence(value: Any, b: int, length: int) -> Any:
    """Return pages restricted to one sequence of a given length."""
    if not is_dataclass(value) or isinstance(value, type):
        return value
    changed = {f.name: _of_sequence(getattr(value, f.name), b, length) for f in fields(value) if f.init}
    if "table" in changed and "lengths" in changed:
        changed["table"] = changed["table"][b : b + 1]
        changed["lengths"] = torch.tensor([length], dtype=torch.int32)
    return replace(value, **changed)


def single(case: Case, args: Args) -> Iterator[tuple[int, Args]]:
    """Yield calls of one row each, in order, with the row's index; they share arguments updated in place."""
    name = case.op.name
    if name in ROWS:
        first = next(args[each] for each in ROWS[name] if args.get(each) is not None)
        for t in range(len(first.x if isinstance(first, LinearInput) else first)):
            yield t, {k: _row(v, t) if k in ROWS[name] else v for k, v in args.items()}
        return
    assert "starts" in args, f"no row arguments are known for {name}. Add those with a row per token to ROWS."
    starts = args["starts"].tolist()
    for b, (start, end) in enumerate(pairwise(starts)):
        for t in range(start, end):
            call = {k: _row(v, t) if k in SEQUENCE_OPS[name] else v for k, v in args.items()}
            call |= {k: v[b : b + 1] for k, v in args.items() if k in STATES}
            for pages in {"pages", "rows", "entries"} & call.keys():
                length = int(args[pages].lengths[b]) - (end - 1 - t)
                call[pages] = _of_sequence(call[pages], b, length)
            yield t, call | {"starts": torch.tensor([0, 1], dtype=torch.int32)}


def results(case: Case, call: Args, backend: str = "cpu") -> list[Tensor]:
    """Return the results of a call, rows first."""
    # the reference runs for an op without a CPU kernel
    kernel = case.op.kernel(backend) or (case.op.reference if backend == "cpu" else None)
    assert kernel is not None
    given = [tensor for _, tensor in tensors(kernel(**call))]
    # layers come first, then tokens
    return [tensor.transpose(0, 1) for tensor in given] if case.op.name == "per_layer_inputs" else given


def same(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and bool(torch.equal(found.nan_to_num(7.5), expected.nan_to_num(7.5)))


def parted(case: Case, backend: str = "cpu") -> str | None:
    """Return the differences between rows computed together and alone."""
    if backend == "cuda":
        # arguments are seeded on a GPU only then
        torch.cuda.init()
    with torch.device(backend):
        together, alone = (case.args() if backend == "cpu" else in_row_layout(case.args()) for _ in range(2))
        calls = list(single(case, alone))
    writes = case.op.name in SEQUENCE_OPS or case.op.name in ("gated_delta_step", "expert_parts", "add_lora")
    with exact(case.exact):
        try:
            whole = results(case, together, backend)
        except Declined:
            return None
        chosen = (
            range(len(calls)) if writes else [*range(MOST // 2), *range(max(MOST // 2, len(calls) - MOST // 2), len(calls))]
        )
        before = threads()
        set_threads(1)
        try:
            for n in chosen:
                if n >= len(calls):
                    continue
                t, call = calls[n]
                for i, tensor in enumerate(results(case, call, backend)):
                    rows = len(tensor)
                    if not same(tensor, whole[i][t * rows : (t + 1) * rows]):
                        return f"row {t} of result {i}"
        finally:
            set_threads(before)
    if writes:
        for (path, have), (_, want) in zip(tensors(alone), tensors(together), strict=True):
            if have.is_floating_point() and not same(have, want):
                return f"the update of {path}"
    return None


# in reverse: test_parity.py starts with the first case at the same time, so that each kernel is compiled once
@pytest.mark.parametrize("case", params(CASES, also_slow=beyond(QUICK, CASES))[::-1])
def test_rows_do_not_depend_on_the_batch(case: Case):
    assert parted(case) is None


def test_the_manual_lists_the_batch_invariant_ops():
    page = (Path(__file__).parents[2] / "docs" / "numerics.md").read_text()
    listed = page.partition("## Batch invariance")[2].partition("\n## ")[0]
    assert not [name for name in (*ROWS, *SEQUENCE_OPS) if f"`{name}`" not in listed]
    assert {case.op.name for case in all_cases()} == {*ROWS, *SEQUENCE_OPS, *OTHERS}
