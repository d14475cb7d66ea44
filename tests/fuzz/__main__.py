"""`python -m tests.fuzz`: run fuzz inputs for a given time and print the findings; `make fuzz SECONDS=600` calls it.

Several processes share the input numbers; one that crashes or hangs is a finding, and its successor continues after that input.
"""

import argparse
import faulthandler
import fnmatch
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# CPU only, without downloads
os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}

from tests.fuzz.counters import Counters, peak_nbytes, table, total
from tests.fuzz.harness import WALL_CLOCK_FACTOR, Share, Target, attempt, inputs_of
from tests.fuzz.targets import TARGETS

PROGRESS_INTERVAL_S = 60.0  # between progress lines
MAX_CRASHES = 100


def work(targets: list[Target], share: Share, counters: Counters, verbose: bool) -> None:
    """Run a share of the inputs in this process."""
    last = time.monotonic()
    for target in targets:
        # compile and load once, outside of the measured inputs
        attempt(target, 0)
    for target, number in inputs_of(targets, share):
        # for hangs in native code, where Python signal handlers do not run
        faulthandler.dump_traceback_later(2 * WALL_CLOCK_FACTOR * target.limit_s, exit=True)
        counters.begin(target, number)
        attempted = attempt(target, number)
        counters.end(attempted)
        if attempted.what is not None:
            print(f"{attempted.target}/{attempted.number}: {attempted.what}", flush=True)
        if verbose and time.monotonic() - last > PROGRESS_INTERVAL_S:
            last = time.monotonic()
            print(f"... {total([counters], 'inputs'):,} inputs, {total([counters], 'findings')} findings", flush=True)
    faulthandler.cancel_dump_traceback_later()


def supervise(targets: list[Target], shares: list[Share], folder: Path, options: list[str]) -> list[Counters]:
    """Run shares in several processes; restart a crashed one after the input that it crashed on."""
    all_counters = [Counters(folder / str(at), targets) for at in range(len(shares))]
    begun, printed, crashes = time.monotonic(), time.monotonic(), 0

    def start(at: int, first: int) -> subprocess.Popen[bytes]:
        left = max(1.0, shares[at].seconds - (time.monotonic() - begun))
        done = total([all_counters[at]], "inputs")
        limits = {"--first": first, "--step": shares[at].step, "--seconds": left, "--inputs": shares[at].inputs - done}
        limits["--each"] = shares[at].each - (first - shares[at].first) // shares[at].step
        given = [str(word) for pair in limits.items() if pair[1] < float("inf") for word in pair]
        return subprocess.Popen([sys.executable, "-m", "tests.fuzz", *options, *given, "--counters", str(folder / str(at))])

    working = {at: start(at, share.first) for at, share in enumerate(shares)}
    try:
        while working:
            time.sleep(0.5)
            for at, process in [(at, process) for at, process in working.items() if process.poll() is not None]:
                del working[at]
                ended = all_counters[at].interrupted_input()
                if ended is not None:
                    name, number = ended
                    print(f"{name}/{number}: the process ended with {process.returncode}", flush=True)
                    crashes += 1
                    if crashes <= MAX_CRASHES:
                        working[at] = start(at, number + shares[at].step)
                elif process.returncode not in (0, 1):
                    raise SystemExit(f"a process ended with {process.returncode} before its first input")
            if time.monotonic() - printed > PROGRESS_INTERVAL_S:
                printed = time.monotonic()
                print(f"... {total(all_counters, 'inputs'):,} inputs, {total(all_counters, 'findings')} findings", flush=True)
    finally:
        for process in working.values():
            process.kill()
    return all_counters


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, help="time limit; 60 if no other limit is given")
    parser.add_argument("--inputs", type=float, default=float("inf"), help="number of inputs")
    parser.add_argument("--each", type=float, default=float("inf"), help="number of inputs per target")
    parser.add_argument("--first", type=int, default=0, help="number of the first input; a finding is identified by its number")
    parser.add_argument("--step", type=int, default=1, help="step between input numbers")
    parser.add_argument("--processes", type=int, default=1, help="processes that share the inputs")
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="only matching targets, such as 'gguf-*'; may be repeated"
    )
    parser.add_argument("--list", action="store_true", help="list the targets")
    parser.add_argument("--counters", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.seconds is None:
        given.seconds = 60.0 if given.inputs == given.each == float("inf") else float("inf")
    return given


def main() -> int:
    given = parse_args()
    patterns = given.only or ["*"]
    targets = [target for target in TARGETS if any(fnmatch.fnmatch(target.name, each) for each in patterns)]
    if given.list or not targets:
        print("\n".join(target.name for target in TARGETS))
        return 0 if targets else 2
    begun, count = time.monotonic(), given.processes
    with tempfile.TemporaryDirectory(prefix="auraflux-fuzz-") as folder:
        if count == 1:
            all_counters = [Counters(given.counters or Path(folder) / "0", targets)]
            share = Share(given.first, given.step, given.seconds, given.inputs, given.each)
            work(targets, share, all_counters[0], verbose=given.counters is None)
        else:
            shares = [
                Share(given.first + at, count, given.seconds, -(-given.inputs // count), -(-given.each // count))
                for at in range(count)
            ]
            options = [word for each in patterns for word in ("--only", each)]
            all_counters = supervise(targets, shares, Path(folder), options)
        inputs, findings = total(all_counters, "inputs"), total(all_counters, "findings")
        if given.counters is None:
            took = time.monotonic() - begun
            print(table(all_counters))
            rate = f"{took:.0f} s, {inputs / took:.0f} a second"
            memory = f"{count} processes of at most {peak_nbytes(all_counters) >> 20} MiB"
            print(f"{inputs:,} inputs from number {given.first:,}, {findings} findings, {rate}, {memory}")
    return 1 if findings else 0


if __name__ == "__main__":
    faulthandler.enable()
    sys.exit(main())
