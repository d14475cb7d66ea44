"""`prefetch_expert`: copy an expert that the next layer is predicted to use, while PCIe would be idle.

Predictions are those of the next layer's router, run early on the residual stream of this layer. A wrong one costs the time of
a copy, and only that: its expert is the next to be evicted. So each layer has a trust, the share of its predictions that were
right lately, which `fetch_experts` updates; below LEAST_TRUST only one step in RETRY tries.
"""

import torch
from torch import Tensor

from auraflux.ops._dispatch import op
from auraflux.ops.moe.pool import (
    CLOCK,
    NEVER_USED,
    PREFETCHED,
    ExpertPool,
    check_fetch,
    place_expert,
)

LEAST_TRUST = 0.5
RETRY = 16  # steps


@op(check=check_fetch)
def prefetch_expert(ids: Tensor, pool: ExpertPool, layer: int) -> Tensor:
    """Copy the first predicted expert of a layer that has no slot into one, and return that slot.

    Neither predicted experts nor those of the layer before, which may be running, are evicted.

    ids      [T, k]  int32, predicted for `layer`, the likeliest first
    returns  [1]     int32, -1 if nothing was copied
    """
    layers, experts = pool.slots.shape
    slot = torch.full((1,), -1, dtype=torch.int32, device=ids.device)
    trust = float(pool.trust[layer])
    tries = int(pool.state[CLOCK]) // layers % RETRY < len(ids)
    # by rank, then by token
    listed = [expert for expert in ids.T.flatten().tolist() if 0 <= expert < experts]
    missing = [expert for expert in listed if int(pool.slots[layer, expert]) < 0]
    costs = torch.where(pool.owners < 0, -torch.inf, pool.uses)
    wanted = [int(pool.slots[layer, expert]) for expert in listed]
    costs[torch.tensor([found for found in wanted if found >= 0], dtype=torch.long, device=costs.device)] = torch.inf
    costs[(pool.owners >= 0) & (pool.owners // experts == layer - 1)] = torch.inf
    if missing and (trust > LEAST_TRUST or tries) and float(costs.min()) < torch.inf:
        slot[0] = costs.argmin()
        first = int(pool.offsets[layer, missing[0]])
        place_expert(pool, layer, missing[0], int(slot[0]), pool.host[first : first + pool.nbytes[layer]])
        pool.uses[int(slot[0])] = NEVER_USED
        pool.state[PREFETCHED] += 1
        pool.prefetched[layer] = missing[0]
    return slot
