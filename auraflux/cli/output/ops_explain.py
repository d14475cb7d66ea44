"""`auraflux ops --explain`: the kernel of a case, or of each op of a model's steps, and why others declined."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from difflib import get_close_matches
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

import click

from auraflux.errors import BackendError, InputError

if TYPE_CHECKING:
    from auraflux.bench.model_kernels import Use
    from auraflux.ops.routes import Explanation

Entry = TypeVar("Entry")
MODEL = "model"  # instead of an op name
ONLY_KERNEL = "its only kernel"


def explain(name: str, wanted: str, device: str, as_json: bool, options: dict[str, Any]) -> None:
    """Print the kernel that the route tables choose.

    name     of an op, or "model"
    wanted   its case, or all; or the shape of a model
    options  of a model: kv, batch, at, quantize, exact, invariant; None if not given
    """
    if device == "cuda" and find_spec("triton") is None:
        raise BackendError("CUDA kernels are written in Triton, which is not installed: pip install triton.")
    if name == MODEL:
        _explain_model(wanted, device, as_json, {option: value for option, value in options.items() if value is not None})
    else:
        refuse(options)
        _explain_cases(name, wanted, device, as_json)


def refuse(options: dict[str, Any]) -> None:
    """Refuse options that only apply to a model."""
    if given := [f"--{option}" for option, value in options.items() if value is not None]:
        raise InputError(f"{', '.join(given)} only work with --explain {MODEL} SHAPE.")


def _explain_cases(name: str, wanted: str, device: str, as_json: bool) -> None:
    from auraflux.ops.explain import cases_of, explain_case, routed_ops

    op = _named(name, {op.name: op for op in routed_ops(device)}, f"op with a choice of {device} kernels")
    cases = {case.name: case for case in cases_of(op)}
    chosen = [case for case in cases.values() if not case.slow] if wanted == "all" else [_named(wanted, cases, "case of it")]
    verdicts = {case.name: verdict for case in chosen if (verdict := explain_case(case, device)) is not None}
    if as_json:
        click.echo(json.dumps({case: asdict(verdict) for case, verdict in verdicts.items()}, indent=2))
        return
    for case, verdict in verdicts.items():
        if wanted == "all":
            click.echo(f"{op.name} {case}: {verdict.path}")
        else:
            click.echo("\n  ".join([f"{op.name} {case}", *_lines(verdict)]))


def _named(name: str, known: dict[str, Entry], what: str) -> Entry:
    """Return the entry of a name; an unknown name raises with similar names."""
    if name in known:
        return known[name]
    similar = get_close_matches(name, known, n=5, cutoff=0.3) or list(known)[:5]
    raise InputError(f"there is no {what} named {name!r}. Similar names: {', '.join(similar)}.")


def _lines(verdict: "Explanation", indent: str = "") -> Iterator[str]:
    """Yield one line per route: those that declined, and the chosen one."""
    for route, reason in verdict.refused:
        yield f"{indent}- {route}: {reason}"
    yield f"{indent}> {verdict.taken or 'the reference'}"
    for inner in verdict.then:
        yield from _lines(inner, indent + "    ")


def _explain_model(shape: str, device: str, as_json: bool, given: dict[str, Any]) -> None:
    from auraflux.bench.model_kernels import explain_model
    from auraflux.bench.shapes import shape_of
    from auraflux.cache import CacheSettings
    from auraflux.defaults import AUTO
    from auraflux.models import family_name

    config, settings = shape_of(shape), CacheSettings(given.get("kv", AUTO))
    settings = settings.for_family(family_name(config))
    names = {"batch": "batch", "at": "at", "quantize": "bits", "exact": "exactly", "invariant": "batch_invariant"}
    found = explain_model(config, settings, device, **{names[key]: value for key, value in given.items() if key in names})
    if as_json:
        steps = {step: [asdict(use) for use in uses] for step, uses in found.items()}
        click.echo(json.dumps({"shape": shape, "device": device, "kv": settings.kv, "steps": steps}, indent=2))
        return
    for step, uses in found.items():
        _show_step(f"{shape} on {'an H200' if device == 'cuda' else 'a CPU'}: {step}", uses)


def _show_step(title: str, uses: "list[Use]") -> None:
    from rich.markup import escape
    from rich.table import Table

    from auraflux.cli.output.screen import stdout

    table = Table("calls", "op", "kernel, after those that declined", title=title, title_justify="left", show_lines=True)
    for use in uses:
        kernel = ONLY_KERNEL if use.verdict is None else "\n".join(_lines(use.verdict))
        table.add_row(str(use.calls), f"[bold]{use.op}[/bold]\n{escape(use.shapes)}", escape(kernel))
    stdout().print(table)
