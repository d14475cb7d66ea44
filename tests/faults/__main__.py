"""`python -m tests.faults`: run everything that writes files with the n-th system call failing, for every n.

A process that has imported everything forks for every attempt: the child writes with an injected fault; a second child writes
without. After the first, the folder must hold the old or the new state; after the second, the new one.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.calls import FAULTS, MEMORY, READS, REMOVING, Calls, Fault, build
from tests.faults.scenarios import SCENARIOS, Scenario, make_source, message_of

MAX_SHOWN = 5  # findings printed per scenario and fault


def in_child(action: Callable[[], Any]) -> Any:
    """Return the result of an action in a forked process, None if the process was killed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        # drop the output of numba, torch and click
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            with os.fdopen(write, "w") as pipe:
                json.dump(action(), pipe)
        finally:
            # skip the parent's cleanup handlers
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        found = pipe.read()
    os.waitpid(child, 0)
    return json.loads(found) if found else None


def run_scenario(scenario: Scenario, folder: Path, calls: Calls, fault: Fault, at: int | None) -> Any:
    """Run a scenario in a child; return the number of calls, the failed call and the error message."""

    def action() -> Any:
        message = None
        if at is not None:
            calls.arm(folder.parent, fault, at)
        try:
            scenario.act(folder)
        except Exception as err:
            calls.disarm()
            message = message_of(err)
        return [*calls.disarm(), message]

    return in_child(action)


class Trial:
    """One scenario and one fault, for every n."""

    def __init__(self, base: Path, calls: Calls, scenario: Scenario, name: str):
        self.calls, self.scenario, self.name, self.fault = calls, scenario, name, FAULTS[name]
        self.before, self.folder = base / "before", base / "work"
        shutil.rmtree(self.before, ignore_errors=True)
        self.before.mkdir()
        in_child(lambda: scenario.prepare(self.before))
        self.reset()
        self.old = self._view()
        self.count, _, message = run_scenario(scenario, self.folder, calls, self.fault, 0)
        assert message is None, message
        self.new = self._view()
        assert self.old != self.new

    def reset(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.before, self.folder)

    def check_call(self, at: int) -> str | None:
        """Fail the n-th call; return a description of the finding, if any."""
        self.reset()
        done = run_scenario(self.scenario, self.folder, self.calls, self.fault, at)
        problem = self._after(*(done or (0, "", None)), killed=done is None)
        if problem is None:
            *_, message = run_scenario(self.scenario, self.folder, self.calls, self.fault, None) or [f"killed, {done}"]
            if self._view() != self.new or self.scenario.leftovers(self.folder):
                problem = f"the next run printed {message!r}, left {self._names()}"
        return problem and f"{self.scenario.name} {self.name} {at} ({done and done[1]}): {problem}"

    def _view(self) -> Any:
        """Return the state of the folder without leftovers of an unfinished run."""
        left = list(enumerate(sorted(self.scenario.leftovers(self.folder))))
        for number, name in left:
            shutil.move(self.folder / name, self.folder.parent / f"left-{number}")
        found = self.scenario.view(self.folder)
        for number, name in left:
            shutil.move(self.folder.parent / f"left-{number}", self.folder / name)
        return found

    def _names(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*"))

    def _after(self, count: int, hit: str, message: str | None, killed: bool) -> str | None:
        left = self.scenario.leftovers(self.folder)
        # after a failed removal or listing, files are left for the next run
        removable = not killed and hit not in REMOVING and self.fault.kinds not in (READS, MEMORY)
        if removable and left - set(self.scenario.resumable):
            return f"{sorted(left)} are left; it printed {message!r}"
        found = self._view()
        if found not in (self.old, self.new):
            return f"neither old nor new: {self._names()}; it printed {message!r}"
        if not killed and message is None and found != self.new and not self.scenario.quiet:
            return "no error, and no change"
        if message is not None and (message.startswith("traceback") or message.strip().count("\n") or len(message) > 1000):
            return message
        return None


def run(base: Path, scenarios: list[str], faults: list[str], stride: int) -> int:
    calls, found, total = Calls(), 0, 0
    (base / "work").mkdir()
    in_child(lambda: make_source(base / "work"))
    for scenario in SCENARIOS:
        for name in FAULTS:
            if scenario.name not in scenarios or name not in faults:
                continue
            begun, trial = time.monotonic(), Trial(base, calls, scenario, name)
            places = range(1 + total % stride, trial.count + 1, stride)
            problems = [problem for at in places if (problem := trial.check_call(at)) is not None]
            found, total = found + len(problems), total + len(places)
            took = time.monotonic() - begun
            print(
                f"{scenario.name} {name}: {len(places)} of {trial.count} calls, {len(problems)} wrong, {took:.1f} s", flush=True
            )
            for problem in problems[:MAX_SHOWN]:
                print(f"  {problem}", flush=True)
    print(f"{total} faults, {found} findings")
    return 1 if found else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--scenario", action="append", choices=[each.name for each in SCENARIOS])
    parser.add_argument("--fault", action="append", choices=list(FAULTS))
    parser.add_argument("--stride", type=int, default=1, help="only every n-th call")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="auraflux-faults-") as folder:
        base = Path(folder).resolve()
        if "LD_PRELOAD" not in os.environ:
            # torch's threads do not exist in forked processes
            environment = {**os.environ, "LD_PRELOAD": str(build(base)), "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
            return subprocess.run(
                [sys.executable, "-m", "tests.faults", *sys.argv[1:]], env=environment, check=False
            ).returncode
        names = [each.name for each in SCENARIOS]
        return run(base, given.scenario or names, given.fault or list(FAULTS), given.stride)


if __name__ == "__main__":
    sys.exit(main())
