"""`CpuExpertWorker`: threads that compute experts in host memory for requests in a mailbox, without Python per request.

Arithmetic is that of the GPU kernels: x and the hidden vector are bf16, sums are float32, and scales and biases are applied to
the sums of a group. Only the order of sums differs.
"""

import ctypes
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from auraflux.errors import FormatError, SettingsError
from auraflux.ops.moe.cpu import expert_chunks as chunks
from auraflux.ops.moe.cpu.mailbox_loop import compile_loop, init_shared, serve
from auraflux.ops.moe.cpu.polling import SHARED_NBYTES, TIMESPEC_NBYTES, wake
from auraflux.ops.moe.cpu.row_form import HAS_BF16, RowForm
from auraflux.ops.moe.experts import KINDS
from auraflux.ops.simd.jit import LINE
from auraflux.quant import QTensor
from auraflux.weights.experts.cpu_worker.mailbox import Mailbox

BITS, MIN_GROUP = (2, 4, 8), 32
SCALES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
OUT_NBYTES = 2 * 4 * 4  # results of four rows for two tokens
ERRORS = {
    chunks.BAD_LAYER: "the layer is out of range",
    chunks.BAD_COUNT: "the number of pairs is out of range",
    chunks.BAD_TOKEN: "a token is out of range",
    chunks.BAD_EXPERT: "an expert is out of range",
}


class _Running(NamedTuple):
    """Threads and the memory they use."""

    threads: list[threading.Thread]
    shared: int
    memory: tuple[Any, ...]


class CpuExpertWorker:
    """Experts of several layers, computed on request by threads of their own.

    blobs       per layer, uint8 [E, stride] in host memory, see `Experts.from_blobs`; they may be pinned
    like        one expert's matrices, for shapes and formats
    threads     that compute; each needs a core of its own
    max_pairs   most pairs of token and expert in a request
    max_tokens  most tokens in a request
    """

    def __init__(
        self, blobs: Sequence[Tensor], like: Mapping[str, QTensor], hidden: int, inner: int, threads: int,
        max_pairs: int = 32, max_tokens: int = 4,
    ):  # fmt: skip
        if (reason := self.refuses(like)) is not None:
            raise FormatError(f"the CPU cannot compute these experts: {reason}.")
        if min(threads, max_pairs, max_tokens) < 1:
            raise SettingsError(
                f"a worker of {threads} threads, {max_pairs} pairs and {max_tokens} tokens is not possible; each is at least 1."
            )
        if like["up"].shape != (inner, hidden) or like["down"].shape != (hidden, inner):
            shapes = f"up {list(like['up'].shape)} and down {list(like['down'].shape)}"
            raise FormatError(f"experts have {shapes}; hidden {hidden} and inner {inner} are given.")
        _check_blobs(blobs, sum(like[name].nbytes for name in KINDS))
        self.mailbox = Mailbox(hidden, max_pairs, max_tokens)
        self.threads = threads
        up = like["up"]
        self._form = RowForm(up.bits, up.group, SCALES[up.scales.dtype], HAS_BF16 and up.bits <= 4)
        self._between = torch.zeros(max_pairs, inner, dtype=torch.bfloat16)
        self._blobs = list(blobs)
        rows = [(each.data_ptr(), each.stride(0), each.shape[0]) for each in blobs]
        self._table = torch.tensor(rows, dtype=torch.int64)
        self._setup, self._scratch_nbytes = self._make_setup(like, hidden, inner, max_pairs, max_tokens)
        self._running: _Running | None = None
        self._finalizer: weakref.finalize | None = None

    @classmethod
    def refuses(cls, like: Mapping[str, QTensor]) -> str | None:
        """Return why experts of a format cannot be computed here; None if they can."""
        if missing := [name for name in KINDS if name not in like]:
            return f"they have no '{missing[0]}'"
        for name in KINDS:
            matrix = like[name]
            form = f"'{name}' is {matrix.kind} with {matrix.bits} bits in groups of {matrix.group}"
            if matrix.kind != "affine" or matrix.bits not in BITS or matrix.group < MIN_GROUP:
                return f"{form}; affine codes of 2, 4 or 8 bits in groups of {MIN_GROUP} or more are supported"
            if matrix.lanes != 1:
                return f"rows of '{name}' are interleaved"
            if len(matrix.shape) != 2:
                return f"'{name}' is a stack of matrices"
        if len({like[name].format for name in KINDS}) > 1:
            return "the formats of their matrices differ"
        return None

    def _make_setup(
        self, like: Mapping[str, QTensor], hidden: int, inner: int, max_pairs: int, max_tokens: int
    ) -> tuple[Tensor, int]:
        """Return the words of `expert_chunks`' setup, and the bytes of a thread's scratch memory."""
        form, box = self._form, self.mailbox
        setup = [box.address(name) for name in ("layer", "pairs", "experts", "x", "result")]
        setup += [self._table.data_ptr(), len(self._blobs), hidden, inner, max_pairs, max_tokens, self.threads]
        setup += [self._between.data_ptr()]
        offset = 0
        for name in KINDS:
            for array in (like[name].packed, like[name].scales, like[name].biases):
                setup.append(offset)
                offset += 0 if array is None else array.nbytes
        x_at = _lines(8 * chunks.plan_words(max_pairs, max_tokens))
        # one line more: power-of-two strides share cache sets
        x_nbytes, between_nbytes = (_lines(form.token_nbytes(width)) + LINE for width in (hidden, inner))
        between_at = x_at + max_tokens * x_nbytes
        out_at = between_at + max_pairs * between_nbytes
        padded_at = out_at + _lines(OUT_NBYTES)
        setup += [x_at, x_nbytes, form.sums_offset(hidden), between_at, between_nbytes, form.sums_offset(inner)]
        setup += [out_at, padded_at]
        assert len(setup) == chunks.SETUP_WORDS
        return torch.tensor(setup, dtype=torch.int64), padded_at + _lines(2 * (max(hidden, inner) + form.unit))

    def start(self) -> None:
        """Start the threads; a request that is already in the mailbox is answered."""
        if self._running is not None:
            raise SettingsError("the threads of this worker run already.")
        compile_loop()
        kernel = chunks.chunk_kernel(self._form)
        code = kernel.compile()
        shared, shared_at = _aligned(SHARED_NBYTES)
        each = self._scratch_nbytes + _lines(TIMESPEC_NBYTES) + LINE
        scratch, scratch_at = _aligned(self.threads * each)
        fields = tuple(self.mailbox.address(name) for name in ("request_seq", "done_seq", "error"))
        init_shared(shared_at, code, self._setup.data_ptr(), (fields[0], fields[1], fields[2]))
        memory = shared, scratch, kernel, self._setup, self._table, self._between, self._blobs, self.mailbox
        threads = [
            threading.Thread(
                target=_serve,
                args=(memory, shared_at, int(n == 0), scratch_at + n * each, scratch_at + n * each + self._scratch_nbytes),
                name=f"cpu-experts-{n}",
                daemon=True,
            )
            for n in range(self.threads)
        ]
        for thread in threads:
            thread.start()
        self._running = _Running(threads, shared_at, memory)
        # threads must end before their machine code is freed, and when nobody holds this object
        self._finalizer = weakref.finalize(self, _stop, self._running)

    def stop(self) -> None:
        """Stop the threads after the request that they compute; nothing happens if they do not run."""
        if self._finalizer is not None:
            self._finalizer()
        self._running = self._finalizer = None

    def wake(self) -> None:
        """Make the threads poll again before a request comes; call it before a step that may send some."""
        if self._running is not None:
            wake(self._running.shared, 0)

    @property
    def error(self) -> str | None:
        """Say why a request was wrong; None if none was since `clear_error`."""
        code = int(self.mailbox.error)
        return ERRORS.get(code, f"unknown error {code}") if code else None

    def clear_error(self) -> None:
        self.mailbox.error.zero_()

    def __enter__(self) -> "CpuExpertWorker":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def _serve(memory: tuple[Any, ...], *words: int) -> None:
    """Run a thread, which keeps the memory that its code reads."""
    serve(*words)


def _stop(running: _Running) -> None:
    wake(running.shared, 1)
    for thread in running.threads:
        thread.join()


def _check_blobs(blobs: Sequence[Tensor], nbytes: int) -> None:
    if not blobs:
        raise FormatError("there are no layers of experts.")
    for layer, each in enumerate(blobs):
        if each.dtype != torch.uint8 or each.dim() != 2 or each.stride(1) != 1 or not each.is_cpu:
            found = f"{each.dtype} {list(each.shape)} on {each.device}"
            raise FormatError(f"expert blobs are uint8 [E, size] in host memory; layer {layer} has {found}.")
        if each.shape[1] < nbytes:
            raise FormatError(f"a blob of layer {layer} has {each.shape[1]} bytes; an expert has {nbytes}.")


def _lines(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE


def _aligned(nbytes: int) -> tuple[Any, int]:
    """Return zeroed memory and its first address at a cache line."""
    memory = ctypes.create_string_buffer(nbytes + LINE)
    start = ctypes.addressof(memory)
    return memory, start + -start % LINE
