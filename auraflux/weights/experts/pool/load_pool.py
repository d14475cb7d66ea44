"""Loading of a layer's experts into a `GpuExpertPool`: a blob of each in host memory, in the layout of GPU kernels."""

import os
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from auraflux.errors import ExpertError, FormatError
from auraflux.machine import usable_cores
from auraflux.ops.moe.experts import blob_of
from auraflux.quant import QTensor
from auraflux.weights.experts.packed_files import ExpertFile
from auraflux.weights.experts.page_cache import drop_page_cache
from auraflux.weights.experts.stacks import describe
from auraflux.weights.formats.stored import Stored, is_placeholder

READS = 8  # in flight: enough to keep a disk busy
MAX_THREADS = 8  # that copy experts: more do not read memory faster

Matrices = Mapping[str, Stored]


def write_blobs(
    name: str, rows: Tensor, stored: Callable[[int], Matrices], convert: Callable[[Matrices], Matrices], like: Matrices
) -> None:
    """Convert experts and write the blob of each into its row: uint8 [E, size].

    stored   returns an expert's matrices as they are in the checkpoint
    convert  converts them to the layout of the kernels
    like     the first expert's converted matrices, whose formats all others must have
    """

    def write(expert: int, found: Matrices) -> None:
        matrices = convert(found)
        if any(is_placeholder(matrix) for matrix in matrices.values()):
            # the tensor is missing, which is reported for all tensors at once
            return
        _check_formats(name, expert, matrices, like)
        blob_of(matrices, out=rows[expert])

    count = min(MAX_THREADS, usable_cores())
    with ThreadPoolExecutor(count) as threads:
        pending: deque[Future[None]] = deque()
        for expert in range(len(rows)):
            if len(pending) == 2 * count:
                # some formats are repacked when they are loaded: few experts at a time
                pending.popleft().result()
            # one thread opens tensors; the others read their pages, while they convert and copy
            pending.append(threads.submit(write, expert, stored(expert)))
        for each in pending:
            each.result()


def read_blobs(file: ExpertFile, rows: Tensor, verify: bool) -> None:
    """Read a layer's expert file into rows, with several threads, and drop it from the page cache.

    rows    uint8 [E, size], at least as wide as the experts in the file
    verify  check each expert's checksum
    """
    handle = os.open(file.path, os.O_RDONLY)

    def read(expert: int) -> None:
        memory, start = memoryview(rows[expert, : file.nbytes].numpy().data), 0
        while start < len(memory):
            count = os.preadv(handle, [memory[start:]], file.offset(expert) + start)
            if count == 0:
                raise ExpertError(f"expert {expert} of {file.module} cannot be read: {file.path} is truncated.")
            start += count
        drop_page_cache(handle, file.offset(expert), file.stride)
        if verify and zlib.crc32(memory) != file.checksum(expert):
            raise ExpertError(
                f"expert {expert} of {file.module} cannot be used: {file.path} does not match its checksum; "
                f"pack the model again."
            )

    try:
        with ThreadPoolExecutor(READS) as threads:
            list(threads.map(read, range(file.count)))
    except OSError as err:
        reason = err.strerror or err
        raise ExpertError(f"experts of {file.module} cannot be read: {file.path} gives an error ({reason}).") from err
    finally:
        os.close(handle)


def _check_formats(name: str, expert: int, matrices: Matrices, like: Matrices) -> None:
    for kind, first in like.items():
        found = matrices[kind]
        if isinstance(first, QTensor):
            same = isinstance(found, QTensor) and (found.format, found.kind) == (first.format, first.kind)
        else:
            same = isinstance(found, Tensor) and found.dtype == first.dtype
        if not same:
            raise FormatError(f"expert {expert} in {name}.{kind} is {describe(found)}, and expert 0 is {describe(first)}.")
