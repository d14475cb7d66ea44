"""Experts elsewhere: torch's grouped product in bfloat16, on tokens that were sorted by expert before."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from auraflux.bench.peers.peer import Peer
from auraflux.bench.timing import Contender
from auraflux.ops._cases import Args
from auraflux.ops.moe.experts import Experts, Stack
from auraflux.quant import QTensor

BF16 = torch.bfloat16


def _written_out(stack: Stack) -> Tensor:
    """[E, K, N] in bfloat16, each expert's K side by side in memory."""
    # one expert at a time: the codes of all, unpacked, would take many times the memory
    each = [expert.dequantize(BF16) if isinstance(expert, QTensor) else expert.to(BF16) for expert in _experts(stack)]
    return torch.stack(each).transpose(1, 2)


def _experts(stack: Stack) -> list[Any]:
    return [stack[number] for number in range(stack.shape[0])]


def _weights(experts: Experts) -> tuple[Tensor, Tensor]:
    gate, up = (_written_out(stack) for stack in experts.stacks[:-1])
    return torch.cat([gate.mT, up.mT], 1).mT, _written_out(experts.down)


def _grouped(args: Args, copies: int) -> Contender:
    experts, ids = args["experts"], args["ids"].long()
    order = ids.flatten().argsort()
    rows = args["x"][order // ids.shape[1]].to(BF16)
    ends = torch.bincount(ids.flatten(), minlength=experts.count).cumsum(0).int()
    inner = experts.inner
    first, second = _weights(experts)
    place, shares = order.argsort().view_as(ids), args["weights"]
    multiply = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm

    def prepare(gate_up: Tensor, down: Tensor) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
        def call() -> tuple[Tensor, Tensor, Tensor]:
            both = multiply(rows, gate_up, offs=ends)
            hidden = silu(both[:, :inner]) * both[:, inner:]
            return multiply(hidden, down, offs=ends), place, shares

        return call

    return Contender([prepare(first.mT.clone().mT, second.mT.clone().mT) for _ in range(copies)])


def _read(result: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Each token's experts, weighed and summed."""
    rows, place, shares = result
    return (rows[place].float() * shares[..., None]).sum(1)


def _nbytes(args: Args) -> int:
    """Bytes of the experts that are met."""
    experts = args["experts"]
    return len(args["ids"].unique()) * 3 * experts.inner * experts.hidden * 2


PEERS = {"expert_mlp": [Peer("torch grouped bf16", _grouped, _read, nbytes=_nbytes)]}
