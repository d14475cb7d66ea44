"""New rows copied to their places in the pages, whatever they hold."""

from torch import Tensor

from auraflux.ops.attention.cpu.page_index import count_pairs, index_of, page_row
from auraflux.ops.attention.pages import Pages
from auraflux.ops.simd.jit import Kernel, arguments, jit, octets, share, threads

BYTES_PARALLEL = 1 << 18  # below this, waking the threads costs more than the work


@jit
def _append(token, source, target, nbytes, heads, page, table, table_width, lengths, starts, sequences):
    """Copy one token's rows, one for each head, to its place in the pages."""
    number, slot = page_row(token, page, table, table_width, lengths, starts, sequences)
    for head in range(heads):
        row = (number * heads + head) * page + slot
        old, new = octets(target + row * nbytes, nbytes), octets(source + (token * heads + head) * nbytes, nbytes)
        for i in range(nbytes):
            old[i] = new[i]


@Kernel
def _append_all(args, job, jobs):
    tokens, source, target, nbytes, heads, page, table, table_width, lengths, starts, sequences = arguments(args, 11)
    for token in share(tokens, job, jobs):
        _append(token, source, target, nbytes, heads, page, table, table_width, lengths, starts, sequences)


def append_rows(pages: Pages, starts: Tensor, heads: int, pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy new rows to the pools they belong to, in the pools' dtype."""
    tokens, index = pairs[0][0].shape[0], index_of(pages, starts)
    count_pairs(pages, starts, tokens, 0)
    for new, pool in pairs:
        rows = new if new.dtype is pool.dtype else new.to(pool.dtype)
        nbytes = pool.shape[-1] * pool.element_size()
        jobs = threads() if tokens * heads * nbytes >= BYTES_PARALLEL else 1
        _append_all(jobs, tokens, rows.data_ptr(), pool.data_ptr(), nbytes, heads, *index)
