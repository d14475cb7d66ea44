"""Experts of a packed model in `auraflux inspect`: their memory, and the effect of each expert cache size."""

from typing import TYPE_CHECKING, Any

from auraflux.errors import SettingsError
from auraflux.weights.experts.settings import ExpertSettings, format_nbytes, parse_nbytes, plan_expert_cache

if TYPE_CHECKING:
    from auraflux.weights.experts.packed_files import ExpertFiles

MEASURED_S = 0.5  # per read method
FRACTIONS = (0.25, 0.5, 1.0, 1.34)  # of all experts: cache sizes shown


def measure(files: "ExpertFiles", k: int, free: int, requested: str | None) -> dict[str, Any]:
    """Measure the disk and plan cache sizes: the minimum, fractions of all experts, the default and the requested size."""
    from auraflux.weights.experts.read_speed import direct_speed, mapped_speed

    files.check()
    speeds = {"direct": direct_speed(files.files[0], MEASURED_S), "mapped": mapped_speed(files.files[0], MEASURED_S)}
    each = sum(file.stride for file in files.files)
    budgets = {"minimum": k * each, **{f"{part:.0%} of all": int(part * files.nbytes) for part in FRACTIONS}}
    budgets["default"] = ExpertSettings().nbytes(free)
    if requested is not None:
        budgets[requested] = parse_nbytes(requested)
    return {
        "layers": len(files.files),
        "count": files.count,
        "per_token": k,
        "nbytes": files.nbytes,
        "token_nbytes": k * each,
        "least_nbytes": k * each,
        "read_nbytes_per_s": speeds,
        "budgets": [
            _budget(name, files, k, nbytes, speeds["direct"])
            for name, nbytes in sorted(budgets.items(), key=lambda item: item[1])
        ],
    }


def _budget(name: str, files: "ExpertFiles", k: int, nbytes: int, speed: float) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "nbytes": nbytes}
    try:
        plan = plan_expert_cache(files, k, nbytes)
    except SettingsError as err:
        return {**found, "refused": str(err)}
    missing = 0.0 if plan.mapped else 1 - plan.slots / files.count
    read = missing * k * sum(file.stride for file in files.files)
    more = {"mapped": plan.mapped, "slots": plan.slots, "reason": plan.reason, "token_nbytes": round(read)}
    return {**found, **more, "token_s": read / speed, "refused": None}


def show(console: Any, found: dict[str, Any]) -> None:
    """Print the result of `measure`."""
    from rich.table import Table

    speeds = found["read_nbytes_per_s"]
    console.print(
        f"experts: {found['layers']} layers x {found['count']}, {format_nbytes(found['nbytes'])} on disk; a token uses "
        f"{found['per_token']} of each layer, {format_nbytes(found['token_nbytes'])}"
    )
    console.print(
        f"this disk: {speeds['direct'] / 1e9:.2f} GB/s for direct expert reads, {speeds['mapped'] / 1e9:.2f} GB/s through a "
        f"memory-mapped file on a cold page cache. Files are memory-mapped only where all experts fit with room to spare."
    )
    table = Table(
        "--expert-memory", "", "expert I/O", title="expert cache sizes, for uniformly chosen experts", title_justify="left"
    )
    for name in ("cached per layer", "read per token", "s per token"):
        table.add_column(name, justify="right")
    for row in found["budgets"]:
        if row["refused"] is not None:
            table.add_row(format_nbytes(row["nbytes"]), row["name"], "[red]refused: too small[/red]", "", "", "")
            continue
        how = "memory-mapped" if row["mapped"] else "read on demand"
        cells = (str(row["slots"]), format_nbytes(row["token_nbytes"]), f"{row['token_s']:.3f}")
        table.add_row(format_nbytes(row["nbytes"]), row["name"], how, *cells)
    console.print(table)
