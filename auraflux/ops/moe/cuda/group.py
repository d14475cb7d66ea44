"""Grouping the pairs of some tokens by expert on Hopper, in one program, counting in shared memory.

What blocks are is in `grouped_gemm`, which takes three launches and two fills: as long as a tenth of the products of 32 tokens.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.hopper.launch import launch
from auraflux.ops.hopper.ptx import AWAIT, run, shared
from auraflux.ops.hopper.reduce import add_below
from auraflux.ops.hopper.shared_memory import count_in, put_word, word_at
from auraflux.ops.hopper.sizes import cdiv

WARPS = 16
MOST_GROUPED = 32 * WARPS  # experts


@gluon.jit
def group_pairs(
    ids, placed, owner, pairs, experts, blocks,
    SIZE: gl.constexpr, PIECES: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Blocks of SIZE pairs of one expert; a thread has PIECES pairs, and an expert."""
    T: gl.constexpr = 32 * W
    tid = gl.arange(0, T, gl.BlockedLayout([1], [32], [W], [0]))
    memory, counts = shared(8 * T + 4 * W, tid)
    bases = counts + 4 * T
    put_word(counts + tid * 4, tid * 0)
    run(AWAIT, tid)
    mine = ()
    for n in gl.static_range(PIECES):
        pair = tid + n * T
        mine += (gl.load(ids + pair, mask=pair < pairs, other=-1),)  # type: ignore[assignment]
    for start in range(0, blocks * SIZE, T):
        place = start + tid
        gl.store(placed + place, tid * 0 + pairs, place < blocks * SIZE)
        gl.store(owner + place, tid * 0 + experts, place < blocks)
    gl.thread_barrier()
    ranks = ()
    for n in gl.static_range(PIECES):
        ranks += (count_in(counts + mine[n] * 4, (mine[n] >= 0) & (mine[n] < experts)),)  # type: ignore[assignment]
    gl.thread_barrier()
    # thread n has expert n
    needed = (word_at(counts + tid * 4) + SIZE - 1) // SIZE
    end = add_below(needed)
    put_word(gl.where(tid % 32 == 31, bases + 4 * T + tid // 32 * 4, bases + tid * 4), end)
    gl.thread_barrier()
    for n in gl.static_range(W - 1):
        end += gl.where(n < tid // 32, word_at(bases + 4 * T + n * 4), 0)
    put_word(bases + tid * 4, end - needed)
    gl.thread_barrier()
    for n in gl.static_range(PIECES):
        there = (mine[n] >= 0) & (mine[n] < experts)
        base = word_at(bases + gl.where(there, mine[n], 0) * 4)
        gl.store(placed + base * SIZE + ranks[n], tid + n * T, there)
        gl.store(owner + base + ranks[n] // SIZE, mine[n], there & (ranks[n] % SIZE == 0))
    memory._keep_alive()


def grouped_at_once(ids: Tensor, experts: int, size: int) -> tuple[Tensor, Tensor]:
    """What `grouped_gemm.grouped` gives."""
    pairs = ids.numel()
    blocks = min(pairs, pairs // size + experts)
    placed, owner = ids.new_empty(blocks * size), ids.new_empty(blocks)
    threads = 32 * WARPS
    launch(group_pairs, (1,))(
        ids, placed, owner, pairs, experts, blocks, size, cdiv(pairs, threads), WARPS,
        num_warps=WARPS, launch_pdl=True,
    )  # fmt: skip
    return placed, owner
