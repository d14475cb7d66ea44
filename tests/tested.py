"""Which families were held to somebody else's truth, in which formats, on which backends; and the pages that say so.

    pytest -p tests.tested --tested FOUND.json ...   notes it for every test that passes
    python -m tests.tested FOUND.json                puts it in the place of what docs/tested.json says of the CPU
    python -m tests.tested --merge FOUND.json        adds it, such as what was found on a GPU

A test counts for all models that it, or a fixture of its, has loaded, if it has also heard an oracle: a function marked
with `outside`. `make table` runs what is needed and writes docs/tested.md and the table in the README.
"""

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import pytest

Found = dict[str, dict[str, dict[str, list[str]]]]  # family -> format -> backend -> oracles
Function = TypeVar("Function", bound=Callable[..., Any])
ROOT = Path(__file__).parent.parent
KEPT, PAGE, README = ROOT / "docs" / "tested.json", ROOT / "docs" / "tested.md", ROOT / "README.md"
BEGIN, END = "<!-- tested -->", "<!-- /tested -->"
HERE = {"cpu", "reference"}  # backends that `make table` runs on any machine
# the columns, and what formats of each begin with
COLUMNS = ("dense", "rounded", "MLX", "packed", "AWQ", "GPTQ", "compressed-tensors", "FP8", "ModelOpt", "MXFP4", "GGUF")

_loads: set[tuple[str, str, str]] = set()
_oracles: set[str] = set()
# what the fixtures that are set up have loaded and heard, by their names
_fixtures: dict[str, tuple[set[tuple[str, str, str]], set[str]]] = {}


def outside(oracle: str) -> Callable[[Function], Function]:
    """Mark a function that gives the numbers of somebody else's library."""

    def mark(function: Function) -> Function:
        @wraps(function)
        def told(*args: Any, **kwargs: Any) -> Any:
            _oracles.add(oracle)
            return function(*args, **kwargs)

        return told  # type: ignore[return-value]

    return mark


def formats(weights: Any) -> set[str]:
    """How a checkpoint's weights are stored, each format in a few words."""
    checkpoint, config = weights.checkpoint, weights.checkpoint.config
    if checkpoint.form == "gguf":
        from auraflux.weights.gguf import DENSE

        kinds = set(checkpoint.formats.values())
        return {f"GGUF {kind}" for kind in kinds - DENSE or {"dense"}}
    if checkpoint.experts is not None:
        return {"packed"}
    if checkpoint.quantization:
        mode = checkpoint.quantization.get("mode", "affine")
        return {f"MLX {checkpoint.quantization['bits']} bits" if mode == "affine" else f"MLX {mode}"}
    if checkpoint.method is not None:
        held = (checkpoint.held(name) for name in checkpoint.sizes())
        return {_brief(checkpoint.method.title, each.label) for each in held if each is not None}
    if config.get("quantization_config", {}).get("quant_method") == "mxfp4":
        return {"MXFP4"}
    return {"dense" if weights.bits is None else f"rounded to {weights.bits} bits"}


def _brief(title: str, label: str) -> str:
    """A method's name and what it has made of a weight, without the sizes of groups."""
    found = label.split(",")[0].removeprefix(title).strip()
    return f"{title} {found}".strip()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tested", type=Path, metavar="FILE", help="write what passing tests held to oracles")


def pytest_configure(config: pytest.Config) -> None:
    from auraflux.models.config import text_type
    from auraflux.ops import _dispatch
    from auraflux.weights.loader import Weights

    checked = Weights.done

    def done(weights: Weights) -> None:
        checked(weights)
        if type(weights) is not Weights:
            # what converts or packs takes tensors like a model, and runs none
            return
        backend = _dispatch._forced.get() or weights.device.type
        if backend == "cuda" and weights.device.type == "cpu":
            backend = "interpreted"
        family = text_type(weights.checkpoint.config)
        _loads.update((family, each, backend) for each in formats(weights))

    Weights.done = done  # type: ignore[method-assign]
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Collector(config.getoption("tested")))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any) -> Iterator[None]:
    before = _loads.copy(), _oracles.copy()
    _loads.clear()
    _oracles.clear()
    try:
        return (yield)
    finally:
        _fixtures[fixturedef.argname] = _loads.copy(), _oracles.copy()
        _loads.update(before[0])
        _oracles.update(before[1])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    _loads.clear()
    _oracles.clear()
    found = yield
    used = [_fixtures[name] for name in getattr(item, "fixturenames", ()) if name in _fixtures]
    loads, oracles = _loads.union(*(each[0] for each in used)), _oracles.union(*(each[1] for each in used))
    if loads and oracles:
        # what a worker of xdist tells of a test goes with its report
        item.user_properties.append(("tested", [[*load, oracle] for load in sorted(loads) for oracle in sorted(oracles)]))
    return found


class _Collector:
    """Gathers what the reports of passing tests say, from all workers, and writes it."""

    def __init__(self, path: Path | None):
        self.path, self.found = path, nested()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            for name, rows in report.user_properties:
                if name == "tested":
                    add(self.found, rows)

    def pytest_sessionfinish(self) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(as_json(self.found))


def nested() -> Any:
    return defaultdict(lambda: defaultdict(lambda: defaultdict(list)))


def add(found: Any, rows: Any) -> None:
    """Note triples and their oracles, each once."""
    for family, form, backend, oracle in rows:
        oracles = found[family][form][backend]
        oracles[:] = sorted({*oracles, oracle})


def rows_of(found: Found) -> Iterator[tuple[str, str, str, str]]:
    for family, forms in found.items():
        for form, backends in forms.items():
            for backend, oracles in backends.items():
                yield from ((family, form, backend, oracle) for oracle in oracles)


def as_json(found: Found) -> str:
    return json.dumps(found, indent=1, sort_keys=True) + "\n"


def joined(kept: Found, found: Found, merge: bool) -> Found:
    """What is known once something was found; unless merged, it takes the place of all that was known of a CPU."""
    whole = nested()
    add(whole, (row for row in rows_of(kept) if merge or row[2] not in HERE))
    add(whole, rows_of(found))
    return json.loads(as_json(whole))


def column(form: str) -> str:
    return next(name for name in COLUMNS if form == name or form.startswith(f"{name} "))


def cell(backends: set[str]) -> str:
    """The backends of a cell; the reference is named where no kernel has run."""
    shown = [name for name in ("cpu", "cuda", "interpreted") if name in backends]
    return ", ".join(shown or (["reference"] if backends else []))


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |".replace("  ", " ") for row in [head, ["---"] * len(head), *rows])


def by_family(found: Found) -> str:
    rows = []
    for family, forms in sorted(found.items()):
        cells = (cell({name for form in forms if column(form) == each for name in forms[form]}) for each in COLUMNS)
        rows.append([f"`{family}`", *cells])
    return table(["`model_type`", *COLUMNS], rows)


def by_format(found: Found) -> str:
    order = sorted({form for forms in found.values() for form in forms}, key=lambda form: (COLUMNS.index(column(form)), form))
    rows = []
    for form in order:
        families = {family: forms[form] for family, forms in sorted(found.items()) if form in forms}
        oracles = sorted({oracle for backends in families.values() for each in backends.values() for oracle in each})
        backends = cell({name for each in families.values() for name in each})
        rows.append([form, backends, ", ".join(oracles), ", ".join(f"`{family}`" for family in families)])
    return table(["format", "backends", "held to", "`model_type`"], rows)


def page(found: Found) -> str:
    return f"""\
# What was tested

Every mark stands for a test that passed: it loaded a model of the family, in the format, on the backend, and held its
numbers to another library's. `make table` writes this page; marks of `cuda` come from a machine with a GPU, see
[CONTRIBUTING](../CONTRIBUTING.md). Blank is what no such test has run, which may work all the same: formats are read before
families, and most tests of formats take a small one that has what they need. `reference` is where only the definitions of
ops have run, no kernel.

{by_family(found)}

## Formats

{by_format(found)}
"""


def short(found: Found) -> str:
    """The README's table: for each format, the families it was tested with; formats of the same families share a row."""
    rows: dict[tuple[str, str], list[str]] = defaultdict(list)
    for each in COLUMNS:
        tested = [(family, set(found[family][form])) for family in found for form in found[family] if column(form) == each]
        here, there = ({family for family, ran in tested if ran & backends} for backends in (HERE, {"cuda"}))
        rows[named(here, set(found)), named(there, set(found))].append(each)
    return table(["weights", "CPU", "GPU"], [[", ".join(names), *cells] for cells, names in rows.items()])


def named(families: set[str], every: set[str]) -> str:
    """Some families by name, or which are missing where these are fewer."""
    missing = every - families
    if not families or len(families) <= len(missing):
        return ", ".join(sorted(families))
    return "all but " + ", ".join(sorted(missing)) if missing else f"all {len(every)}"


def with_table(readme: str, found: Found) -> str:
    return re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{short(found)}\n{END}", readme, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.tested", description="Write what tests have found into the docs.")
    parser.add_argument("found", type=Path, help="what `pytest -p tests.tested --tested` wrote")
    parser.add_argument("--merge", action="store_true", help="add to what is known, and replace nothing")
    options = parser.parse_args()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    found = joined(kept, json.loads(options.found.read_text()), options.merge)
    KEPT.write_text(as_json(found))
    PAGE.write_text(page(found))
    README.write_text(with_table(README.read_text(), found))


if __name__ == "__main__":
    main()
