"""Experts computed on the CPU for a GPU, by threads that poll a mailbox in host memory.

mailbox  the memory of a request and its answer, which the GPU writes and reads
worker   the threads and the experts they compute
"""

from auraflux.weights.experts.cpu_worker.mailbox import Mailbox
from auraflux.weights.experts.cpu_worker.worker import CpuExpertWorker

__all__ = ["CpuExpertWorker", "Mailbox"]
