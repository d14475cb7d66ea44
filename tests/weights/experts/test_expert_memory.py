"""Memory of offloaded experts: the budget, and little more."""

import subprocess
import sys
from pathlib import Path

import torch

from tests.weights.experts.packed import write_experts

K, SLOTS, COUNT, WIDTH = 4, 8, 48, 512
CONSTANT = 16 << 20  # for threads, activations and Python, on top of the budget

# a separate process: memory that other tests left would hide the growth
RUN = """
import sys, torch
from pathlib import Path
from auraflux.weights.experts.packed_files import open_experts
from auraflux.weights.experts.settings import plan_expert_cache
from auraflux.weights.experts.store import ExpertStore

def resident():
    found = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(found[name].split()[0]) << 10 for name in ("RssAnon", "RssFile", "RssShmem"))

k, slots, width = map(int, sys.argv[2:])
torch.set_num_threads(1)
files = open_experts(Path(sys.argv[1]))
budget = slots * sum(file.stride for file in files.files)

def run(store, steps):
    layers = [store.layer(file.module, files.count, width, width, {}, None) for file in files.files]
    for step in range(steps):
        tokens = 32 if step % 10 == 5 else 1
        ids = torch.stack([torch.randperm(files.count)[:k] for _ in range(tokens)]).int()
        for layer in layers:
            layer(torch.randn(tokens, width), ids, torch.full((tokens, k), 1 / k))
    return layers

# compile kernels and start threads before the measurement
run(ExpertStore(files, plan_expert_cache(files, k, budget)), 27)
before, most = resident(), 0
store = ExpertStore(files, plan_expert_cache(files, k, budget))
for _ in range(5):
    layers = run(store, 30)
    most = max(most, resident())
print(budget, most - before, files.nbytes, store.cache_stats().total.nbytes)
"""


def test_memory_stays_within_the_budget(tmp_path: Path):
    torch.manual_seed(0)
    write_experts(tmp_path, layers=2, count=COUNT, hidden=WIDTH, inner=WIDTH, distinct=2)
    command = [sys.executable, "-c", RUN, str(tmp_path), *map(str, (K, SLOTS, WIDTH))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    budget, grown, total, read = map(int, done.stdout.split())
    assert total > 5 * budget
    assert read > 5 * total
    assert grown <= budget + CONSTANT
