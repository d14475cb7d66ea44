"""A pytest plugin that records which families, formats and backends were compared with other libraries, and the generated page.

    pytest -p tests.tested --tested FOUND.json ...   record every passing test
    python -m tests.tested FOUND.json                replace the CPU results in docs/tested.json
    python -m tests.tested --merge FOUND.json        add results, such as those of a GPU

A test counts for all models that it or its fixtures loaded, if it also called an oracle: a function decorated with
`external_oracle`. `make table` runs the tests and writes docs/tested.md.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import pytest

Found = dict[str, dict[str, dict[str, list[str]]]]  # family -> format -> backend -> oracles
Function = TypeVar("Function", bound=Callable[..., Any])
ROOT = Path(__file__).parent.parent
RESULTS, PAGE = ROOT / "docs" / "tested.json", ROOT / "docs" / "tested.md"
CPU_BACKENDS = {"cpu", "reference"}  # backends that `make table` runs on any machine
# table columns, which are prefixes of format names
COLUMNS = ("dense", "quantized", "MLX", "packed", "AWQ", "GPTQ", "compressed-tensors", "FP8", "ModelOpt", "MXFP4", "GGUF")

_loads: set[tuple[str, str, str]] = set()
_oracles: set[str] = set()
# loads and oracles of each fixture, by name
_fixtures: dict[str, tuple[set[tuple[str, str, str]], set[str]]] = {}


def external_oracle(oracle: str) -> Callable[[Function], Function]:
    """Mark a function that returns results of another library."""

    def decorator(function: Function) -> Function:
        @wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            _oracles.add(oracle)
            return function(*args, **kwargs)

        return recorded  # type: ignore[return-value]

    return decorator


def formats(weights: Any) -> set[str]:
    """Return short names of the weight formats of a checkpoint."""
    checkpoint, config = weights.checkpoint, weights.checkpoint.config
    if checkpoint.form == "gguf":
        from auraflux.weights.formats.gguf import DENSE

        kinds = set(checkpoint.formats.values())
        return {f"GGUF {kind}" for kind in kinds - DENSE or {"dense"}}
    if checkpoint.experts is not None:
        return {"packed"}
    if checkpoint.quantization:
        mode = checkpoint.quantization.get("mode", "affine")
        return {f"MLX {checkpoint.quantization['bits']} bits" if mode == "affine" else f"MLX {mode}"}
    if checkpoint.method is not None:
        stored_format = (checkpoint.stored_format(name) for name in checkpoint.sizes())
        return {_brief(checkpoint.method.title, each.label) for each in stored_format if each is not None}
    if config.get("quantization_config", {}).get("quant_method") == "mxfp4":
        return {"MXFP4"}
    return {"dense" if weights.bits is None else f"quantized to {weights.bits} bits"}


def _brief(title: str, label: str) -> str:
    """Return a method's name and format without the group size."""
    found = label.split(",")[0].removeprefix(title).strip()
    return f"{title} {found}".strip()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tested", type=Path, metavar="FILE", help="write the comparisons of passing tests with oracles")


def pytest_configure(config: pytest.Config) -> None:
    from auraflux.models.config import text_type
    from auraflux.ops import _dispatch
    from auraflux.weights.loader import Weights

    checked = Weights.check_loaded

    def check_loaded(weights: Weights) -> None:
        checked(weights)
        if type(weights) is not Weights:
            # `convert` and `pack` load tensors without running a model
            return
        backend = _dispatch._forced.get() or weights.device.type
        if backend == "cuda" and weights.device.type == "cpu":
            backend = "interpreted"
        family = text_type(weights.checkpoint.config)
        _loads.update((family, each, backend) for each in formats(weights))

    Weights.check_loaded = check_loaded  # type: ignore[method-assign]
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
        # xdist workers send it with the test report
        item.user_properties.append(("tested", [[*load, oracle] for load in sorted(loads) for oracle in sorted(oracles)]))
    return found


class _Collector:
    """Collects the records of passing tests from all workers and writes them."""

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
    """Add rows of family, format, backend and oracle without duplicates."""
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


def merge_results(stored: Found, found: Found, merge: bool) -> Found:
    """Combine stored and new results; unless `merge`, new results replace the stored CPU results."""
    merged = nested()
    add(merged, (row for row in rows_of(stored) if merge or row[2] not in CPU_BACKENDS))
    add(merged, rows_of(found))
    return json.loads(as_json(merged))


def column(form: str) -> str:
    return next(name for name in COLUMNS if form == name or form.startswith(f"{name} "))


def cell(backends: set[str]) -> str:
    """Format the backends of a cell; name the reference only where no kernel ran."""
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
    return table(["format", "backends", "compared with", "`model_type`"], rows)


def page(found: Found) -> str:
    return f"""\
# What was tested

Every entry stands for a passing test that loaded a model of the family, in the format, on the backend, and compared its
results with another library. `make table` generates this page; `cuda` entries come from a machine with a GPU, see
[CONTRIBUTING](../CONTRIBUTING.md). Blank combinations are untested and may still work: weight formats are independent of model
families, and most format tests use one small family. `reference` means that only the reference ops ran, no kernel.
Weights are random, except those of three small dense models: [models.md](models.md#verification) names them.

{by_family(found)}

## Formats

{by_format(found)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.tested", description="Write test results into the docs.")
    parser.add_argument("found", type=Path, help="file written by `pytest -p tests.tested --tested`")
    parser.add_argument("--merge", action="store_true", help="add to the stored results without replacing any")
    options = parser.parse_args()
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    found = merge_results(stored, json.loads(options.found.read_text()), options.merge)
    RESULTS.write_text(as_json(found))
    PAGE.write_text(page(found))


if __name__ == "__main__":
    main()
