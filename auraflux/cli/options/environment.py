"""The environment variables that auraflux and its libraries read, as a table of docs/cli.md."""

import os

from auraflux.errors import SettingsError

OURS = {
    "AURAFLUX_BACKEND": "Backend of every op: `reference`, `cpu` or `cuda`; by default that of its tensors' device.",
    "AURAFLUX_ISA": "Instruction set of the CPU kernels: `avx512-amx`, `avx512-vnni`, `avx-vnni`, `avx2`, `neon-i8mm`, "
    "`neon-dotprod` or `portable`; by default the best that the processor supports.",
    "AURAFLUX_AS_GPU": "A compute capability, such as `8.9`, whose kernels and limits a newer GPU is to use, to test them.",
    "AURAFLUX_CACHE": "Absolute path of the folder for compiled CPU kernels, key calibrations and the prefix cache; "
    "by default `auraflux` in the user's cache folder.",
    "AURAFLUX_HOME": "Folder whose `models` subfolder holds built-in models; by default `auraflux` in the user's cache folder.",
    "AURAFLUX_API_KEY": "API key that `auraflux serve` requires of clients, and that `ps`, `show` and `bench serve` send.",
}
OTHERS = {
    "XDG_CACHE_HOME": "Absolute path of the user's cache folder; by default `~/.cache`.",
    "HF_HOME": "Folder of models that huggingface_hub downloads (`org/name`); its other variables (`HF_TOKEN`, `HF_ENDPOINT`, "
    "`HF_HUB_OFFLINE`) work too.",
    "NUMBA_NUM_THREADS": "Threads of CPU kernels; by default one per physical core, within the CPU quota of a container.",
    "OMP_NUM_THREADS": "Threads of torch, which runs references and dense products.",
    "CUDA_VISIBLE_DEVICES": "Visible GPUs; if empty, `--device auto` chooses the CPU.",
    "TRITON_CACHE_DIR": "Folder of compiled Triton kernels; by default `~/.triton/cache`.",
    "TRITON_INTERPRET": "`1` runs Triton kernels in the interpreter on CPU tensors, to test them without a GPU.",
}


def check_environment() -> None:
    """Refuse a thread count that would make Numba fail with a traceback."""
    threads = os.environ.get("NUMBA_NUM_THREADS", "1")
    if not threads.isdecimal() or int(threads) == 0:
        raise SettingsError(f"NUMBA_NUM_THREADS is {threads!r}. It must be an integer above 0.")


def environment() -> str:
    """Return the section of docs/cli.md about environment variables."""
    rows = [f"| `{name}` | {meaning} |" for name, meaning in (OURS | OTHERS).items()]
    return "\n".join(["## Environment variables\n", "| variable | meaning |", "|---|---|", *rows, ""])
