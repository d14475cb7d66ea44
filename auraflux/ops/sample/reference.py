"""Sampling of the next token. Both ops are pure functions: the caller passes the random numbers.

Every row of a batch has its own settings. Weights and their sums are float64, so that backends agree on the token: a CPU and a
GPU round differently, which among 250,000 float32 weights would sometimes change the token.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from auraflux.errors import InputError
from auraflux.ops._dispatch import check_dense, check_dtype, check_shape, op

BELOW_ONE = 1 - 2**-24


def _check_sample(logits: Tensor, uniform: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    check_dense(logits=logits, uniform=uniform, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    check_shape("logits", logits, None, None)
    if logits.shape[1] == 0:
        raise InputError("'logits' has an empty vocabulary.")
    for name, setting in (("uniform", uniform), ("temperature", temperature), ("top_p", top_p), ("min_p", min_p)):
        check_shape(name, setting, logits.shape[0])
        check_dtype(name, setting, torch.float32)
    check_shape("top_k", top_k, logits.shape[0])
    check_dtype("top_k", top_k, torch.int32)
    # reading values back from a GPU would stall the step
    if logits.is_cpu:
        for name, setting in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p)):
            if wrong := [value for value in setting.tolist() if not value >= 0]:
                raise InputError(f"'{name}' is {wrong[0]} for a row; it may not be negative.")


@op(check=_check_sample)
def sample(logits: Tensor, uniform: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Sample one token per row.

    A token weighs exp((logit - best) / temperature). Tokens are sorted by decreasing logit, ties by increasing index, and each
    filter selects a prefix, in this order:

    1. top_k: the first k, and ties of the last of them;
    2. top_p: while the weight before a token is less than top_p of the weight that top_k selected;
    3. min_p: tokens that weigh at least min_p of the best.

    The best is always selected. The token is the first at which the cumulative weight exceeds uniform times the total.
    NaN counts as -inf. All tokens of a row that is -inf throughout are equally likely.

    logits      [B, V]
    uniform     [B]     float32 in [0, 1)
    temperature [B]     float32; 0 takes the best token, regardless of filters
    top_k       [B]     int32; 0 selects all
    top_p       [B]     float32; 1 selects all
    min_p       [B]     float32; 0 selects all
    returns     [B]     int64
    """
    wide = torch.where(logits.isnan(), -torch.inf, logits.double())
    ordered, ids = wide.sort(dim=-1, descending=True, stable=True)
    best = ordered[:, :1]
    # equal logits weigh 1, even if both are infinite
    weights = torch.where(ordered == best, 1.0, ((ordered - best) / temperature.double()[:, None]).exp())

    last = torch.where(top_k > 0, top_k, wide.shape[1]).clamp(max=wide.shape[1]).long() - 1
    selected = ordered >= ordered.gather(1, last[:, None])
    sums = (weights * selected).cumsum(-1)
    before, whole = pad(sums[:, :-1], (1, 0)), sums[:, -1:]
    selected &= (before < top_p.double()[:, None] * whole) | (top_p >= 1)[:, None]
    selected &= weights >= min_p.double().clamp(max=1)[:, None]
    selected[:, 0] = True

    sums = (weights * selected).cumsum(-1)
    target = uniform.double().clamp(0, BELOW_ONE)[:, None] * sums[:, -1:]
    drawn = (sums <= target).sum(-1)
    return ids.gather(1, torch.where(temperature > 0, drawn, 0)[:, None])[:, 0]


def _check_penalize(
    logits: Tensor, prompt_mask: Tensor, output_counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> None:
    check_dense(
        logits=logits,
        prompt_mask=prompt_mask,
        output_counts=output_counts,
        repetition=repetition,
        presence=presence,
        frequency=frequency,
    )
    check_shape("logits", logits, None, None)
    check_shape("prompt_mask", prompt_mask, *logits.shape)
    check_dtype("prompt_mask", prompt_mask, torch.bool)
    check_shape("output_counts", output_counts, *logits.shape)
    check_dtype("output_counts", output_counts, torch.int32)
    for name, setting in (("repetition", repetition), ("presence", presence), ("frequency", frequency)):
        check_shape(name, setting, logits.shape[0])
        check_dtype(name, setting, torch.float32)


@op(check=_check_penalize)
def penalize(
    logits: Tensor, prompt_mask: Tensor, output_counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Apply repetition, then frequency and presence penalties to the logits.

    logits        [B, V]
    prompt_mask   [B, V]  bool: the token is in the prompt
    output_counts [B, V]  int32: how often it was generated
    repetition    [B]     float32; positive logits of tokens in prompt or output are divided by it, others multiplied; 1 is off
    presence      [B]     float32; subtracted from the logits of tokens in the output; 0 is off
    frequency     [B]     float32; subtracted once for each time the token was generated; 0 is off
    returns       [B, V]  in logits' dtype
    """
    wide, factor = logits.float(), repetition[:, None]
    generated = output_counts > 0
    wide = torch.where(prompt_mask | generated, torch.where(wide < 0, wide * factor, wide / factor), wide)
    return (wide - frequency[:, None] * output_counts - presence[:, None] * generated).to(logits.dtype)
