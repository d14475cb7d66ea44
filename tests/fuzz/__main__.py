"""`python -m tests.fuzz`: try inputs until the time is over, and say what was found. `make fuzz SECONDS=600` calls it."""

import argparse
import faulthandler
import sys
import time
from collections import Counter

from tests.fuzz.file_targets import TARGETS as FILES
from tests.fuzz.harness import WAITING, Finding, attempt, attempts, peak_nbytes
from tests.fuzz.op_targets import TARGETS as OPS
from tests.fuzz.request_targets import TARGETS as REQUESTS

ALL = [*FILES, *REQUESTS, *OPS]


EVERY_S = 60.0  # a line that says how far it is


def main() -> int:
    asked = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    asked.add_argument("--seconds", type=float, default=60)
    asked.add_argument("--inputs", type=int, default=sys.maxsize, help="end after so many, if the time is not over before")
    asked.add_argument("--first", type=int, default=0, help="number of the first input; findings are named by their number")
    asked.add_argument("--target", action="append", choices=[target.name for target in ALL], help="only this; may be repeated")
    given = asked.parse_args()
    targets = [target for target in ALL if given.target is None or target.name in given.target]
    counts: Counter[str] = Counter()
    found: list[Finding] = []
    for target in targets:
        # what is compiled and loaded once is no input's fault
        attempt(target, 0)
    before, told = peak_nbytes(), time.monotonic()
    for name, number, finding in attempts(targets, given.seconds, given.first):
        # what hangs where Python cannot be interrupted
        faulthandler.dump_traceback_later(2 * WAITING * max(target.limit_s for target in targets), exit=True)
        counts[name] += 1
        if finding is not None:
            found.append(finding)
            print(f"{finding.target}/{finding.number}: {finding.what}", flush=True)
        if time.monotonic() - told > EVERY_S:
            told = time.monotonic()
            print(f"... {counts.total():,} inputs, at {name}/{number}, {len(found)} findings", flush=True)
        if counts.total() >= given.inputs:
            break
    faulthandler.cancel_dump_traceback_later()
    tried = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    memory = f"memory {before >> 20} MiB before, {peak_nbytes() >> 20} MiB at most"
    print(f"{counts.total():,} inputs from number {given.first:,}, {len(found)} findings, {memory}: {tried}")
    return 1 if found else 0


if __name__ == "__main__":
    faulthandler.enable()
    sys.exit(main())
