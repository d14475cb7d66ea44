"""`auraflux ops`: the operations, their kernels and equivalent kernels of other projects."""

import json
from typing import TYPE_CHECKING, Any

import click

from auraflux.cli.options.command import Command
from auraflux.cli.options.early_checks import Bits
from auraflux.cli.output.failure import Failure

if TYPE_CHECKING:
    from auraflux.ops._dispatch import Op


EXAMPLES = (
    "auraflux ops",
    "auraflux ops --explain linear all",
)


@click.command(cls=Command, examples=EXAMPLES)
@click.option("--check", is_flag=True, help="Run every case on every kernel of this machine; show errors and declined cases.")
@click.option(
    "--explain",
    nargs=2,
    metavar="OP CASE",
    help="Show which kernel a case runs on, and why the kernels before it declined; CASE may be 'all'. "
    "'model SHAPE' shows every op of a model's steps; shapes are those of 'auraflux bench model'.",
)
@click.option(
    "--device",
    type=click.Choice(["cuda", "cpu"]),
    help="With --explain: kernels for an H200, or for this CPU; by default for a GPU if this machine has one.",
)
@click.option("--kv", metavar="KXVY", help="With --explain model: KV cache quantization.")
@click.option("--batch", type=click.IntRange(1, 1 << 20), metavar="N", help="With --explain model: batch size.")
@click.option(
    "--at", type=click.IntRange(1, 1 << 24), metavar="N", help="With --explain model: context length; by default 1024."
)
@click.option("--quantize", type=Bits(), metavar="BITS", help="With --explain model: bits per weight; by default 4.")
@click.option("--exact", is_flag=True, default=None, help="With --explain model: float32 activations.")
@click.option("--invariant", is_flag=True, default=None, help="With --explain model: batch-invariant kernels.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ops(check: bool, explain: tuple[str, str] | None, device: str | None, as_json: bool, **options: Any) -> None:
    """List the operations and their kernels.

    A kernel may decline a call; the reference then runs instead. --check also finds reasons that appear only when an op is
    called. --explain shows which of several kernels a case or a model runs on, without a GPU or weights. 'Stands for' names the
    equivalent kernels of moeflux, metaltile and mlx-native.
    """
    from auraflux.cli.output import ops_explain
    from auraflux.ops._dispatch import all_ops

    if explain is not None:
        import torch

        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        ops_explain.explain(*explain, device, as_json, options)
        return
    ops_explain.refuse(options)
    found = all_ops()
    checked = _check(found) if check else {}
    rows = [_row(op, checked.get(op.name)) for op in found]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        _show(rows)
    if wrong := [row["op"] for row in rows for one in row.get("checked", {}).values() if one["wrong"]]:
        raise Failure(f"kernels that differ from their reference: {', '.join(wrong)}.")


def _row(op: "Op", checked: dict[str, Any] | None) -> dict[str, Any]:
    backends = op.backends()
    row: dict[str, Any] = {
        "op": op.name,
        "family": op.family,
        "origins": list(op.origins),
        "backends": backends,
        "declined": {backend: sorted(reasons) for backend, reasons in op.declined.items()},
    }
    if checked is not None:
        row["checked"] = checked
        for backend, one in checked.items():
            reasons = {*row["declined"].get(backend, []), *one["declined"]}
            if reasons:
                row["declined"][backend] = sorted(reasons)
    return row


def _check(found: "list[Op]") -> dict[str, dict[str, Any]]:
    """Run every case; return the number of cases, worst error, declined and wrong cases by op and backend."""
    import torch
    from rich.console import Console
    from rich.progress import track

    from auraflux.bench.parity import judge
    from auraflux.ops._cases import all_cases

    usable = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    checked: dict[str, dict[str, Any]] = {op.name: {} for op in found}
    stderr = Console(stderr=True)
    for case in track(all_cases(), "checking", console=stderr, transient=True, disable=not stderr.is_terminal):
        for backend in (name for name in usable if case.op.kernel(name) is not None):
            blank: dict[str, Any] = {"cases": 0, "worst_error": 0.0, "worst_case": None, "declined": {}, "wrong": {}}
            one = checked[case.op.name].setdefault(backend, blank)
            one["cases"] += 1
            verdict = judge(case, backend)
            if verdict.declined is not None:
                one["declined"].setdefault(verdict.declined, []).append(case.name)
            elif verdict.wrong is not None:
                one["wrong"][case.name] = verdict.wrong
            elif verdict.error >= one["worst_error"]:
                one["worst_error"], one["worst_case"] = verdict.error, case.name
    return checked


def _show(rows: list[dict[str, Any]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from auraflux.cli.output.screen import stdout

    with_checks = any("checked" in row for row in rows)
    table = Table("family", "op", "backends", "stands for", "declined", *(["checked"] if with_checks else []))
    family = None
    for row in rows:
        if family is not None and row["family"] != family:
            table.add_section()
        shown_family, family = (row["family"] if row["family"] != family else ""), row["family"]
        declined = "\n".join(f"{backend}: {reason}" for backend, reasons in row["declined"].items() for reason in reasons)
        cells = [shown_family, row["op"], " ".join(row["backends"]), "\n".join(row["origins"]), escape(declined)]
        if with_checks:
            cells.append("\n".join(_outcome(backend, one) for backend, one in row["checked"].items()) or "not run")
        table.add_row(*cells)
    stdout().print(table)


def _outcome(backend: str, one: dict[str, Any]) -> str:
    from rich.markup import escape

    ran = one["cases"] - sum(len(cases) for cases in one["declined"].values())
    lines = [f"{backend}: {ran} of {one['cases']} cases, worst error {one['worst_error']:.1e}"]
    lines += [f"[red]WRONG[/red] {case}: {escape(reason)}" for case, reason in one["wrong"].items()]
    return "\n".join(lines)
