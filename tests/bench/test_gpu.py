"""The benchmark on a GPU, without one: what is counted and compared, what is refused, and the table and document made of it."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

pytest.importorskip("triton")

from auraflux.bench import parity
from auraflux.bench.gpu import ceilings, clock
from auraflux.bench.gpu import document as document_module
from auraflux.bench.gpu import run as gpu_run
from auraflux.bench.gpu.ceilings import Ceilings, matmul_ceiling
from auraflux.bench.gpu.clock import Contender, race, record_long, times_over
from auraflux.bench.gpu.document import Gpu, document, row
from auraflux.bench.gpu.peers import PEERS, Peer
from auraflux.bench.gpu.routes import without_each
from auraflux.bench.gpu.run import ROTATED_NBYTES, copies_needed, libraries, no_peers, run
from auraflux.bench.peers.peer import each
from auraflux.bench.result import PeerResult, Result
from auraflux.bench.timing import Timing
from auraflux.cli import bench_gpu, main
from auraflux.cli.bench_gpu import WIDTH, show
from auraflux.errors import DeviceMemoryError
from auraflux.ops import routes
from auraflux.ops._cases import Case
from auraflux.ops._dispatch import Declined, Op
from auraflux.ops.routes import Route, Routes

MB = 1 << 20
CEILINGS = Ceilings(read=4e12, copy=3.9e12, matmul=1e15)
GPU = Gpu("NVIDIA H200", "9.0", 132, 150 << 30, 60 * MB, "13.0")


class Played:
    """Calls that are made at once and said to have taken a millisecond each, two launches a call."""

    call_s = 1e-3

    def __init__(self, calls):
        for call in calls:
            call()
        self.calls, self.launches = len(calls), 2 * len(calls)

    def replay(self, times):
        return [self.call_s * self.calls] * times


def doubled(x: Tensor) -> Tensor:
    """Twice x."""
    return 2 * x


doubled.__module__ = "toy.reference"


def toy(kernel, size: int = 100, **fields) -> Case:
    op = Op(doubled, (), None)
    op._kernels["cuda"] = kernel
    return Case(op, "tiny", lambda: {"x": torch.ones(size)}, **fields)


def one(case: Case, peers=(), monkeypatch=None, record=Played) -> Result:
    if monkeypatch is not None:
        monkeypatch.setitem(PEERS, "doubled", list(peers))
    (found,) = run([case], libraries if peers else no_peers, 0.01, record=record, device="cpu")
    return found


@pytest.mark.parametrize(
    ("nbytes", "free", "copies"),
    [
        (1000, 1 << 40, 1),
        (MB, 1 << 40, 256),
        (35 * MB, 1 << 40, 8),
        (141 * MB, 1 << 40, 2),
        (300 * MB, 1 << 40, 1),
        (35 * MB, 300 * MB, 2),
        (300 * MB, 300 * MB, 1),
    ],
)
def test_how_many_copies_hide_the_cache(nbytes, free, copies):
    assert copies_needed(nbytes, free) == copies
    assert copies * nbytes >= ROTATED_NBYTES or nbytes < MB or free < 1 << 40


def test_short_calls_are_recorded_over_and_over():
    assert times_over(1, 10e-6) == 100
    assert times_over(8, 100e-6) == 10
    assert times_over(256, 1e-6) == 4
    assert times_over(1, 2.0) == 1


def test_a_recording_is_as_long_as_it_needs_to_be():
    class Quick(Played):
        call_s = 3e-6

    assert record_long([lambda: None] * 2, Quick).calls == 2 * 167
    assert record_long([lambda: None] * 2, Played).calls == 2


def test_a_race_gives_medians_of_single_calls(monkeypatch):
    class Uneven(Played):
        def replay(self, times):
            return [(1 + n % 3) * 1e-6 * self.calls for n in range(times)]

    contender = Contender(Uneven([lambda: None] * 4))
    (timing,) = race([contender], 1e-3)
    assert timing.median_s == pytest.approx(2e-6)
    assert (timing.low_s, timing.high_s) == pytest.approx((1e-6, 3e-6))
    assert timing.samples <= clock.ROUNDS * clock.MOST_SAMPLES
    assert contender.launches == 2


def test_a_right_kernel_is_timed(monkeypatch):
    found = one(toy(lambda x: x + x, flops=lambda args: 100))
    assert (found.state, found.error, found.nbytes, found.flops) == ("timed", 0.0, 800, 100)
    assert found.timing.median_s == pytest.approx(1e-3)
    assert (found.launches, found.copies) == (2, 1)


def test_large_arguments_are_rotated():
    seen = set()

    def kernel(x: Tensor) -> Tensor:
        seen.add(x.data_ptr())
        return x + x

    found = one(toy(kernel, size=64 << 18))
    # one more was held to the reference
    assert (found.copies, len(seen)) == (1, 2)
    assert found.nbytes == 128 * MB


@pytest.mark.parametrize(
    ("kernel", "note"),
    [
        (lambda x: 3 * x, "the result: relative RMS 0.5, allowed 1e-05"),
        (lambda x: torch.empty_like(x), "the result: relative RMS inf, allowed 1e-05"),
        (lambda x: x.mul_(2), "x: relative RMS 1, allowed 1e-05"),
        (lambda x: x.no_such_thing, "AttributeError: 'Tensor' object has no attribute 'no_such_thing'"),
    ],
    ids=["wrong", "unwritten", "argument", "raises"],
)
def test_a_wrong_kernel_is_not_timed(kernel, note):
    found = one(toy(kernel))
    assert (found.state, found.timing, found.note) == ("wrong", None, note)


def refuse(x):
    raise Declined("not today")


def exhaust(x):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")


def test_what_cannot_be_timed_says_why():
    assert (one(toy(refuse)).state, one(toy(refuse)).note) == ("declined", "not today")
    assert one(toy(None)).note == "no cuda kernel"
    assert (one(toy(exhaust)).state, one(toy(exhaust)).note) == (
        "no memory",
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB.",
    )

    def fail(calls):
        raise RuntimeError("operation not permitted when stream is capturing")

    found = one(toy(lambda x: x + x), record=fail)
    assert found.state == "failed"
    assert found.note.startswith("cannot be recorded: RuntimeError: operation not permitted")


def test_peers_are_timed_or_named(monkeypatch):
    def peer(name, call, **fields):
        return Peer(name, each(lambda args: lambda: call(args["x"])), **fields)

    peers = [peer("torch", lambda x: x * 2.1), peer("absent", doubled, packages=("no_such_package",)), peer("broken", exhaust)]
    found = one(toy(lambda x: x + x), peers, monkeypatch)
    torch_, absent, broken = found.peers
    assert torch_.error == pytest.approx(0.05, abs=1e-6)
    assert torch_.timing.median_s == pytest.approx(1e-3)
    assert (absent.timing, absent.note) == (None, "no_such_package not installed")
    assert (broken.timing, broken.note.partition(":")[0]) == (None, "OutOfMemoryError")


def timed(nbytes: int, flops: int | None, *peers: PeerResult) -> Result:
    timing = Timing(2e-6, 1e-6, 3e-6, 10)
    return Result("linear", "4bit", "exact", "timed", None, 1e-3, timing, nbytes, flops, list(peers), 1.0, 8)


def test_rates_are_shares_of_the_ceiling_of_their_run():
    peer = PeerResult("other", "exact", Timing(5e-6, 4e-6, 6e-6, 9), error=0.1)
    found = row(timed(4_000_000, 10**9, peer), CEILINGS)
    assert (found["tb_per_s"], found["read_share"]) == pytest.approx((2.0, 0.5))
    assert (found["tflop_per_s"], found["matmul_share"]) == pytest.approx((500, 0.5))
    assert found["bound"] == "read"
    assert found["peers"][0]["ratio"] == pytest.approx(2.5)
    assert row(timed(4_000_000, 2 * 10**9), CEILINGS)["bound"] == "matmul"
    assert row(timed(4_000_000, None), CEILINGS)["bound"] == "read"
    assert Ceilings(1, 6, 4).best(Ceilings(2, 5, 3)) == Ceilings(2, 6, 4)


def whole_document() -> dict:
    missing = PeerResult("gemlite", "exact", note="gemlite not installed")
    wrong = Result("attention", "decode-32k", "exact", "wrong", "the result: relative RMS inf, allowed 0.005", float("inf"))
    peers = [PeerResult(name, "exact", Timing(1.5e-6, 1e-6, 2e-6, 9)) for name in ("tinygemm", "cuBLAS bf16")]
    return document("auraflux bench ops", GPU, CEILINGS, [timed(4_000_000, 10, missing, *peers), wrong])


def test_the_document_is_json_with_units_in_its_names():
    found = whole_document()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    keys = "op case state note error time_us low_us high_us samples launches copies nbytes flops tb_per_s tflop_per_s"
    assert all(list(row) == [*keys.split(), "read_share", "matmul_share", "bound", "peers"] for row in found["results"])
    assert found["gpu"]["name"] == "NVIDIA H200"
    assert {"machine", "versions", "command", "commit", "read_ceiling_tb_per_s", "matmul_ceiling_tflop_per_s"} <= set(found)
    assert found["results"][1]["error"] is found["results"][1]["time_us"] is None
    assert GPU.slug == "nvidia-h200"


def test_the_table_fits_its_columns(capsys):
    show(whole_document())
    shown = capsys.readouterr().out
    assert max(len(line) for line in shown.splitlines()) <= WIDTH
    assert "WRONG" in shown
    assert "the result: relative RMS inf" in shown
    assert "tinygemm 1.5 0.75x" in shown
    assert "gemlite: gemlite not installed" in shown
    assert "slower linear 4bit: tinygemm takes 0.75 of our time" in shown


def test_no_memory_for_the_ceilings_is_said_in_one_sentence(monkeypatch):
    monkeypatch.setattr(ceilings, "memory_ceilings", lambda record, device: exhaust(None))
    with pytest.raises(DeviceMemoryError, match=r"the GPU has no 3\.2 GB left to measure"):
        ceilings.measure(Played)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled for the GPU here")
def test_the_read_ceiling_counts_bytes_and_reads_all_of_them():
    read, copy = ceilings.memory_ceilings(Played, "cpu", nbytes=MB)
    assert (read, copy) == pytest.approx((MB / 1e-3, 2 * MB / 1e-3))


def test_the_matmul_ceiling_counts_operations():
    assert matmul_ceiling(Played, "cpu", side=8) == pytest.approx(2 * 8**3 / 1e-3)


@pytest.fixture
def command(monkeypatch):
    """Run the command on toy cases as if there were a GPU."""
    monkeypatch.setattr(document_module, "this_gpu", lambda: GPU)
    monkeypatch.setattr(ceilings, "measure", lambda record: CEILINGS)
    monkeypatch.setattr(parity, "check_device", lambda device: None)

    def start(*words: str, cases: list[Case]):
        monkeypatch.setattr(gpu_run, "CASES", cases)
        monkeypatch.setattr(gpu_run, "run", partial(run, record=Played, device="cpu"))
        return CliRunner().invoke(main, ["bench", "ops", "--device", "cuda", "--seconds", "0.01", *words])

    return start


def test_the_command_prints_saves_and_fails_on_wrong_kernels(command, tmp_path):
    right, wrong = toy(lambda x: x + x), replace(toy(lambda x: 3 * x), name="other")
    done = command("--json", "--save", str(tmp_path), cases=[right, wrong])
    found = json.loads(done.stdout)
    assert [row["state"] for row in found["results"]] == ["timed", "wrong"]
    assert json.loads((tmp_path / "nvidia-h200.json").read_text())["results"] == found["results"]
    assert done.exit_code == 1
    assert done.stderr.endswith("error: kernels that differ from their reference: doubled other.\n")
    assert done.stderr.startswith("1/2 doubled tiny: timed 1000.0 µs\n")
    assert command(cases=[right]).exit_code == 0


def test_what_was_measured_before_a_stop_is_shown_and_not_saved(command, tmp_path):
    def stop(x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    done = command("--save", str(tmp_path), cases=[toy(lambda x: x + x), toy(stop)])
    assert done.exit_code == 130
    assert "tiny 1000.0" in " ".join(done.stdout.split())
    assert list(tmp_path.iterdir()) == []


def test_without_triton_the_command_says_so(command, monkeypatch):
    monkeypatch.setattr(bench_gpu, "find_spec", lambda name: None)
    done = command(cases=[toy(lambda x: x + x)])
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("error: triton is not installed, so there are no kernels for the GPU.")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_so_in_one_sentence():
    done = CliRunner().invoke(main, ["bench", "ops", "--device", "cuda", "--op", "linear"])
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("error: torch finds no NVIDIA GPU here.")
    assert done.stderr.count("\n") == 1


def test_a_kernel_is_timed_beside_what_runs_without_it(monkeypatch):
    tables = {
        "doubled": Routes(
            Route("at once", lambda x: None, lambda x: 2 * x),
            Route("by sums", lambda x: None, lambda x: x + x),
        )
    }
    monkeypatch.setattr(routes, "routes_of", lambda op, backend: tables[op.name])
    case = toy(lambda x: tables["doubled"](x))
    monkeypatch.setattr(case.op, "kernel", lambda backend: case.op._kernels["cuda"])
    (found,) = run([case], without_each, 0.01, record=Played, device="cpu")
    (other,) = found.peers
    assert (found.state, other.name, other.error) == ("timed", "without at once: by sums", 0.0)
    assert other.timing is not None
