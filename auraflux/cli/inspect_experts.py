"""What `auraflux inspect` says of a packed model's experts: how much memory they need, and what each budget means."""

from typing import TYPE_CHECKING, Any

from auraflux.errors import SettingsError
from auraflux.weights.expert_settings import ExpertSettings, parse_nbytes, share_out, size

if TYPE_CHECKING:
    from auraflux.weights.expert_files import ExpertFiles

MEASURED_S = 0.5  # for each way to read
PARTS = (0.25, 0.5, 1.0, 1.34)  # of all experts: budgets that are shown


def look(files: "ExpertFiles", k: int, free: int, asked: str | None) -> dict[str, Any]:
    """Measure the disk, and share out several budgets: the least, parts of all, what is taken by default, what was asked."""
    from auraflux.weights.read_speed import direct_speed, mapped_speed

    files.check()
    speeds = {"direct": direct_speed(files.files[0], MEASURED_S), "mapped": mapped_speed(files.files[0], MEASURED_S)}
    each = sum(file.stride for file in files.files)
    budgets = {"least": k * each, **{f"{part:.0%} of all": int(part * files.nbytes) for part in PARTS}}
    budgets["by default"] = ExpertSettings().nbytes(free)
    if asked is not None:
        budgets[asked] = parse_nbytes(asked)
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
        share = share_out(files, k, nbytes)
    except SettingsError as err:
        return {**found, "refused": str(err)}
    missing = 0.0 if share.mapped else 1 - share.slots / files.count
    read = missing * k * sum(file.stride for file in files.files)
    more = {"mapped": share.mapped, "slots": share.slots, "reason": share.reason, "token_nbytes": round(read)}
    return {**found, **more, "token_s": read / speed, "refused": None}


def show(console: Any, found: dict[str, Any]) -> None:
    """Print what `look` has found."""
    from rich.table import Table

    speeds = found["read_nbytes_per_s"]
    console.print(
        f"experts: {found['layers']} layers x {found['count']}, {size(found['nbytes'])} on disk; a token uses "
        f"{found['per_token']} of each layer, {size(found['token_nbytes'])}"
    )
    console.print(
        f"this disk: {speeds['direct'] / 1e9:.2f} GB/s of experts read directly, {speeds['mapped'] / 1e9:.2f} GB/s through a "
        f"mapped file that is not in memory. Files are mapped only where all experts fit well."
    )
    table = Table(
        "--expert-memory", "", "experts are", title="what a budget means, if all are chosen alike", title_justify="left"
    )
    for name in ("held a layer", "read per token", "s per token"):
        table.add_column(name, justify="right")
    for row in found["budgets"]:
        if row["refused"] is not None:
            table.add_row(size(row["nbytes"]), row["name"], "[red]refused: too little[/red]", "", "", "")
            continue
        how = "mapped" if row["mapped"] else "read as they are chosen"
        cells = (str(row["slots"]), size(row["token_nbytes"]), f"{row['token_s']:.3f}")
        table.add_row(size(row["nbytes"]), row["name"], how, *cells)
    console.print(table)
