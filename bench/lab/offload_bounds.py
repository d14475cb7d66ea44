"""Upper bounds of decode with experts in host memory and on disk: `python -m bench.lab.offload_bounds [--disk]`.

For each shape and size of GPU memory: the share of experts that have a slot, the expert bytes that a token misses with uniform
routing, and the tokens per second at which copies of these bytes alone would fill a PCIe link. Sizes come from the planner that
divides a GPU's memory; nothing is allocated. Real routing is uneven, so a real model misses less.

With `--disk`, for each size of host memory: the share of experts that it caches, the bytes that a token reads, and the
tokens per second at which these reads alone would fill a disk. What GPU slots hold is in the larger host memory, too.
"""

import argparse

import torch

from auraflux.bench.outline_sizes import outline_sizes
from auraflux.bench.random_weights import GROUP, outlined_model
from auraflux.bench.shapes import shape_names, shape_of
from auraflux.cache import Cache, CacheSettings
from auraflux.engine.device import CHUNK
from auraflux.errors import SettingsError
from auraflux.loading.gpu_division import HOST_RESERVE_NBYTES, GpuRequest, divide
from auraflux.loading.gpu_sizes import GpuSizes
from auraflux.models import family_name
from auraflux.models.config import experts_per_token, has_experts

GB = 10**9
GPUS = (8, 12, 16, 24, 32)  # GB
CONTEXT_RESERVED = 0.7 * GB  # the CUDA context and the desktop
LINKS = {"PCIe 3.0 x16": 12, "4.0 x16": 25, "5.0 x16": 50}  # GB/s of large copies
SHAPES = ("qwen3-30b-a3b", "qwen3.6-35b-a3b", "glm-4.5-air", "minimax-m2")
DISKS = {"3 GB/s": 3, "7 GB/s": 7}  # NVMe of PCIe 3.0 and 4.0
HOST = (32, 64, 96, 128, 192, 256)  # GB
SYSTEM = 2 * GB  # the system and its programs
LARGE_SHAPES = ("glm-4.5-air", "minimax-m2", "qwen3-235b-a22b", "glm-4.6")


def slot_share(sizes: GpuSizes, shapes: list, settings: CacheSettings, gpu: int, context: int) -> float:
    """Return the share of experts that a GPU of so many GB has slots for; raise if it is too small."""

    def cache_nbytes(free: int, chunk: int) -> int:
        options = {"context": context, "sequences": 2, "chunk": chunk, "dtype": torch.bfloat16}
        return Cache(shapes, settings, **options, device="meta").reserved_nbytes

    request = GpuRequest(int(gpu * GB - CONTEXT_RESERVED), capped=True, chunk=CHUNK["cuda"])
    division = divide(sizes, request, cache_nbytes, cache_nbytes(0, request.chunk))
    experts = sizes.experts
    return 1.0 if division.slots is None or experts is None else division.slots / experts.total


def row(name: str, gpu: int, context: int, bits: int) -> list[str]:
    """Return the cells of a shape and a GPU."""
    config = shape_of(name)
    settings = CacheSettings("auto").for_family(family_name(config))
    model, shapes = outlined_model(config, bits, GROUP, "cuda")
    sizes = outline_sizes(model, experts_per_token(config))
    assert sizes.experts is not None
    used = sizes.experts.layers * sizes.experts.k * sizes.experts.nbytes
    try:
        share = slot_share(sizes, shapes, settings, gpu, context)
    except SettingsError:
        return ["too small", "", *("" for _ in LINKS)]
    missed = (1 - share) * used
    rates = [f"{rate * GB / missed:,.0f}" if missed else "all on the GPU" for rate in LINKS.values()]
    return [f"{share:.0%}", f"{missed / 1e6:,.0f}", *rates]


def disk_row(name: str, memory: int, bits: int) -> list[str]:
    """Return the cells of a shape and a size of host memory."""
    config = shape_of(name)
    model, _ = outlined_model(config, bits, GROUP, "cuda")
    experts = outline_sizes(model, experts_per_token(config)).experts
    assert experts is not None
    used, free = experts.layers * experts.k * experts.nbytes, memory * GB - SYSTEM
    # all experts are pinned where they fit; otherwise a cache of them leaves a tenth to the system
    whole = experts.host_nbytes <= free - HOST_RESERVE_NBYTES
    share = 1.0 if whole else (0.9 * free - HOST_RESERVE_NBYTES) / experts.total
    read = (1 - share) * used
    rates = [f"{rate * GB / read:,.1f}" if read else "none read" for rate in DISKS.values()]
    return [f"{experts.total / GB:.0f} GB", f"{memory} GB", f"{share:.0%}", f"{read / 1e6:,.0f}", *rates]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", action="append", choices=[name for name in shape_names() if has_experts(shape_of(name))])
    parser.add_argument("--context", type=int, default=8192, help="tokens of a sequence; the KV cache holds two")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--disk", action="store_true", help="bounds of a disk instead of a PCIe link")
    given = parser.parse_args()
    if given.disk:
        print("| model | experts | host memory | experts in it | MB read per token | " + " | ".join(DISKS) + " |")
        print("|---|---|---|---|---|" + "---|" * len(DISKS))
        for name in given.shape or LARGE_SHAPES:
            for memory in HOST:
                print(f"| {name} | " + " | ".join(disk_row(name, memory, given.bits)) + " |", flush=True)
        return
    print("| model | GPU | experts with a slot | MB missed per token | " + " | ".join(LINKS) + " |")
    print("|---|---|---|---|" + "---|" * len(LINKS))
    for name in given.shape or SHAPES:
        for gpu in GPUS:
            print(f"| {name} | {gpu} GB | " + " | ".join(row(name, gpu, given.context, given.bits)) + " |", flush=True)


if __name__ == "__main__":
    main()
