"""Ctrl-C in every phase of a command: one line, exit code 130, no traceback, and nothing half-written."""

import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from auraflux import interrupt
from auraflux.cli import main
from auraflux.loading.language_model import LanguageModel
from tests.engine.tiny import tiny

ROOT = Path(__file__).parents[2]
# interrupts itself, as a terminal would, when a module is imported
AT_IMPORT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # which background jobs of a shell inherit as ignored
awaited = sys.argv.pop(1)
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == awaited:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from auraflux.__main__ import run
run()
"""


def interrupted_at_import(module: str, *words: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", AT_IMPORT, module, *map(str, words)]
    return subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("module", ["click", "torch", "safetensors"])
def test_an_interrupt_while_modules_are_imported(module: str):
    done = interrupted_at_import(module, "generate", tiny(), "-p", "a", "-n", "2", "--device", "cpu")
    said = done.stderr.removeprefix("note: kernels are compiled for this processor on first use, which takes some seconds.\n")
    assert (done.returncode, done.stdout) == (130, "")
    # outside of torch's import it waits for the end of imports, and may hit what follows
    assert re.fullmatch(
        r"Interrupted\.\n" if module != "safetensors" else r"Interrupted\.\n|prompt .*\(interrupted\).*\n", said
    )


def test_an_interrupt_that_an_extension_module_turned_into_an_error(monkeypatch: pytest.MonkeyPatch):
    def load(*_: Any, **__: Any) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as err:
            raise ImportError("initialization failed") from err

    monkeypatch.setattr("auraflux.loading.load.load_with", load)
    done = CliRunner().invoke(main, ["generate", str(tiny()), "-p", "a", "--device", "cpu"])
    assert (done.exit_code, done.stderr) == (130, "Interrupted.\n")


def test_an_import_is_not_interrupted(tmp_path: Path):
    """A module that is cut short stays behind broken, and may drop the interrupt."""
    code = """
import signal, time
from auraflux.interrupt import leave_when_interrupted, raise_when_interrupted
signal.signal(signal.SIGINT, signal.default_int_handler)
leave_when_interrupted()
raise_when_interrupted()
try:
    import hasty
    time.sleep(60)
except KeyboardInterrupt:
    print(hasty.whole)
"""
    hasty = "import os, signal, time\nwhole = False\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(0.1)\nwhole = True\n"
    (tmp_path / "hasty.py").write_text(hasty)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_other_errors_are_no_interrupts():
    err, first = ValueError(), ImportError()
    err.__context__ = first
    assert not interrupt.is_interrupt(err)
    first.__context__ = KeyboardInterrupt()
    assert interrupt.is_interrupt(err)


@pytest.mark.parametrize("as_json", [False, True])
def test_output_before_an_interrupt_is_kept(as_json: bool, monkeypatch: pytest.MonkeyPatch):
    whole = LanguageModel.generate

    def stopped(self: LanguageModel, *args: Any, **settings: Any) -> Any:
        for count, delta in enumerate(whole(self, *args, **settings)):
            if count == 3:
                raise KeyboardInterrupt
            yield delta

    monkeypatch.setattr(LanguageModel, "generate", stopped)
    words = ["generate", str(tiny()), "-p", "one two", "-n", "50", "--temperature", "0", "--device", "cpu"]
    done = CliRunner().invoke(main, [*words, *(["--json"] if as_json else [])])
    assert done.exit_code == 130
    assert done.stdout.strip()
    if as_json:
        assert '"cancelled"' in done.stdout
        assert done.stderr.endswith("Interrupted.\n")
    else:
        assert "(interrupted)" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.output


def test_a_lost_interrupt_is_repeated():
    """Python prints and drops errors of destructors; without a repetition this would run to its end."""
    code = """
import os, signal, time
from auraflux.interrupt import repeat_lost_interrupts
signal.signal(signal.SIGINT, signal.default_int_handler)
repeat_lost_interrupts()
class Slow:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
try:
    Slow()
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("interrupted\n", "")


def test_an_ignored_interrupt_stays_ignored():
    """A shell starts jobs in the background so."""
    code = "import os, signal; from auraflux.interrupt import *; leave_when_interrupted(); os.kill(os.getpid(), signal.SIGINT)"
    command = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# makes stdin the terminal of its session, so that Ctrl-C there signals all its processes
OF_TERMINAL = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGINT, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def on_terminal(after_s: float, *words: Any, cache: Path | None = None) -> tuple[int, str]:
    """Run a command on a terminal of its own and press Ctrl-C after some seconds; return its exit code and what it printed."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", OF_TERMINAL, sys.executable, "-m", "auraflux", *map(str, words)]
    environment = os.environ if cache is None else {**os.environ, "AURAFLUX_CACHE": str(cache)}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=environment, start_new_session=True
    )
    os.close(theirs)
    os.set_blocking(ours, False)
    due, pressed, printed = time.monotonic() + after_s, False, b""
    while True:
        if not pressed and time.monotonic() >= due:
            pressed = bool(os.write(ours, b"\x03"))
        try:
            printed += os.read(ours, 1 << 16)
        except BlockingIOError:
            time.sleep(0.01)
        except OSError:
            # the last process of the terminal has ended
            break
    os.close(ours)
    return process.wait(), printed.decode(errors="replace")


SECONDS = (0.5, 1, 1.5, 2, 2.5, 3, 4, 6, 9)
LONG = {
    "generate": ("{tiny}", "-p", "one two", "-n", "400", "--context", "512"),
    "serve": ("{tiny}", "--port", "0"),
    "eval": ("{tiny}", "--kv", "k4v4"),
    "bench": ("model", "--random", "--shape", "llama-8b", "--layers", "1"),
    "convert": ("{mixture}", "{folder}/made", "--group-size", "32"),
    "pack": ("{mixture}", "{folder}/made", "--quantize", "4", "--group-size", "32"),
}


@pytest.mark.slow
@pytest.mark.parametrize("after_s", SECONDS)
@pytest.mark.parametrize("command", LONG)
def test_ctrl_c_on_a_terminal(command: str, after_s: float, tmp_path: Path):
    """Imports, compilation, loading, calibration, prefill, decode and shutdown: whatever runs by then."""
    places = {"tiny": tiny(), "mixture": tiny(mixture=True), "folder": tmp_path}
    words = [word.format(**places) for word in LONG[command]]
    # every other run finds an empty cache of kernels and calibrations
    code, printed = on_terminal(after_s, command, *words, cache=tmp_path / "cache" if after_s % 1 else None)
    # else it had ended before, Python was at its own end, which SIGINT ends silently, or serve ended as it should
    assert code in (130, 0, -signal.SIGINT), printed
    assert "Traceback" not in printed
    assert "Exception ignored" not in printed
    assert printed.count("Interrupted.") == (code == 130 and "(interrupted)" not in printed)
    if command in ("convert", "pack"):
        assert (tmp_path / "made").exists() == (code != 130)
