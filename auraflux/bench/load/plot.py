"""A plot of latency and throughput against load."""

from pathlib import Path
from typing import Any

from auraflux.errors import BackendError, InputError

INK, GRID, PAPER = "#1f2933", "#d9dee3", "#ffffff"
BLUE, ORANGE, GREEN = "#2563a8", "#d9722e", "#2f8f5b"
LATENCIES = (
    ("time_to_first_token_ms", "TTFT", ORANGE),
    ("inter_token_while_prompts_arrive_ms", "ITL", BLUE),
)
# the second where there was no time in which all decode
DECODE = ("decode_tokens_per_s", "decode_tokens_per_s_by_difference")
RATES = (
    (DECODE, "while all decode", BLUE, "o", (-7, 4), "right"),
    (("output_tokens_per_s",), "while prompts arrive", GREEN, "s", (7, -8), "left"),
)
LOADS = {"closed": ("clients", "clients at once"), "poisson": ("rate", "requests per second")}
DPI = 160


def check_plot(path: Path) -> None:
    """Refuse, before the measurement, a plot that could not be written."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise BackendError("--plot needs matplotlib. Install it with: pip install matplotlib") from None
    if path.suffix.lower() != ".png":
        raise InputError(f"--plot writes PNG files, and {path} does not end with .png.")
    if not path.parent.is_dir():
        raise InputError(f"cannot save to {path}: there is no folder {path.parent}.")


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw a report: for each kind of load latency on the left, throughput on the right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    modes = [mode for mode in LOADS if any(row["mode"] == mode for row in found["results"])]
    figure = Figure(
        figsize=(11, 0.9 + 3.9 * len(modes)), facecolor=PAPER, layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12)
    )
    FigureCanvasAgg(figure)
    figure.suptitle(_title(found), x=0.01, ha="left", color=INK, fontsize=11)
    panels = figure.subplots(len(modes), 2, squeeze=False)
    for mode, (left, right) in zip(modes, panels, strict=True):
        name, label = LOADS[mode]
        rows = sorted((row for row in found["results"] if row["mode"] == mode), key=lambda row: row[name])
        loads = [row[name] for row in rows]
        _latency(left, loads, rows)
        _throughput(right, loads, rows)
        for panel in (left, right):
            _style(panel, loads, label)
    try:
        figure.savefig(path, dpi=DPI)
    except OSError as err:
        raise InputError(f"cannot save to {path}: {err.strerror}.") from err


def _title(found: dict[str, Any]) -> str:
    asked = f"{found['prompt_tokens']} tokens in, {found['tokens']} out"
    shared = f", {found['shared_tokens']} of them shared" if found["shared_tokens"] else ""
    return f"{found['model']}: {asked}{shared}"


def _latency(panel: Any, loads: list[float], rows: list[dict[str, Any]]) -> None:
    """Draw p50 as lines and p99 dashed above them."""
    from matplotlib.ticker import LogLocator, NullLocator

    for key, label, colour in LATENCIES:
        known = [(load, row[key]["p50"], row[key]["p99"]) for load, row in zip(loads, rows, strict=True) if row[key]]
        if not known:
            continue
        at, median, most = zip(*known, strict=True)
        panel.fill_between(at, median, most, color=colour, alpha=0.12, linewidth=0)
        panel.plot(at, most, "^--", color=colour, linewidth=1.2, markersize=4, label=f"{label}, p99")
        panel.plot(at, median, "o-", color=colour, linewidth=2, markersize=5, label=f"{label}, p50")
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.margins(y=0.1)
    panel.set_ylabel("milliseconds", color=INK)
    panel.set_title("Latency", loc="left", color=INK, fontsize=11, fontweight="bold")


def _throughput(panel: Any, loads: list[float], rows: list[dict[str, Any]]) -> None:
    from matplotlib.patheffects import withStroke

    halo = [withStroke(linewidth=3, foreground=PAPER)]
    for keys, label, colour, marker, aside, side in RATES:
        values = [next((row[key] for key in keys if row[key]), None) for row in rows]
        known = [(load, value) for load, value in zip(loads, values, strict=True) if value]
        if not known:
            continue
        panel.plot(*zip(*known, strict=True), f"{marker}-", color=colour, linewidth=2, markersize=5, label=label)
        for at in known:
            text = panel.annotate(f"{at[1]:,.0f}", at, aside, textcoords="offset points", ha=side, color=colour, fontsize=8)
            text.set_path_effects(halo)
    panel.margins(y=0.15)
    panel.set_ylim(bottom=0)
    panel.set_ylabel("output tokens per second", color=INK)
    panel.set_title("Throughput", loc="left", color=INK, fontsize=11, fontweight="bold")


def _style(panel: Any, loads: list[float], label: str) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    if max(loads) > 4 * min(loads):
        panel.set_xscale("log", base=2)
    panel.set_xticks(loads, [f"{load:g}" for load in loads])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    panel.set_xlabel(label, color=INK)
    panel.margins(x=0.14)
    panel.grid(True, axis="y", color=GRID, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.tick_params(colors=INK, labelsize=9, length=0)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
    panel.spines["bottom"].set_color(GRID)
    handles, _ = panel.get_legend_handles_labels()
    if handles:
        panel.legend(frameon=False, fontsize=9, labelcolor=INK, loc="best")
