"""A GPU that passes for an older one: AURAFLUX_AS_GPU=8.9 runs the routes of an RTX 4090 on a Hopper.

The GPU reports the older compute capability. Triton generates PTX for it, so that an instruction it lacks fails to assemble,
and a kernel that asks for more shared memory than it has fails to load. Times are those of the GPU that is there.
"""

import os

import torch
import triton.compiler.compiler as triton_compiler
from triton.backends.nvidia.compiler import CUDABackend

from auraflux.errors import SettingsError
from auraflux.ops.fake_gpu import SHARED_KB, VARIABLE, Capability

_capability_there = torch.cuda.get_device_capability


def as_another_gpu() -> None:
    """Make the GPU pass for the one that AURAFLUX_AS_GPU names, if it is set."""
    if not (name := os.environ.get(VARIABLE)):
        return
    older = capability_named(name)
    assemble, describe = CUDABackend.make_cubin, CUDABackend.hash

    def for_gpu_there(self: CUDABackend, source: str, metadata: object, options: object, _: int) -> bytes:
        major, minor = _capability_there()
        cubin: bytes = assemble(self, source, metadata, options, 10 * major + minor)
        return cubin

    torch.cuda.get_device_capability = lambda device=None: older
    triton_compiler.max_shared_mem = lambda device: SHARED_KB[older] << 10
    CUDABackend.make_cubin = for_gpu_there
    # a real GPU of that capability must not find this machine code in Triton's cache
    CUDABackend.hash = lambda self: f"{describe(self)} on another GPU"


def capability_named(name: str) -> Capability:
    """Return the compute capability that a value of AURAFLUX_AS_GPU names."""
    known = {f"{major}.{minor}": (major, minor) for major, minor in SHARED_KB}
    if name not in known:
        raise SettingsError(f"{VARIABLE} is {name!r}; it must be one of {', '.join(known)}.")
    return known[name]
