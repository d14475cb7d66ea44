"""`auraflux bench serve`: output, files and refusals."""

import json
import sys
from multiprocessing import Pipe
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from auraflux.bench.load import server
from auraflux.bench.load.plot import check_plot, draw
from auraflux.cli import main
from auraflux.cli.bench import serve as bench_serve
from auraflux.cli.bench.serve_table import arriving, at_once, notes
from auraflux.cli.options.served_model import open_model_process
from auraflux.errors import BackendError, SettingsError
from tests.bench.load_stub import Stub, running

STUB = Path(__file__).parents[1] / "bench" / "load_stub.py"
SMALL = ["--prompt-tokens", "6", "--tokens", "4", "--requests", "4", "--warmup", "0"]
ROW = {
    "mode": "closed",
    "clients": 8,
    "rate": None,
    "full_load_s": None,
    "decode_tokens_per_s": 1234.5,
    "decode_tokens_per_s_by_difference": 99.94,
    "all_writing_s": 1.0,
    "prompt_tokens_per_s": 40_000.0,
    "time_to_first_token_all_at_once_ms": {"p50": 10.0, "p90": 20.0, "p99": 1030.4},
    "inter_token_ms": None,
    "requests_per_s": 3.456,
    "output_tokens_per_s": 442.0,
    "time_to_first_token_ms": {"p50": 10.0, "p90": 20.0, "p99": 30.0},
    "inter_token_while_prompts_arrive_ms": {"p50": 2.0, "p90": 3.0, "p99": 4.0},
    "inter_token_p99_over_p50": 2.0,
    "end_to_end_ms": {"p50": 1000.0, "p90": 2000.0, "p99": 3000.0},
    "requests": 24,
    "failed": 3,
    "failures": {"gone": 2, "HTTP 500": 1},
    "refused": 5,
    "short": 1,
    "tokens_per_event": 2.5,
    "found_share": None,
}


def call(*words: object) -> Result:
    return CliRunner().invoke(main, ["bench", "serve", *(str(word) for word in words)])


def test_json_that_is_also_saved_and_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["auraflux", "bench", "serve", "--api-key", "secret"])
    with running(Stub("error")) as url:
        words = ["--url", url, "--clients", "2,1", "--rate", "100", "--seed", "5", "--api-key", "secret", *SMALL]
        done = call(*words, "--json", "--save", tmp_path, "--plot", tmp_path / "load.png")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["model"], found["url"], found["prompt_tokens"], found["tokens"], found["seed"]) == ("stub", url, 6, 4, 5)
    assert [(row["mode"], row["clients"], row["rate"]) for row in found["results"]] == [
        ("closed", 1, None),
        ("closed", 2, None),
        ("poisson", None, 100.0),
    ]
    # one for one token that failed, one for all tokens, then four
    assert [(row["requests"], row["failed"]) for row in found["results"]] == [(6, 1), (6, 0), (4, 0)]
    assert found["results"][0]["failures"] == {"error in the stream: out of pages": 1}
    assert found["command"] == "auraflux bench serve --api-key KEY"
    assert "secret" not in done.stdout
    (saved,) = tmp_path.glob("serve-*.json")
    assert json.loads(saved.read_text()) == found
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")


def test_it_starts_a_server(monkeypatch):
    monkeypatch.setattr(server, "COMMAND", [sys.executable, str(STUB)])
    done = call("--random", "--shape", "llama-8b", "--layers", "2", "--clients", "1", *SMALL)
    assert done.exit_code == 0, done.output
    for words in ("llama-8b, random weights at", "prompts of 6 tokens; 4 output tokens", "all start at once", "50%"):
        assert words in done.stdout


def test_no_answer_at_all_is_a_failure():
    with running(Stub(*["server_error"] * 20)) as url:
        done = call("--url", url, "--clients", "1", *SMALL)
    assert done.exit_code == 1
    assert done.stderr.endswith("error: no request was answered: HTTP 500: of our making.\n")


def test_tables():
    assert at_once(ROW) == ["8", "40,000", "1,234", "99.9", "10 / 20 / 1,030", "-"]
    waits = ["10 / 20 / 30", "2.0 / 3.0 / 4.0", "2.00", "1.00 / 2.00 / 3.00"]
    assert arriving(ROW) == ["8", "3.46", "442", *waits, "-", "[bold red]3[/bold red]"]
    assert arriving({**ROW, "mode": "poisson", "rate": 2.5, "failed": 0})[::8] == ["2.5/s", "0"]
    assert notes({"results": [ROW], "tokens": 128}) == [
        "failed at 8 clients, 2 times: gone",
        "failed at 8 clients, 1 times: HTTP 500",
        "uneven at 8 clients: some clients ended before all had started; give more --requests",
        "busy at 8 clients: requests were refused 5 times and sent again",
        "short at 8 clients: 1 answers have fewer than 128 tokens",
        "merged at 8 clients: an event holds 2.5 tokens, which have no times of their own",
    ]
    full = {**ROW, "full_load_s": 1.5, "failures": {}, "refused": 0, "short": 0, "tokens_per_event": 1.0}
    assert notes({"results": [full], "tokens": 128}) == []


def test_a_picture_of_levels_without_figures(tmp_path):
    nothing = {name: value if name in ("mode", "clients", "rate") else None for name, value in ROW.items()}
    found = {"model": "m", "prompt_tokens": 1, "tokens": 2, "shared_tokens": 1, "results": [nothing, {**ROW, "clients": 1}]}
    draw(found, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
    found["results"] = [nothing]
    draw(found, tmp_path / "b.png")
    assert (tmp_path / "b.png").stat().st_size > 1000


def test_a_picture_needs_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BackendError, match=r"--plot needs matplotlib. Install it with: pip install matplotlib"):
        check_plot(Path("a.png"))


def test_options_are_passed_to_the_server(monkeypatch):
    seen = []

    def refuse(words: object, *others: object) -> None:
        seen.append(words)
        raise BackendError("enough.")

    monkeypatch.setattr(bench_serve, "_measure", refuse)
    call(
        "a/model",
        "--kv",
        "k8v8",
        "--no-graph",
        "--exact",
        "--context",
        4096,
        "--clients",
        "4,64",
        "--server-options",
        "--x 'a b'",
    )
    call("--random", "--shape", "llama-8b", "--layers", 2, "--device", "cpu", "--max-sequences", 3)
    call("--device", "cuda")
    assert seen == [
        ["a/model", "--kv", "k8v8", "--context", "4096", "--no-graph", "--exact", "--max-sequences", "64", "--x", "a b"],
        ["--random", "--shape", "llama-8b", "--layers", "2", "--device", "cpu", "--max-sequences", "3"],
        ["--device", "cuda", "--max-sequences", "128"],
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--clients", "1,many"], "--clients '1,many' is not a list of whole numbers above 0 and up to 4096, such as 1,8,32."),
        (["--clients", "0"], "--clients '0' is not a list of whole numbers"),
        (["--clients", ","], "--clients ',' is not a list of whole numbers"),
        (["--rate", "nan"], "--rate 'nan' is not a list of numbers above 0"),
        (["--shared", "2000"], "--shared 2000 is more than --prompt-tokens 1024."),
        (["--shape", "llama-8b"], "random weights need --random and --shape NAME, and no MODEL."),
        (["--random", "--shape", "llama-8b", "model"], "random weights need --random and --shape NAME, and no MODEL."),
        (["--random", "--shape", "gpt-9"], "there is no shape 'gpt-9'. Those there are:"),
        (["--url", "http://127.0.0.1:1", "--device", "cpu"], "a server that runs already, which cannot be given --device."),
        (["--url", "http://127.0.0.1:1", "--random"], "a server that runs already, which cannot be given --random."),
        (["--url", "127.0.0.1:8000"], "'127.0.0.1:8000' is not the address of a server."),
        (["--url", "http://127.0.0.1:1"], "no server answers at http://127.0.0.1:1: connection refused."),
        (["--server-options", "'"], "--server-options cannot be split into words: No closing quotation."),
        (["--plot", "a.pdf"], "--plot writes PNG files, and a.pdf does not end with .png."),
        (["--plot", "nowhere/a.png"], "cannot save to nowhere/a.png: there is no folder nowhere."),
        (["--save", "nowhere/a.json"], "cannot save to nowhere/a.json: there is no folder nowhere."),
    ],
)
def test_refusals_are_one_sentence(words, message):
    done = call(*words)
    assert done.exit_code == 1
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_every_level_is_measured_once():
    assert bench_serve.parse_numbers("8, 1 8", "--clients", int, 100) == [1, 8]


def test_random_weights_refuse_a_prefix_cache_on_disk():
    chosen = {"max_sequences": 1, "device": "cpu", "invented": True, "shape": "llama-8b", "layers": 1, "context": 64}
    with pytest.raises(SettingsError, match="--prefix-disk needs a model"):
        open_model_process(None, Pipe()[0], chosen | {"prefix_disk": "1GB"})
