"""The prefill budget: how many prompt tokens each engine step computes, and of which sequences."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from auraflux.engine.engine import padded_batch_size
from auraflux.scheduler.budget.chunk_costs import ChunkCosts
from auraflux.scheduler.budget.latency_target import LatencyTarget

# on a CPU, prefill delays decode by at most PAUSE_S as far as LEAST tokens allow; a chunk is worth at least WORTH_S, since
# every prefill step costs its Python, 18 ms for 30 layers
PAUSE_S, WORTH_S = 0.5, 0.1
# tokens per step while sequences decode; up to 256 tokens a GPU is bound by its weights
LEAST = {"cpu": 16, "cuda": 256}
MOST = {"cpu": 128, "cuda": 2048}
SPREAD = {"cpu": 16, "cuda": 8}  # steps over which pending prompts are spread while sequences decode
CROWD = 16  # decoding sequences on a GPU: LEAST tokens for every so many of them, while fewer prompts wait
# of a step of several chunks, if two take less: a request that arrives meanwhile waits for its end
STEP_S = 2.0
# of a target latency: steps of one size differ by 2 % on a GPU
MIXED_AIM = 0.95
TOGETHER = 8  # prompts whose chunks share a step


class PrefillBudget:
    """Prefills large chunks while nothing decodes, else a part of the pending tokens, so that decode steps come evenly.

    chunk         maximum tokens of a prefill step
    device        "cpu" or "cuda"
    target_itl_s  inter-token latency that running sequences should keep; None to share each step by the constants above
    """

    def __init__(self, chunk: int, device: str = "cpu", target_itl_s: float | None = None):
        self.chunk, self.device = chunk, device
        self.target = None if target_itl_s is None else LatencyTarget(target_itl_s, min(LEAST[device], chunk), chunk)
        self.costs = ChunkCosts(lag=device == "cuda")
        self._rate: float | None = None
        # of steps of several chunks
        self._step_rate: float | None = None
        self._steps = 0

    def tokens(self, uncomputed: int, prefilling: int, decoding: int, sizes: Sequence[int] = ()) -> int:
        """Return the token budget of this step.

        uncomputed  pending prompt tokens of all sequences
        prefilling  sequences with pending prompt tokens
        decoding    sequences that decode in the same step
        sizes       of prefill chunks that may join them in a mixed batch
        """
        if decoding == 0:
            self.costs.pause()
            if self.target is not None:
                self.target.pause()
            return self.chunk
        target_s = None if self.target is None else MIXED_AIM * self.target.target_s
        by_cost = self.costs.choose(padded_batch_size(decoding), sizes, target_s) if sizes else None
        if self.target is not None:
            return self.target.tokens() if by_cost is None else by_cost
        return max(by_cost or 0, self._by_constants(uncomputed, prefilling, decoding))

    def _by_constants(self, uncomputed: int, prefilling: int, decoding: int) -> int:
        unit, most = LEAST[self.device], MOST[self.device]
        least = unit
        if self.device == "cuda" and prefilling < decoding:
            # few prompts wait: their TTFT is short anyway, and a large chunk would delay every decoding sequence
            most = min(most, unit * max(1, decoding // CROWD))
        if self._rate is not None:
            least = min(max(unit, int(self._rate * WORTH_S)), most)
            most = max(least, min(most, int(self._rate * PAUSE_S)))
        # few distinct sizes, so that CUDA graphs are reused
        share = uncomputed // SPREAD[self.device] // unit * unit
        return min(max(least, min(share, most)), self.chunk)

    def several_chunks(self, most: int) -> int:
        """Return the tokens of a step of several chunks, at most `most`: such steps come only while nothing decodes."""
        return most if self._step_rate is None else min(most, max(2 * self.chunk, int(self._step_rate * STEP_S)))

    def split(self, wanted: list[int], budget: int, one: bool = False) -> list[int]:
        """Split a budget between prompts that want so many tokens each, the longest waiting first.

        That one gets half and the shortest prompts get the rest, so that short prompts do not wait for a long one, nor a long
        one for ever. A budget too small to be halved goes alternately to the one and the other.

        one  serve a single prompt, in a mixed batch: each further one would load all weights again
        """
        self._steps += 1
        small = one or budget < 2 * LEAST[self.device]
        others = sorted(range(1, len(wanted)), key=lambda i: wanted[i])
        order = [*others, 0] if small and self._steps % 2 else [0, *others]
        shares, left = [0] * len(wanted), budget
        for i in order[: 1 if one else TOGETHER]:
            most = left if small or i or not others else max(budget // 2, budget - sum(wanted[j] for j in others))
            shares[i] = min(wanted[i], most, left)
            left -= shares[i]
        # tokens that the shortest prompts did not need
        if left and shares[0]:
            shares[0] += min(wanted[0] - shares[0], left)
        return shares

    @contextmanager
    def measured(self, tokens: int) -> Iterator[None]:
        """Measure the prefill rate of a CPU, and that of steps of several chunks; other GPU steps are asynchronous."""
        began = time.perf_counter()
        yield
        rate = tokens / (time.perf_counter() - began)
        if tokens > self.chunk:
            self._step_rate = rate
        elif self.device == "cpu" and tokens >= LEAST["cpu"]:
            self._rate = rate if self._rate is None else 0.7 * self._rate + 0.3 * rate
