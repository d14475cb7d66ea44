"""The scripts in examples/ run: on a tiny model, and in slow tests on the built-in one."""

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from auraflux.errors import FetchError
from auraflux.weights.download.pull import locate
from tests.engine.tiny import tiny

EXAMPLES = Path(__file__).parents[1] / "examples"
# part of each script's output
PRINTED = {
    "generate.py": r"\d+ prompt tokens, \d+ generated, [\d.]+ tokens/s\n",
    "chat_stream.py": r"\([1-9]\d* prompt tokens computed, [1-9]\d* reused\)\n\n$",
    "batch.py": r"same output: True\n",
    "kv_cache_bits.py": r"(?m)^k2v2 .* MB .*x .*% ",
    "openai_client.py": r"^\S+ at http://127\.0\.0\.1:\d+\n.+\n",
    "structured_output.py": r"^\{'city': '(Paris|Rome|Berlin)', 'capital': (True|False)\}\n$",
}
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))


def skip_without_client(script: str) -> None:
    if script in ("openai_client.py", "structured_output.py"):
        pytest.importorskip("openai", reason="openai is not installed")


@pytest.mark.parametrize("script", PRINTED)
def test_an_example_runs_on_a_tiny_model(script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """It runs in this process, which has its imports."""
    skip_without_client(script)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [script, str(tiny())])
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    assert re.search(PRINTED[script], capsys.readouterr().out, re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("script", PRINTED)
def test_an_example_runs_on_the_built_in_model(script: str):
    try:
        locate()
    except FetchError as err:
        pytest.skip(f"the built-in model cannot be downloaded: {err}")
    skip_without_client(script)
    done = subprocess.run([sys.executable, str(EXAMPLES / script)], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert re.search(PRINTED[script], done.stdout, re.DOTALL)


def test_every_example_is_listed_short_and_documented():
    runnable = [name for name in SCRIPTS if "__main__" in (EXAMPLES / name).read_text()]
    assert sorted(PRINTED) == runnable
    listed = (EXAMPLES / "README.md").read_text()
    for name in SCRIPTS:
        source = (EXAMPLES / name).read_text()
        assert len(source.splitlines()) < 60
        assert ast.get_docstring(ast.parse(source))
        assert name not in runnable or f"[{name}]({name})" in listed
