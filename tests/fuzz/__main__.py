"""`python -m tests.fuzz`: try inputs until the time is over, and say what was found. `make fuzz SECONDS=600` calls it.

With several processes each tries other numbers; one that crashes or hangs is a finding, and another goes on after it.
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

# inputs are for the CPU, and nothing is fetched
os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}

from tests.fuzz.board import Board, peak_nbytes, table, total
from tests.fuzz.harness import WAITING, Share, Target, attempt, turns
from tests.fuzz.targets import TARGETS

EVERY_S = 60.0  # a line that says how far it is
MOST_CRASHES = 100


def work(targets: list[Target], share: Share, board: Board, told: bool) -> None:
    """Try a share of the inputs in this process."""
    last = time.monotonic()
    for target in targets:
        # what is compiled and loaded once is no input's fault
        attempt(target, 0)
    for target, number in turns(targets, share):
        # what hangs where Python cannot be interrupted
        faulthandler.dump_traceback_later(2 * WAITING * target.limit_s, exit=True)
        board.begin(target, number)
        tried = attempt(target, number)
        board.end(tried)
        if tried.what is not None:
            print(f"{tried.target}/{tried.number}: {tried.what}", flush=True)
        if told and time.monotonic() - last > EVERY_S:
            last = time.monotonic()
            print(f"... {total([board], 'inputs'):,} inputs, {total([board], 'findings')} findings", flush=True)
    faulthandler.cancel_dump_traceback_later()


def supervise(targets: list[Target], shares: list[Share], folder: Path, words: list[str]) -> list[Board]:
    """Have several processes work; one that ends before it is done is begun again behind the input it ended at."""
    boards = [Board(folder / str(at), targets) for at in range(len(shares))]
    begun, told, crashes = time.monotonic(), time.monotonic(), 0

    def start(at: int, first: int) -> subprocess.Popen[bytes]:
        left = max(1.0, shares[at].seconds - (time.monotonic() - begun))
        done = total([boards[at]], "inputs")
        limits = {"--first": first, "--step": shares[at].step, "--seconds": left, "--inputs": shares[at].inputs - done}
        limits["--each"] = shares[at].each - (first - shares[at].first) // shares[at].step
        given = [str(word) for pair in limits.items() if pair[1] < float("inf") for word in pair]
        return subprocess.Popen([sys.executable, "-m", "tests.fuzz", *words, *given, "--board", str(folder / str(at))])

    working = {at: start(at, share.first) for at, share in enumerate(shares)}
    try:
        while working:
            time.sleep(0.5)
            for at, process in [(at, process) for at, process in working.items() if process.poll() is not None]:
                del working[at]
                ended = boards[at].broken_off()
                if ended is not None:
                    name, number = ended
                    print(f"{name}/{number}: the process ended with {process.returncode}", flush=True)
                    crashes += 1
                    if crashes <= MOST_CRASHES:
                        working[at] = start(at, number + shares[at].step)
                elif process.returncode not in (0, 1):
                    raise SystemExit(f"a process ended with {process.returncode} before its first input")
            if time.monotonic() - told > EVERY_S:
                told = time.monotonic()
                print(f"... {total(boards, 'inputs'):,} inputs, {total(boards, 'findings')} findings", flush=True)
    finally:
        for process in working.values():
            process.kill()
    return boards


def parse() -> argparse.Namespace:
    asked = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    asked.add_argument("--seconds", type=float, help="end then; 60 if nothing else says when")
    asked.add_argument("--inputs", type=float, default=float("inf"), help="end after so many")
    asked.add_argument("--each", type=float, default=float("inf"), help="end after so many of each target")
    asked.add_argument("--first", type=int, default=0, help="number of the first input; findings are named by their number")
    asked.add_argument("--step", type=int, default=1, help="try only every so many-th number")
    asked.add_argument("--processes", type=int, default=1, help="that share the numbers")
    asked.add_argument("--only", action="append", metavar="NAME", help="only this target, or 'gguf-*'; may be repeated")
    asked.add_argument("--list", action="store_true", help="name the targets")
    asked.add_argument("--board", type=Path, help=argparse.SUPPRESS)
    given = asked.parse_args()
    if given.seconds is None:
        given.seconds = 60.0 if given.inputs == given.each == float("inf") else float("inf")
    return given


def main() -> int:
    given = parse()
    wanted = given.only or ["*"]
    targets = [target for target in TARGETS if any(fnmatch.fnmatch(target.name, each) for each in wanted)]
    if given.list or not targets:
        print("\n".join(target.name for target in TARGETS))
        return 0 if targets else 2
    begun, count = time.monotonic(), given.processes
    with tempfile.TemporaryDirectory(prefix="auraflux-fuzz-") as folder:
        if count == 1:
            boards = [Board(given.board or Path(folder) / "0", targets)]
            share = Share(given.first, given.step, given.seconds, given.inputs, given.each)
            work(targets, share, boards[0], told=given.board is None)
        else:
            shares = [
                Share(given.first + at, count, given.seconds, -(-given.inputs // count), -(-given.each // count))
                for at in range(count)
            ]
            words = [word for each in wanted for word in ("--only", each)]
            boards = supervise(targets, shares, Path(folder), words)
        inputs, findings = total(boards, "inputs"), total(boards, "findings")
        if given.board is None:
            took = time.monotonic() - begun
            print(table(boards))
            rate = f"{took:.0f} s, {inputs / took:.0f} a second"
            memory = f"{count} processes of at most {peak_nbytes(boards) >> 20} MiB"
            print(f"{inputs:,} inputs from number {given.first:,}, {findings} findings, {rate}, {memory}")
    return 1 if findings else 0


if __name__ == "__main__":
    faulthandler.enable()
    sys.exit(main())
