"""Start, failure and interruption of the command line."""

import gc
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import auraflux
from auraflux.cli import main
from auraflux.cli.options.environment import OURS
from auraflux.cli.options.importing import importing
from auraflux.cli.output.manual import pages
from auraflux.cli.output.ops_page import ops_page
from auraflux.errors import BackendError
from auraflux.ops import all_ops


def auraflux_process(*words: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "auraflux", *words], capture_output=True, text=True, check=False, **options)


@pytest.fixture
def extra(monkeypatch):
    """Add a command to the program for one test."""

    def add(function):
        monkeypatch.setitem(main.commands, "extra", click.command("extra")(function))

    return add


def test_version_is_the_packages():
    assert auraflux_process("--version").stdout == f"auraflux {auraflux.__version__}\n"


@pytest.mark.parametrize(
    "words", [["--version"], ["--help"], ["ops", "--help"], ["bench", "ops", "--help"], ["doctor", "--help"]]
)
def test_help_does_not_wait_for_heavy_imports(words):
    code = (
        "import sys\n"
        "from auraflux.cli import main\n"
        f"main({words!r}, standalone_mode=False)\n"
        "print(sorted({'torch', 'numba', 'numpy', 'rich'} & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"


def test_errors_are_one_sentence(extra):
    def fail():
        raise BackendError("there is no backend 'tpu'.")

    extra(fail)
    done = CliRunner().invoke(main, ["extra"])
    assert (done.exit_code, done.stdout, done.stderr) == (1, "", "error: there is no backend 'tpu'.\n")


def test_a_folder_that_is_not_there_is_one_sentence():
    done = CliRunner().invoke(main, ["bench", "ops", "--save", "no/such/folder/x.json"])
    assert done.exit_code == 1
    assert done.stdout == ""
    assert done.stderr == "error: cannot save to no/such/folder/x.json: there is no folder no/such/folder.\n"


def test_bad_environment_is_one_sentence_in_a_process():
    done = auraflux_process("ops", env={**os.environ, "AURAFLUX_BACKEND": "tpu"})
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "error: AURAFLUX_BACKEND is 'tpu'. Choose one of: reference, cpu, cuda.\n"


@pytest.mark.parametrize("count", ["0", "-1", "many", ""])
def test_an_invalid_number_of_threads_is_one_sentence(monkeypatch, count):
    monkeypatch.setenv("NUMBA_NUM_THREADS", count)
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 1
    assert done.stderr == f"error: NUMBA_NUM_THREADS is {count!r}. It must be an integer above 0.\n"


def test_ascii_output_escapes_other_characters():
    plain = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = "main.add_command(click.Command('say', callback=lambda: print(chr(0x2713))))"
    code = f"import click; from auraflux.cli import main; {command}; main(['say'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=plain)
    assert (done.returncode, done.stdout, done.stderr) == (0, "\\u2713\n", "")


@pytest.mark.parametrize("words", [[], ["bench"]])
def test_a_missing_command_prints_usage(words):
    assert "..." not in CliRunner().invoke(main, [*words, "--help"], terminal_width=80).output.split("Commands:")[1]


def test_a_wrong_option_says_so_with_exit_code_2():
    done = CliRunner().invoke(main, ["ops", "--nope"])
    assert done.exit_code == 2
    assert "No such option" in done.stderr


def test_an_interruption_is_one_line(extra):
    def wait():
        raise KeyboardInterrupt

    extra(wait)
    done = CliRunner().invoke(main, ["extra"])
    assert (done.exit_code, done.stdout, done.stderr) == (130, "", "Interrupted.\n")


def test_interrupting_a_process():
    code = (
        "import click, signal, time\n"
        "from auraflux.cli import main\n"
        # background jobs of a shell inherit ignored interrupts
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "wait = lambda: (click.echo('ready'), time.sleep(60))\n"
        "main.add_command(click.Command('wait', callback=wait))\n"
        "main(['wait'])\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "Interrupted.\n")


def test_a_broken_pipe_is_quiet():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "auraflux", "--help"], stdout=pipe, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.stderr == ""
    assert done.returncode != 0


@pytest.mark.parametrize("page", ["cli.md", "ops.md"])
def test_generated_pages_are_up_to_date(page, pytestconfig):
    written = (pytestconfig.rootpath / "docs" / page).read_text()
    assert written == pages(main)[page], f"docs/{page} is stale: run `make docs`"


def test_the_manual_lists_our_environment_variables():
    sources = [path.read_text() for path in Path(auraflux.__file__).parent.rglob("*.py") if path.stem != "environment"]
    assert set(re.findall(r"\bAURAFLUX_[A-Z]\w*", "\n".join(sources))) == set(OURS)


def test_the_table_of_ops_lists_the_kernels():
    pytest.importorskip("triton")
    page = ops_page().splitlines()
    for op in all_ops():
        row = next(line for line in page if line.startswith(f"| `{op.name}` |"))
        assert f"| {' '.join(op.backends())} |" in row


def test_importing_disables_garbage_collection_and_freezes_modules(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    try:
        with importing():
            assert not gc.isenabled()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_a_failed_import_enables_garbage_collection(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()


def test_importing_after_torch_freezes_nothing():
    assert "torch" in sys.modules
    before = gc.get_freeze_count()
    with importing():
        assert gc.isenabled()
    assert gc.get_freeze_count() == before
