"""`run`: Python code in a process of its own that has torch and Numba imported already.

The process is forked from one that has imported both and nothing else, which saves the two seconds that these imports take.
Modules of the package are imported by the code itself, in the environment that it is given.
"""

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SERVER = """
import json, os, sys, tempfile, traceback
import numba, numpy, torch

def child(code, environment, folder, outputs):
    for number, file in enumerate(outputs, 1):
        os.dup2(file.fileno(), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["-c"]
    try:
        exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as err:
        status = err.code if isinstance(err.code, int) else int(err.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

for line in sys.stdin:
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as said:
        pid = os.fork()
        if pid == 0:
            child(*json.loads(line), (printed, said))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        texts = []
        for file in (printed, said):
            file.seek(0)
            texts.append(file.read().decode())
    print(json.dumps([status, *texts]), flush=True)
"""


@cache
def _server() -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", SERVER]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    atexit.register(server.kill)
    return server


def run(code: str, environment: Mapping[str, str] | None = None, folder: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    """Run code; its environment, by default this process's, must not change what torch and Numba read at import."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    given = dict(os.environ if environment is None else environment)
    server.stdin.write(json.dumps([code, given, str(folder)]) + "\n")
    server.stdin.flush()
    status, printed, said = json.loads(server.stdout.readline())
    return subprocess.CompletedProcess([code], status, printed, said)
