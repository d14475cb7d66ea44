"""`Prefetch`: in decode steps, one expert that the next layer will probably need is copied while PCIe would be idle.

The next layer's router runs early, on the residual stream of this layer, on a second CUDA stream. Once this layer's missing
experts are there, the first predicted one that is missing is copied, beside this layer's experts and the next one's attention.
The next fetch waits for it.
"""

from collections.abc import Callable

from torch import Tensor

from auraflux.ops import ExpertPool, prefetch_expert
from auraflux.ops.gpu.streams import CurrentStream, side_stream
from auraflux.weights.experts.resident import ExpertPredictor

MOST_TOKENS = 8  # of a step


class Prefetch:
    """Predictions and copies for a pool.

    pool  returns the pool, which changes when it is resized
    """

    def __init__(self, pool: Callable[[], ExpertPool]):
        self._pool = pool
        self._ids: Tensor | None = None
        self._layer = 0
        self._stream: CurrentStream | None = None
        # what the second stream reads: its memory may be given to other kernels only after the join
        self._held: list[Tensor] = []

    def reset(self) -> None:
        """Forget what a failed step left."""
        self._ids, self._stream, self._held = None, None, []

    def predict(self, predictor: ExpertPredictor, residual: Tensor, layer: int) -> None:
        """Predict the experts of a layer, beside the kernels that are launched next: residual [T, H]."""
        # the last layer may not run, and nothing would wait for its copies
        if len(residual) > MOST_TOKENS or layer + 1 >= self._pool().slots.shape[0]:
            return
        stream = side_stream(residual.device, residual.device.type == "cuda")
        with stream:
            self._ids, self._layer = predictor(residual), layer
        self._held.append(residual)

    def before_fetch(self) -> bool:
        """Make later kernels wait for the copies, which change the tables; return whether there are any."""
        if self._stream is None:
            return False
        self._stream.join()
        self._stream = None
        del self._held[:-1]
        return True

    def after_fetch(self) -> None:
        """Start the copy of a predicted expert, after the kernels that were launched."""
        if self._ids is None:
            return
        stream = side_stream(self._ids.device, self._ids.device.type == "cuda")
        with stream:
            prefetch_expert(self._ids, self._pool(), self._layer)
        stream.mark()
        self._ids, self._stream = None, stream
