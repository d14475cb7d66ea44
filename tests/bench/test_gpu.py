"""The GPU benchmark with a fake GPU: counting, comparison with references, refusals, table and document."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

pytest.importorskip("triton")

from auraflux.bench import parity
from auraflux.bench.gpu import graph_timing, peaks
from auraflux.bench.gpu import report as report_module
from auraflux.bench.gpu import run as gpu_run
from auraflux.bench.gpu.graph_timing import Contender, race, record_long, times_over
from auraflux.bench.gpu.peaks import Peaks, matmul_peak
from auraflux.bench.gpu.peers import PEERS, Peer
from auraflux.bench.gpu.report import Gpu, document, row
from auraflux.bench.gpu.routes import without_each
from auraflux.bench.gpu.run import ROTATED_NBYTES, copies_needed, libraries, no_peers, run
from auraflux.bench.peers.peer import each
from auraflux.bench.result import PeerResult, Result
from auraflux.bench.timing import Timing
from auraflux.cli import main
from auraflux.cli.bench import gpu as bench_gpu
from auraflux.cli.bench.gpu import WIDTH, show
from auraflux.errors import DeviceMemoryError
from auraflux.ops import routes
from auraflux.ops._cases import Case
from auraflux.ops._dispatch import Declined, Op
from auraflux.ops.routes import Route, Routes

MB = 1 << 20
PEAKS = Peaks(read=4e12, copy=3.9e12, matmul=1e15)
GPU = Gpu("NVIDIA H200", "9.0", 132, 150 << 30, 60 * MB, "13.0")


class FakeRecording:
    """A fake CUDA graph that runs calls at once and reports a millisecond and two launches per call."""

    call_s = 1e-3

    def __init__(self, calls):
        for call in calls:
            call()
        self.calls, self.launches = len(calls), 2 * len(calls)

    def replay(self, times):
        return [self.call_s * self.calls] * times


def doubled(x: Tensor) -> Tensor:
    """Return twice x."""
    return 2 * x


doubled.__module__ = "toy.reference"


def toy(kernel, size: int = 100, **fields) -> Case:
    op = Op(doubled, (), None)
    op._kernels["cuda"] = kernel
    return Case(op, "tiny", lambda: {"x": torch.ones(size)}, **fields)


def run_case(case: Case, peers=(), monkeypatch=None, record=FakeRecording) -> Result:
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
def test_copies_exceed_the_cache(nbytes, free, copies):
    assert copies_needed(nbytes, free) == copies
    assert copies * nbytes >= ROTATED_NBYTES or nbytes < MB or free < 1 << 40


def test_short_calls_are_captured_repeatedly():
    assert times_over(1, 10e-6) == 100
    assert times_over(8, 100e-6) == 10
    assert times_over(256, 1e-6) == 4
    assert times_over(1, 2.0) == 1


def test_graph_length_adapts_to_call_duration():
    class Quick(FakeRecording):
        call_s = 3e-6

    assert record_long([lambda: None] * 2, Quick).calls == 2 * 167
    assert record_long([lambda: None] * 2, FakeRecording).calls == 2


def test_comparison_reports_medians_per_call(monkeypatch):
    class Uneven(FakeRecording):
        def replay(self, times):
            return [(1 + n % 3) * 1e-6 * self.calls for n in range(times)]

    contender = Contender(Uneven([lambda: None] * 4))
    (timing,) = race([contender], 1e-3)
    assert timing.median_s == pytest.approx(2e-6)
    assert (timing.low_s, timing.high_s) == pytest.approx((1e-6, 3e-6))
    assert timing.samples <= graph_timing.ROUNDS * graph_timing.MAX_SAMPLES
    assert contender.launches == 2


def test_correct_kernel_is_timed(monkeypatch):
    found = run_case(toy(lambda x: x + x, flops=lambda args: 100))
    assert (found.state, found.error, found.nbytes, found.flops) == ("timed", 0.0, 800, 100)
    assert found.timing.median_s == pytest.approx(1e-3)
    assert (found.launches, found.copies) == (2, 1)


def test_large_arguments_are_rotated_through_copies():
    seen = set()

    def kernel(x: Tensor) -> Tensor:
        seen.add(x.data_ptr())
        return x + x

    found = run_case(toy(kernel, size=64 << 18))
    # one more was compared with the reference
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
def test_incorrect_kernel_is_not_timed(kernel, note):
    found = run_case(toy(kernel))
    assert (found.state, found.timing, found.note) == ("wrong", None, note)


def refuse(x):
    raise Declined("not today")


def exhaust(x):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")


def test_untimed_cases_have_a_reason():
    assert (run_case(toy(refuse)).state, run_case(toy(refuse)).note) == ("declined", "not today")
    assert run_case(toy(None)).note == "no cuda kernel"
    assert (run_case(toy(exhaust)).state, run_case(toy(exhaust)).note) == (
        "no memory",
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB.",
    )

    def fail(calls):
        raise RuntimeError("operation not permitted when stream is capturing")

    found = run_case(toy(lambda x: x + x), record=fail)
    assert found.state == "failed"
    assert found.note.startswith("cannot be recorded: RuntimeError: operation not permitted")


def test_peers_are_timed_or_have_a_reason(monkeypatch):
    def peer(name, call, **fields):
        return Peer(name, each(lambda args: lambda: call(args["x"])), **fields)

    peers = [peer("torch", lambda x: x * 2.1), peer("absent", doubled, packages=("no_such_package",)), peer("broken", exhaust)]
    found = run_case(toy(lambda x: x + x), peers, monkeypatch)
    torch_, absent, broken = found.peers
    assert torch_.error == pytest.approx(0.05, abs=1e-6)
    assert torch_.timing.median_s == pytest.approx(1e-3)
    assert (absent.timing, absent.note) == (None, "no_such_package not installed")
    assert (broken.timing, broken.note.partition(":")[0]) == (None, "OutOfMemoryError")


def timed(nbytes: int, flops: int | None, *peers: PeerResult) -> Result:
    timing = Timing(2e-6, 1e-6, 3e-6, 10)
    return Result("linear", "4bit", "exact", "timed", None, 1e-3, timing, nbytes, flops, list(peers), 1.0, 8)


def test_rates_are_relative_to_measured_peaks():
    peer = PeerResult("other", "exact", Timing(5e-6, 4e-6, 6e-6, 9), error=0.1)
    found = row(timed(4_000_000, 10**9, peer), PEAKS)
    assert (found["tb_per_s"], found["read_share"]) == pytest.approx((2.0, 0.5))
    assert (found["tflop_per_s"], found["matmul_share"]) == pytest.approx((500, 0.5))
    assert found["bound"] == "read"
    assert found["peers"][0]["ratio"] == pytest.approx(2.5)
    assert row(timed(4_000_000, 2 * 10**9), PEAKS)["bound"] == "matmul"
    assert row(timed(4_000_000, None), PEAKS)["bound"] == "read"
    assert Peaks(1, 6, 4).best(Peaks(2, 5, 3)) == Peaks(2, 6, 4)


def complete_document() -> dict:
    missing = PeerResult("gemlite", "exact", note="gemlite not installed")
    wrong = Result("attention", "decode-32k", "exact", "wrong", "the result: relative RMS inf, allowed 0.005", float("inf"))
    peers = [PeerResult(name, "exact", Timing(1.5e-6, 1e-6, 2e-6, 9)) for name in ("tinygemm", "cuBLAS bf16")]
    return document("auraflux bench ops", GPU, PEAKS, [timed(4_000_000, 10, missing, *peers), wrong])


def test_document_is_json_with_units_in_its_keys():
    found = complete_document()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    keys = "op case state note error time_us low_us high_us samples launches copies nbytes flops tb_per_s tflop_per_s"
    assert all(list(row) == [*keys.split(), "read_share", "matmul_share", "bound", "peers"] for row in found["results"])
    assert found["gpu"]["name"] == "NVIDIA H200"
    assert {"machine", "versions", "command", "commit", "read_ceiling_tb_per_s", "matmul_ceiling_tflop_per_s"} <= set(found)
    assert found["results"][1]["error"] is found["results"][1]["time_us"] is None
    assert GPU.slug == "nvidia-h200"
    assert replace(GPU, passes_for="8.9").slug == "nvidia-h200-as-8.9"


def test_a_table_of_a_gpu_that_passes_for_another_says_so(capsys):
    found = complete_document()
    found["gpu"]["passes_for"] = "8.9"
    show(found)
    assert "compute capability 8.9: no such GPU was measured" in capsys.readouterr().out


def test_passing_for_another_gpu_needs_a_gpu():
    result = CliRunner().invoke(main, ["bench", "ops", "--as", "8.9"])
    assert result.exit_code == 1
    assert "--as is for --device cuda" in result.output


def test_table_is_aligned(capsys):
    show(complete_document())
    shown = capsys.readouterr().out
    assert max(len(line) for line in shown.splitlines()) <= WIDTH
    assert "WRONG" in shown
    assert "the result: relative RMS inf" in shown
    assert "tinygemm 1.5 0.75x" in shown
    assert "gemlite: gemlite not installed" in shown
    assert "slower linear 4bit: tinygemm takes 0.75 of our time" in shown


def test_out_of_memory_for_peaks_is_a_one_sentence_error(monkeypatch):
    monkeypatch.setattr(peaks, "memory_peaks", lambda record, device: exhaust(None))
    with pytest.raises(DeviceMemoryError, match=r"the GPU has no 3\.2 GB left to measure"):
        peaks.measure(FakeRecording)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled for the GPU here")
def test_peak_read_bandwidth_reads_every_byte():
    read, copy = peaks.memory_peaks(FakeRecording, "cpu", nbytes=MB)
    assert (read, copy) == pytest.approx((MB / 1e-3, 2 * MB / 1e-3))


def test_peak_matmul_counts_operations():
    assert matmul_peak(FakeRecording, "cpu", side=8) == pytest.approx(2 * 8**3 / 1e-3)


@pytest.fixture
def command(monkeypatch):
    """Run the command on toy cases with a fake GPU."""
    monkeypatch.setattr(report_module, "this_gpu", lambda: GPU)
    monkeypatch.setattr(peaks, "measure", lambda record: PEAKS)
    monkeypatch.setattr(parity, "check_device", lambda device: None)

    def start(*words: str, cases: list[Case]):
        monkeypatch.setattr(gpu_run, "CASES", cases)
        monkeypatch.setattr(gpu_run, "run", partial(run, record=FakeRecording, device="cpu"))
        return CliRunner().invoke(main, ["bench", "ops", "--device", "cuda", "--seconds", "0.01", *words])

    return start


def test_command_prints_saves_and_fails_on_incorrect_kernels(command, tmp_path):
    right, wrong = toy(lambda x: x + x), replace(toy(lambda x: 3 * x), name="other")
    done = command("--json", "--save", str(tmp_path), cases=[right, wrong])
    found = json.loads(done.stdout)
    assert [row["state"] for row in found["results"]] == ["timed", "wrong"]
    assert json.loads((tmp_path / "nvidia-h200.json").read_text())["results"] == found["results"]
    assert done.exit_code == 1
    assert done.stderr.endswith("error: kernels that differ from their reference: doubled other.\n")
    assert done.stderr.startswith("1/2 doubled tiny: timed 1000.0 µs\n")
    assert command(cases=[right]).exit_code == 0


def test_interrupted_run_prints_but_does_not_save(command, tmp_path):
    def stop(x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    done = command("--save", str(tmp_path), cases=[toy(lambda x: x + x), toy(stop)])
    assert done.exit_code == 130
    assert "tiny 1000.0" in " ".join(done.stdout.split())
    assert list(tmp_path.iterdir()) == []


def test_missing_triton_is_an_error(command, monkeypatch):
    monkeypatch.setattr(bench_gpu, "find_spec", lambda name: None)
    done = command(cases=[toy(lambda x: x + x)])
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("error: triton is not installed, so there are no kernels for the GPU.")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_is_a_one_sentence_error():
    done = CliRunner().invoke(main, ["bench", "ops", "--device", "cuda", "--op", "linear"])
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("error: torch finds no NVIDIA GPU here.")
    assert done.stderr.count("\n") == 1


def test_a_kernel_is_timed_with_its_alternative(monkeypatch):
    tables = {
        "doubled": Routes(
            Route("at once", lambda x: None, lambda x: 2 * x),
            Route("by sums", lambda x: None, lambda x: x + x),
        )
    }
    monkeypatch.setattr(routes, "routes_of", lambda op, backend: tables[op.name])
    case = toy(lambda x: tables["doubled"](x))
    monkeypatch.setattr(case.op, "kernel", lambda backend: case.op._kernels["cuda"])
    (found,) = run([case], without_each, 0.01, record=FakeRecording, device="cpu")
    (other,) = found.peers
    assert (found.state, other.name, other.error) == ("timed", "without at once: by sums", 0.0)
    assert other.timing is not None
