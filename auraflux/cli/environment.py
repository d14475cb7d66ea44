"""The environment variables that matter here, each with one sentence: a table of docs/cli.md."""

import os

from auraflux.errors import SettingsError

OURS = {
    "AURAFLUX_BACKEND": "Forces `reference`, `cpu` or `cuda` on every op, whatever device its tensors are on.",
    "AURAFLUX_ISA": "Names the instructions that CPU kernels use, of those this processor has: "
    "`avx512-vnni`, `avx-vnni`, `avx2`, `neon-i8mm`, `neon-dotprod` or `portable`; without it, the best.",
    "AURAFLUX_CACHE": "The folder, an absolute path, for what can be made again, compiled CPU kernels and prefixes among it; "
    "without it, `auraflux` in the user's cache folder.",
    "AURAFLUX_HOME": "The folder under whose `models` built-in models are kept; "
    "without it, `auraflux` in the user's cache folder.",
    "AURAFLUX_API_KEY": "A key that `auraflux serve` demands of its clients, and that `auraflux bench serve` sends.",
}
OTHERS = {
    "XDG_CACHE_HOME": "The user's cache folder, an absolute path; without it, `~/.cache`.",
    "HF_HOME": "Where huggingface_hub keeps models named as `org/name`; its other variables (`HF_TOKEN`, `HF_ENDPOINT`, "
    "`HF_HUB_OFFLINE`) hold too.",
    "NUMBA_NUM_THREADS": "How many threads CPU kernels run on; without it, one for each core.",
    "OMP_NUM_THREADS": "How many threads torch uses where it computes itself, as in references and dense products.",
    "CUDA_VISIBLE_DEVICES": "Which GPUs there are; empty, `--device auto` takes the CPU.",
    "TRITON_CACHE_DIR": "Where Triton keeps compiled GPU kernels; without it, `~/.triton/cache`.",
    "TRITON_INTERPRET": "Set to `1` before Python starts, Triton kernels run on CPU tensors, one program after the other: "
    "to test them without a GPU.",
}


def check_environment() -> None:
    """Refuse what Numba would end with a traceback for."""
    threads = os.environ.get("NUMBA_NUM_THREADS", "1")
    if not threads.isdecimal() or int(threads) == 0:
        raise SettingsError(f"NUMBA_NUM_THREADS is {threads!r}. It must be a whole number above 0.")


def environment() -> str:
    """The section about them."""
    rows = [f"| `{name}` | {meaning} |" for name, meaning in (OURS | OTHERS).items()]
    return "\n".join(["## Environment variables\n", "| variable | what it does |", "|---|---|", *rows, ""])
