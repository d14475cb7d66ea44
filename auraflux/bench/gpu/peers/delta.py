"""The delta rule in fla, which takes the logarithm of the decay and scales queries itself, and writes the state elsewhere."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from auraflux.bench.arguments import cloned
from auraflux.bench.peers.peer import Peer
from auraflux.bench.timing import Contender
from auraflux.ops._cases import Args, Case


def _fla(name: str) -> Callable[[Args, int], Contender]:
    def make(args: Args, copies: int) -> Contender:
        from fla.ops import gated_delta_rule

        rule = getattr(gated_delta_rule, name)
        return Contender([_call(rule, cloned(args)) for _ in range(copies)])

    return make


def _call(rule: Callable[..., Any], args: Args) -> Callable[[], Any]:
    # one token each of many sequences is a batch, the tokens of one sequence are its length
    axis = 0 if "starts" in args else 1
    q, k, v, beta = (args[name].unsqueeze(axis) for name in ("q", "k", "v", "beta"))
    g = args["decay"].clamp_min(1e-30).log().unsqueeze(axis)
    options = {"scale": 1.0, "initial_state": args["state"], "output_final_state": True}
    return lambda: rule(q, k, v, g=g, beta=beta, **options)


def _one_sequence(case: Case, args: Args) -> bool:
    return args["state"].shape[0] == 1


def _read(result: tuple[Tensor, Tensor]) -> Tensor:
    return result[0]


PEERS = {
    "gated_delta_step": [Peer("fla", _fla("fused_recurrent_gated_delta_rule"), _read, packages=("fla", "einops"))],
    "gated_delta_prefill": [
        Peer("fla", _fla("chunk_gated_delta_rule"), _read, _one_sequence, packages=("fla", "einops")),
    ],
}
