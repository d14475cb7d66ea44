"""Loading GGUF files here and in llama.cpp: `python -m bench.lab.load_times FILE…`; needs the package xllamacpp.

Each measurement is a process of its own: import, load, first token. The engines alternate. "Cold" drops the file from the page
cache before the process starts. Both get 1,024 tokens of context and no warm-up run. llama.cpp maps the file, so that its first
token reads what loading did not. Anonymous memory has no pages of the file.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from auraflux.cli.output.units import size
from auraflux.machine import this_machine

ENGINES = ("auraflux", "llama.cpp")
PROMPT = "The capital of France is"
MEASURE = """
import json, resource, sys, threading, time
start = time.perf_counter()
peak = [0]
def watch():
    while True:
        for line in open("/proc/self/status"):
            if line.startswith("RssAnon"):
                peak[0] = max(peak[0], int(line.split()[1]) << 10)
        time.sleep(0.01)
threading.Thread(target=watch, daemon=True).start()
def memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
engine, path = sys.argv[1:]
if engine == "auraflux":
    import auraflux
    import auraflux.loading.load
    before = memory()
    imported, importing = time.perf_counter(), time.process_time()
    model = auraflux.load(path, context=1024, max_sequences=1, device="cpu")
    loaded, loading = time.perf_counter(), time.process_time()
    next(iter(model.tokens(model.tokenizer.encode(PROMPT), max_tokens=1)))
else:
    import xllamacpp
    before = memory()
    imported, importing = time.perf_counter(), time.process_time()
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = path, 1024, 1, False
    model = xllamacpp.Server(params)
    loaded, loading = time.perf_counter(), time.process_time()
    model.handle_completions({"prompt": PROMPT, "n_predict": 1})
end, ending = time.perf_counter(), time.process_time()
found = {"import": imported - start, "load": loaded - imported, "first": end - loaded, "total": end - start}
found |= {"peak": memory(), "over_imports": memory() - before, "anonymous": peak[0]}
found |= {"load_cpu": loading - importing, "total_cpu": ending}
print("\\n" + json.dumps(found))
""".replace("PROMPT", repr(PROMPT))


def measure(engine: str, path: Path, *, cold: bool) -> dict[str, float]:
    """Load a file in a new process; return seconds and bytes."""
    if cold:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    else:
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass
    command = [sys.executable, "-c", MEASURE, engine, str(path)]
    # an installation has bytecode; without it, imports would take twice as long
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def row(name: str, runs: list[dict[str, float]]) -> str:
    """Return a line of the table: medians and, behind a slash, the lowest."""

    def seconds(key: str) -> str:
        values = [run[key] for run in runs]
        return f"{statistics.median(values):.2f} / {min(values):.2f}"

    cells = [seconds(key) for key in ("import", "load", "load_cpu", "first", "total", "total_cpu")]
    memory = [size(int(max(run[key] for run in runs))) for key in ("peak", "over_imports", "anonymous")]
    return f"| {name} | " + " | ".join([*cells, *memory]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    machine = this_machine()
    print(f"{machine.cpu}, {machine.cores} cores; median / lowest of {given.rounds}, seconds; largest memory\n")
    print(
        "| file, page cache, engine | import | load | its CPU time | first token | sum | CPU time "
        "| peak memory | over imports | anonymous |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for path in given.files:
        # fills the caches of kernels and of calibrations
        measure("auraflux", path, cold=False)
        for cold in (True, False):
            found: dict[str, list[dict[str, float]]] = {engine: [] for engine in ENGINES}
            for _ in range(given.rounds):
                for engine in ENGINES:
                    found[engine].append(measure(engine, path, cold=cold))
            for engine, runs in found.items():
                about = f"{path.stem} ({size(path.stat().st_size)}), {'cold' if cold else 'warm'}, {engine}"
                print(row(about, runs), flush=True)


if __name__ == "__main__":
    main()
