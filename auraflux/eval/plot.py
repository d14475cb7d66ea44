"""Plots of an evaluation: KL divergence by cache bytes, needles by length and depth, calls by length, memory by context."""

from pathlib import Path
from typing import Any

from auraflux.errors import BackendError, InputError

INK, GRID, PAPER = "#1f2933", "#d9dee3", "#ffffff"
OURS, THEIRS = "#2563a8", "#d9722e"
DPI = 160
MIN_KL = 1e-7  # nats; smaller values are rounding errors


def check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be created, before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise BackendError("--save draws with matplotlib. Install it with: pip install matplotlib") from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise InputError(f"cannot save to {folder}: {err.strerror or err}.") from err


def draw_all(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Draw the plots of all tasks that were run; return their files."""
    drawn = [folder / "kl.png", folder / "memory.png"]
    draw_kl(rows, drawn[0])
    draw_memory(rows, drawn[1])
    if any(row["needle"] for row in rows):
        drawn.append(folder / "needle.png")
        draw_needle(rows, drawn[-1])
    if any(row["tools"] for row in rows):
        drawn.append(folder / "tools.png")
        draw_tools(rows, drawn[-1])
    return drawn


def draw_kl(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot the mean KL divergence by KV cache bytes per token."""
    figure, panel = _panel(8, 5)
    for simulated, colour, label in ((False, OURS, "auraflux"), (True, THEIRS, "others, simulated")):
        shown = [row for row in rows if row["simulated"] is simulated and row["text"].get("kl_mean", 0) > MIN_KL]
        if not shown:
            continue
        at = [(row["token_nbytes"], row["text"]["kl_mean"]) for row in shown]
        panel.scatter(*zip(*at, strict=True), color=colour, label=label, zorder=3)
        for row, place in zip(shown, at, strict=True):
            panel.annotate(row["setting"], place, (5, 4), textcoords="offset points", color=colour, fontsize=8)
    panel.set_yscale("log")
    panel.set_xlabel("KV cache bytes per token", color=INK)
    panel.set_ylabel("mean KL from the uncompressed cache, nats", color=INK)
    _save(figure, panel, path)


def draw_memory(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot the KV cache bytes of one sequence by its length."""
    figure, panel = _panel(8, 5)
    for row in rows:
        lengths, sizes = zip(*((int(n), size / 1e6) for n, size in row["nbytes_at"].items()), strict=True)
        style = "o--" if row["simulated"] else "o-"
        panel.plot(lengths, sizes, style, linewidth=1.5, markersize=4, label=row["setting"])
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xlabel("tokens", color=INK)
    panel.set_ylabel("KV cache, MB", color=INK)
    _save(figure, panel, path)


def draw_needle(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot the probability of the right value: a row per setting, a column per length and depth."""
    shown = [row for row in rows if row["needle"]]
    columns = [(length, depth) for length, found in shown[0]["needle"].items() for depth in found["by_depth"]]
    cells = [[row["needle"][length]["by_depth"][depth] for length, depth in columns] for row in shown]
    figure, panel = _panel(2.5 + 0.6 * len(columns), 1.5 + 0.35 * len(shown))
    image = panel.imshow(cells, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    panel.set_xticks(range(len(columns)), [f"{length}\n{float(depth):.0%}" for length, depth in columns], fontsize=7)
    panel.set_yticks(range(len(shown)), [row["setting"] for row in shown], fontsize=8)
    panel.set_xlabel("context length, depth of the fact", color=INK)
    figure.colorbar(image, ax=panel, label="probability of the right value")
    _save(figure, panel, path, grid=False)


def draw_tools(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot the mean KL divergence over the tokens of right calls by conversation length."""
    figure, panel = _panel(8, 5)
    for row in rows:
        at = [(int(n), found["kl_mean"]) for n, found in row["tools"].items() if found["kl_mean"] > MIN_KL]
        if at:
            style = "o--" if row["simulated"] else "o-"
            panel.plot(*zip(*at, strict=True), style, linewidth=1.5, markersize=4, label=row["setting"])
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xlabel("conversation length, tokens", color=INK)
    panel.set_ylabel("mean KL over call tokens, nats", color=INK)
    _save(figure, panel, path)


def _panel(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor=PAPER, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _save(figure: Any, panel: Any, path: Path, grid: bool = True) -> None:
    if grid:
        panel.grid(True, color=GRID, linewidth=0.8)
        panel.set_axisbelow(True)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    if panel.get_legend_handles_labels()[0]:
        panel.legend(frameon=False, fontsize=8, labelcolor=INK)
    figure.savefig(path, dpi=DPI)
