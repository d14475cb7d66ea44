"""`auraflux bench ops` on cases small enough to time in a moment."""

import json

import pytest
import torch
from click.testing import CliRunner

from auraflux.bench import ops
from auraflux.bench.peers import PEERS, Peer
from auraflux.bench.peers.peer import each
from auraflux.cli import main
from auraflux.ops._cases import Case
from auraflux.ops._dispatch import Declined, Op
from auraflux.ops.simd import peak_bandwidth


def doubled(x: torch.Tensor) -> torch.Tensor:
    """Return twice x."""
    return 2 * x


doubled.__module__ = "toy.reference"


def refuse(x: torch.Tensor) -> torch.Tensor:
    raise Declined("not today")


@pytest.fixture
def bench(monkeypatch):
    """Run the command on one op with the given kernel and peers."""
    measure = peak_bandwidth.read_bandwidths
    monkeypatch.setattr(peak_bandwidth, "read_bandwidths", lambda counts, nbytes=None: measure(counts, 1 << 20))

    def run(*words: str, kernel=lambda x: x + x, peers=()):
        op = Op(doubled, (), None)
        op._kernels.update(cpu=kernel, cuda=None)
        case = Case(op, "tiny", lambda: {"x": torch.ones(100)}, bench=True, flops=lambda args: 100)
        monkeypatch.setattr(ops, "all_cases", lambda: [case])
        monkeypatch.setitem(PEERS, "doubled", list(peers))
        return CliRunner().invoke(main, ["bench", "ops", "--seconds", "0.02", *words])

    return run


def peer(name: str, call, **fields) -> Peer:
    return Peer(name, each(lambda args: lambda: call(args["x"])), **fields)


def test_json_has_machine_versions_and_results(bench):
    done = bench("--json", peers=[peer("torch", lambda x: x.mul(2))])
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["machine"]["cores"] >= 1
    assert found["versions"]["torch"] == torch.__version__
    assert found["read_ceiling_gb_per_s"]["all_threads"] > 0
    (row,) = found["results"]
    assert (row["op"], row["case"], row["contract"], row["state"]) == ("doubled", "tiny", "exact", "timed")
    assert row["nbytes"] == 800
    assert row["gb_per_s"] == pytest.approx(800 / row["time_us"] / 1e3)
    assert row["gflop_per_s"] == pytest.approx(100 / row["time_us"] / 1e3)
    assert row["low_us"] <= row["time_us"] <= row["high_us"]
    assert row["peers"][0]["error"] == 0
    assert row["peers"][0]["ratio"] == pytest.approx(row["peers"][0]["time_us"] / row["time_us"])


def test_table_shows_peers_and_losses(bench):
    slow, fast = torch.eye(300), torch.zeros(100)
    done = bench(
        kernel=lambda x: x + x + 0 * (slow @ slow)[0, :100],
        peers=[peer("ready", lambda x: fast), peer("absent", lambda x: x, packages=("no_such_package",))],
    )
    assert done.exit_code == 0, done.stderr
    assert "no_such_package not installed" in done.stdout
    assert "slower doubled tiny: ready takes 0." in done.stdout


def test_a_wrong_kernel_is_not_timed(bench):
    done = bench("--json", kernel=lambda x: 3 * x)
    assert done.exit_code == 1
    (row,) = json.loads(done.stdout)["results"]
    assert (row["state"], row["time_us"]) == ("wrong", None)
    assert row["error"] == pytest.approx(0.5)
    assert done.stderr == "error: kernels that differ from their reference: doubled tiny.\n"
    assert "WRONG the result: relative RMS 0.5" in " ".join(bench(kernel=lambda x: 3 * x).stdout.replace("│", " ").split())


def test_a_kernel_that_declines_is_shown(bench):
    done = bench(kernel=refuse)
    assert done.exit_code == 0
    assert "not today" in done.stdout


def test_an_op_without_a_kernel_is_shown(bench):
    assert "no cpu kernel" in bench(kernel=None).stdout


def test_a_peer_that_fails_says_why_and_the_rest_is_timed(bench):
    def fail(x):
        raise RuntimeError("cannot do that")

    done = bench("--json", peers=[peer("broken", fail), peer("torch", lambda x: x.mul(2))])
    broken, fine = json.loads(done.stdout)["results"][0]["peers"]
    assert (broken["note"], broken["ratio"]) == ("RuntimeError: cannot do that", None)
    assert fine["ratio"] > 0


def test_a_fast_peer_is_not_compared_with_an_exact_case(bench):
    done = bench("--json", peers=[peer("rounding", lambda x: x.mul(2), contract="fast")])
    assert json.loads(done.stdout)["results"][0]["peers"] == []


def test_no_peers(bench):
    done = bench("--json", "--no-peers", peers=[peer("torch", lambda x: x.mul(2))])
    assert json.loads(done.stdout)["results"][0]["peers"] == []


def test_save_into_a_folder_names_the_file_after_the_machine(bench, tmp_path):
    done = bench("--save", str(tmp_path))
    assert done.exit_code == 0, done.stderr
    (file,) = tmp_path.iterdir()
    assert file.suffix == ".json"
    assert json.loads(file.read_text())["results"][0]["op"] == "doubled"


def test_unknown_names_list_the_known(bench):
    done = bench("--op", "tripled")
    assert done.exit_code == 1
    assert done.stderr == "error: no op 'tripled' has benchmark cases. Those that have: doubled.\n"
    assert "Those there are: tiny." in bench("--case", "huge").stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused(bench):
    done = bench("--device", "cuda")
    assert done.exit_code == 1
    assert done.stderr.startswith("error: torch finds no NVIDIA GPU here.")


def test_threads_are_rows_and_their_peaks_are_shown(bench):
    done = bench("--threads", "1", "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["read_ceiling_gb_per_s"]["1_threads"] == found["read_ceiling_gb_per_s"]["one_thread"] > 0
    (row,) = found["results"]
    assert (row["threads"], row["op"], row["state"], row["nbytes"]) == (1, "doubled", "timed", 800)
    table = bench("--threads", "1").stdout
    assert "1 threads" in table
    assert "doubled tiny" in table


def test_threads_that_are_not_there_are_refused(bench):
    done = bench("--threads", "4096")
    assert done.exit_code == 1
    assert "4096" in done.stderr
    assert "--device cpu" in bench("--threads", "1", "--device", "cuda").stderr
