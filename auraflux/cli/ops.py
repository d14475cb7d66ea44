"""`auraflux ops`: the operations, their kernels and where they come from."""

import json
from dataclasses import asdict
from difflib import get_close_matches
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

import click

from auraflux.cli.failure import Failure
from auraflux.errors import BackendError, InputError

if TYPE_CHECKING:
    from auraflux.ops._dispatch import Op
    from auraflux.ops.routes import Verdict

Named = TypeVar("Named")


@click.command()
@click.option(
    "--check", is_flag=True, help="Run every case on every kernel here, and show what declined and how far off it was."
)
@click.option(
    "--explain",
    nargs=2,
    metavar="OP CASE",
    help="Say which CUDA kernel a case takes on an H200, and why those before it refused; CASE may be 'all'.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ops(check: bool, explain: tuple[str, str] | None, as_json: bool) -> None:
    """List the operations, their kernels and the kernels they stand for.

    A kernel may decline a call; the reference then runs in its place. Reasons that show only when an op is called are found
    with --check. Where an op has several kernels, --explain says which one a case takes; no GPU is needed for that.
    """
    from auraflux.ops._dispatch import all_ops

    if explain is not None:
        _explain(*explain, as_json)
        return
    found = all_ops()
    checked = _check(found) if check else {}
    rows = [_row(op, checked.get(op.name)) for op in found]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        _show(rows)
    if wrong := [row["op"] for row in rows for one in row.get("checked", {}).values() if one["wrong"]]:
        raise Failure(f"kernels that differ from their reference: {', '.join(wrong)}.")


def _explain(name: str, wanted: str, as_json: bool) -> None:
    from auraflux.ops.explain import cases_of, chosen_ops, explained

    if find_spec("triton") is None:
        raise BackendError("CUDA kernels are written in Triton, which is not installed: pip install 'auraflux[cuda]'.")

    op = _named(name, {op.name: op for op in chosen_ops()}, "op with a choice of kernels")
    cases = {case.name: case for case in cases_of(op)}
    chosen = [case for case in cases.values() if not case.slow] if wanted == "all" else [_named(wanted, cases, "case of it")]
    verdicts = {case.name: verdict for case in chosen if (verdict := explained(case)) is not None}
    if as_json:
        click.echo(json.dumps({case: asdict(verdict) for case, verdict in verdicts.items()}, indent=2))
        return
    for case, verdict in verdicts.items():
        _show_verdict(f"{op.name} {case}", verdict, alone=wanted != "all")


def _named(name: str, known: dict[str, Named], what: str) -> Named:
    """The one of that name, or an error that names those that are alike."""
    if name in known:
        return known[name]
    alike = get_close_matches(name, known, n=5, cutoff=0.3) or list(known)[:5]
    raise InputError(f"there is no {what} named {name!r}; there are, for example, {', '.join(alike)}.")


def _show_verdict(title: str, verdict: "Verdict", alone: bool) -> None:
    if not alone:
        click.echo(f"{title}: {verdict.path}")
        return
    click.echo(title)
    _show_steps(verdict, "  ")


def _show_steps(verdict: "Verdict", indent: str) -> None:
    for route, reason in verdict.refused:
        click.echo(f"{indent}- {route}: {reason}")
    click.echo(f"{indent}> {verdict.taken or 'the reference'}")
    for inner in verdict.then:
        _show_steps(inner, indent + "    ")


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
    """For each op and backend: how many cases ran, the worst error, which declined and why, which were wrong."""
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

    from auraflux.cli.screen import stdout

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
