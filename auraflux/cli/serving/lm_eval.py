"""`auraflux eval --task`: EleutherAI's lm-eval against a server of the model, one for each KV cache setting."""

import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from auraflux.cache.settings import parse_kv
from auraflux.errors import BackendError, InputError, SettingsError

NAME = "model"
LISTENING = re.compile(r"listening on (http://\S+)")
POLL_S = 0.2
CONCURRENT = 8


def run_tasks(
    model: str | None, tasks: tuple[str, ...], folder: Path | None, limit: int | None, chosen: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return a row for each KV cache setting and task: {"kv", "task", "metrics"}."""
    lm_eval = _module()
    kinds = [kv.strip() for kv in chosen["kv"].split(",")]
    for kv in kinds:
        # other engines' caches are simulated, and cannot be served
        parse_kv(kv)
    manager = lm_eval.tasks.TaskManager(include_path=None if folder is None else str(folder))
    unknown = sorted(set(tasks) - set(manager.all_tasks))
    if unknown:
        raise InputError(
            f"lm-eval has no task {', '.join(unknown)[:200]}. 'lm-eval ls tasks' lists them; --task-folder adds some."
        )
    rows = []
    for kv in kinds:
        with _served(model, kv, chosen) as url:
            arguments = {"base_url": f"{url}/v1/completions", "model": NAME, "num_concurrent": CONCURRENT}
            found = lm_eval.simple_evaluate(
                "local-completions", model_args=arguments, tasks=list(tasks), task_manager=manager, limit=limit
            )
        rows += [{"kv": kv, "task": task, "metrics": _metrics(found["results"][task])} for task in tasks]
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the rows as a table."""
    from rich.table import Table

    from auraflux.cli.output.screen import stdout

    table = Table("kv", "task", "metric")
    table.add_column("value", justify="right")
    for row in rows:
        for name, value in row["metrics"].items():
            table.add_row(row["kv"], row["task"], name, f"{value:.4f}")
    stdout().print(table)


def _module() -> Any:
    try:
        import lm_eval
        import lm_eval.tasks
    except ImportError as err:
        raise SettingsError(f"--task needs lm-eval: pip install 'lm-eval[api]' ({err}).") from err
    return lm_eval


def _metrics(found: dict[str, Any]) -> dict[str, float]:
    numbers = {name.partition(",")[0]: value for name, value in found.items() if isinstance(value, float) and "," in name}
    return {name: value for name, value in numbers.items() if not name.endswith("_stderr")}


@contextmanager
def _served(model: str | None, kv: str, chosen: dict[str, Any]) -> Iterator[str]:
    """Serve the model in another process; yield its address once it is ready."""
    options = ["--port", "0", "--name", NAME, "--kv", kv, "--device", chosen["device"], "--calibrate", chosen["calibrate"]]
    options += ["--quantize", str(chosen["quantize"])] if chosen["quantize"] else []
    options += ["--exact"] if chosen["exact"] else []
    command = [sys.executable, "-m", "auraflux", "serve", *([] if model is None else [model]), *options]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        lines: list[str] = []
        assert process.stderr is not None
        reader = threading.Thread(target=lambda: lines.extend(process.stderr or ()), daemon=True)
        reader.start()
        try:
            while (url := _ready(lines)) is None:
                if process.poll() is not None:
                    reader.join()
                    raise BackendError(f"the server for kv={kv} ended: {''.join(lines[-1:]).strip() or 'it said nothing'}")
                time.sleep(POLL_S)
            click.echo(f"kv={kv}: served at {url}", err=True)
            yield url
        finally:
            process.terminate()


def _ready(lines: list[str]) -> str | None:
    """Return the server's address once it is ready."""
    found = LISTENING.search("".join(lines))
    if found is None:
        return None
    try:
        with urllib.request.urlopen(f"{found[1]}/ready", timeout=5) as answer:
            json.loads(answer.read())
            return found[1]
    except (OSError, ValueError):
        return None
