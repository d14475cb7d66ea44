"""The report of a benchmark as JSON: the machine, the versions, the command, then every result."""

import json
import math
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import auraflux
from auraflux.bench.result import PeerResult, Result
from auraflux.bench.timing import Timing
from auraflux.errors import InputError
from auraflux.machine import this_machine, versions

PACKAGES = ("torch", "numba", "llvmlite", "numpy", "triton", "mlx", "onnxruntime", "transformers")


def document(
    command: str, device: str, threads: int, load_before: float, peak: dict[str, float], results: Sequence[Result]
) -> dict[str, Any]:
    return {
        "machine": asdict(this_machine()),
        "versions": {"auraflux": auraflux.__version__, "python": platform.python_version(), **versions(*PACKAGES)},
        "command": command,
        "commit": commit(),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "threads": threads,
        "load_before": round(load_before, 2),
        "read_ceiling_gb_per_s": {name: round(rate / 1e9, 2) for name, rate in peak.items()},
        "results": [row(result, peak["all_threads"]) for result in results],
    }


def row(result: Result, peak: float) -> dict[str, Any]:
    """Return one result as numbers with units in their names; a missing one is null."""
    seconds = result.timing.median_s if result.timing is not None else None
    rate = result.nbytes / seconds if seconds is not None and result.nbytes is not None else None
    return {
        "op": result.op,
        "case": result.case,
        "contract": result.contract,
        "state": result.state,
        "note": result.note,
        "error": finite(result.error),
        **times(result.timing),
        "nbytes": result.nbytes,
        "gb_per_s": rate / 1e9 if rate is not None else None,
        "ceiling_share": rate / peak if rate is not None else None,
        "gflop_per_s": result.flops / seconds / 1e9 if result.flops is not None and seconds is not None else None,
        "peers": [_peer(peer, seconds) for peer in result.peers],
    }


def _peer(peer: PeerResult, seconds: float | None) -> dict[str, Any]:
    """`ratio` is the peer's time over ours: above 1 we are faster."""
    return {
        "name": peer.name,
        "contract": peer.contract,
        "note": peer.note,
        "error": finite(peer.error),
        **times(peer.timing),
        "ratio": ratio(peer.timing, seconds),
    }


def ratio(timing: Timing | None, seconds: float | None) -> float | None:
    return timing.median_s / seconds if timing is not None and seconds is not None else None


def times(timing: Timing | None) -> dict[str, Any]:
    if timing is None:
        return {"time_us": None, "low_us": None, "high_us": None, "samples": 0}
    median, low, high = (1e6 * t for t in (timing.median_s, timing.low_s, timing.high_s))
    return {"time_us": median, "low_us": low, "high_us": high, "samples": timing.samples}


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def commit() -> str | None:
    """Return the commit of the checkout this package runs from, marked if files differ from it; None outside a checkout."""
    root = Path(auraflux.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    try:
        head, changes = (
            subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=10).stdout
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head.strip() + (" with changes" if changes else "")


def place(path: Path, slug: str) -> Path:
    """Return the file to write: the path itself, or one named after the machine if the path is a folder."""
    target = path / f"{slug}.json" if path.is_dir() else path
    if not target.parent.is_dir():
        raise InputError(f"cannot save to {target}: there is no folder {target.parent}.")
    return target


def save(found: dict[str, Any], target: Path) -> None:
    """Write the report atomically."""
    text = json.dumps(found, indent=2, allow_nan=False) + "\n"
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
            part = Path(folder) / target.name
            part.write_text(text)
            part.replace(target)
    except OSError as err:
        raise InputError(f"cannot save to {target}: {err.strerror}.") from err
