"""Random command lines: every command with its options, taken from click, so that new ones are covered.

Functions that run long, start processes or listen are stubbed; reaching one counts as accepted.
"""

import os
import random
from collections.abc import Iterator
from contextlib import ExitStack, chdir
from functools import cache
from typing import Any
from unittest.mock import patch

import click
from click.testing import CliRunner

from auraflux.cli import main, serve_ray
from auraflux.errors import AurafluxError, InputError
from tests.engine.tiny import tiny
from tests.fuzz.corpus import SCRATCH, packed_model
from tests.fuzz.harness import Target
from tests.fuzz.mutate import ODD, text

LONGEST = 2000  # characters on stderr
INTEGERS = ["0", "1", "2", "-1", "64", "99", "1000000000000", str(10**30), "x", "1.5", ""]
REAL = ["0", "0.5", "1", "-1", "1e300", "-1e300", "nan", "inf", "x", ""]
STRINGS = sorted({each for each in ODD if isinstance(each, str) and "\0" not in each})
PATHS = ["there", "not/there", "/dev/null/x", "/proc/x", "", "x" * 300, "a\nb", "\udc80"]
SIZES = ["1GB", "1MB", "0", "-1GB", "9" * 40 + "GB", "1.5GB", "nanGB", "infGB", "GB", "", "1 GB", "²GB"]
DIVIDED = [
    "pipeline=2",
    "experts=2",
    "context=2",
    "tensor=2",
    "context=0",
    "context=9999",
    "pipeline=²",
    "=2",
    "pipeline=",
    "x=1",
    "8",
    "²",
]
LISTS = ["none", "1,8", "0", "-1", "1,,2", ",", "1e9", "x", "", "1000000000000"]
SHAPES = ["llama-8b", "qwen3-30b-a3b", "x", ""]
# values for options whose type alone says too little
VALUES = {
    "--kv": ["k8v4", "none", "auto", "k4v2", "k9v9", "k8", "none,k8v4", "k4v4+newest=128", "k4v4+x=1", "+", ""],
    "--parallel": DIVIDED,
    "--way": DIVIDED,
    "--hosts": [
        "1GB,1GB",
        "127.0.0.1,127.0.0.1",
        "127.0.0.1,1GB",
        "16GB,32GB/3GB",
        "/",
        "1GB/",
        "a,b",
        "127.0.0.1,127.0.0.1:99999",
        ",",
        "",
        "[::1",
        *SIZES,
    ],
    "--network": ["here", "10gbe", "1gbe", "wifi", "x", ""],
    "--replicas": ["1", "1-4", "4-1", "0", "²", "1-", "99999", ""],
    "--device": ["cpu", "auto", "cuda", "cpu:1", "tpu", ""],
    "--shape": SHAPES,
    "--explain": ["linear", "model", "nothing", "all", "*", "llama-8b"],
    "--a": ["", "--kv none", "--prefill-chunk 0", "--prefill-chunk 2", "'", "--x", "--speculate ngram", "model"],
    "--b": ["--exact", "--kv k9v9", "--prefill-chunk 1", '"', "--context 1"],
    "--calibrate": ["off", "auto", *PATHS],
    "--speculate": ["ngram", "x", "", "not/there"],
    "--host": ["127.0.0.1", "localhost", "::1", "0.0.0.0", "x" * 300, "é" * 99, "a b", "", "256.1.1.1", "\udc80"],
    "--url": ["http://127.0.0.1:1", "x", "http://", "http://[", "ftp://a", "http://a:99999", ""],
    **dict.fromkeys(("--clients", "--rate", "--copy", "--needle", "--tools", "--speed"), LISTS),
    **dict.fromkeys(("--expert-memory", "--expert-host-memory", "--cache-memory", "--prefix-disk"), SIZES),
    **dict.fromkeys(("--disk", "--memory-bandwidth", "--budget"), SIZES),
}
# options that make a command end soon
QUICK = {
    "generate": ("-p", "a", "-n", "1", "--context", "64"),
    "chat": ("-n", "1", "--context", "64"),
    "convert": ("there/dst", "--group-size", "32"),
    "pack": ("there/dst", "--group-size", "32"),
    "plan": ("--hosts", "1GB,1GB", "--memory-bandwidth", "10GB"),
    "diff": ("-p", "a b", "--a", "--context 64", "--b", "--context 64 --kv none"),
    "serve": ("--port", "0", "--context", "64"),
    "bench model": ("--at", "8", "--context", "64"),
}
MODELLESS = {"doctor", "ops", "bench ops", "bench stream"}
STUBBED = [
    *("auraflux.cli.serve._run", "auraflux.cli.ops._check", "auraflux.cli.bench.run_cases", "auraflux.cli.bench.gpu.bench_gpu"),
    *("auraflux.cli.bench.serve._measure", "auraflux.cli.bench.stream._build", "auraflux.cli.bench.stream._measure"),
    *("auraflux.bench.distributed.ranks.bench_ranks", "auraflux.bench.model.measure", "auraflux.bench.speculation.measure"),
    *("auraflux.bench.random_weights.random_language", "auraflux.ops.simd.peak_bandwidth.peak_read_bandwidth"),
    *("auraflux.distributed.follower.follow", "auraflux.distributed.leader.Leader.__init__", "auraflux.eval.run.Evaluation"),
    *("auraflux.weights.download.pull._download", "auraflux.weights.download.pull.from_hub", "auraflux.cli.doctor._compile"),
]


ACCEPTED = AurafluxError("accepted.")


def accept(*args: Any, **options: Any) -> Any:
    """Stop at a stubbed function: the arguments were accepted."""
    raise ACCEPTED


def accept_replicas(model: Any, host: str, port: int, replicas: str, settings: Any, chosen: Any) -> None:
    serve_ray._counts(replicas)
    accept()


@cache
def commands() -> dict[str, click.Command]:
    """Map the full names of all leaf commands to the commands."""

    def below(group: click.Group, args: tuple[str, ...]) -> Iterator[tuple[str, click.Command]]:
        for name, command in group.commands.items():
            if isinstance(command, click.Group):
                yield from below(command, (*args, name))
            else:
                yield " ".join((*args, name)), command

    return dict(below(main, ()))


def value(rng: random.Random, option: click.Parameter) -> str:
    """Return a random value for an option."""
    kind, name = option.type, max(option.opts, key=len)
    if isinstance(kind, click.Choice):
        return rng.choice([*map(str, kind.choices), "x", ""])
    if isinstance(kind, click.types.IntParamType):
        return rng.choice(INTEGERS)
    if isinstance(kind, click.types.FloatParamType):
        return rng.choice(REAL)
    known = VALUES.get(name) or (PATHS if isinstance(kind, click.Path) else STRINGS)
    found = rng.choice(known)
    # a mutated path could point anywhere
    return text(rng, found) if rng.random() < 0.1 and known is not PATHS else found


def arguments_of(rng: random.Random, name: str) -> list[str]:
    """Return a command line: the options that make it quick, and a few random ones."""
    command = commands()[name]
    model = [] if name in MODELLESS else [str(packed_model() if rng.random() < 0.3 else tiny())]
    if rng.random() < 0.1:
        model = [rng.choice(["", "x" * 300, "not/there", "a\nb", "nobody/nothing", "~nosuchuser/x", "/dev/null", "\udc80"])]
    found = [*name.split(), *(["127.0.0.1:1"] if name == "follow" else []), *model, *QUICK.get(name, ())]
    options = [each for each in command.params if isinstance(each, click.Option)]
    for option in rng.sample(options, min(len(options), rng.randint(1, 3))):
        found.append(rng.choice([*option.opts, *option.secondary_opts]))
        if not option.is_flag:
            found += [value(rng, option) for _ in range(option.nargs)]
    return found[: rng.randrange(len(found))] if rng.random() < 0.05 else found


def command(rng: random.Random) -> None:
    """Run a command line, which must exit with 0, or with 1 or 2 and a one-sentence error."""
    args = arguments_of(rng, rng.choice(sorted(commands())))
    home = SCRATCH / "commands"
    (home / "there").mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.enter_context(chdir(home))
        stack.enter_context(patch.dict(os.environ, {"AURAFLUX_HOME": str(home / "home")}))
        stack.enter_context(patch("auraflux.cli.serve.run_replicas", accept_replicas))
        for function in STUBBED:
            stack.enter_context(patch(function, accept))
        done = CliRunner().invoke(main, args, input="hi\n")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise RuntimeError(f"{args}: {type(done.exception).__name__}: {done.exception}") from done.exception
    assert done.exit_code in (0, 1, 2), f"{args}: {done.exit_code}"
    assert done.exit_code == 0 or len(done.stderr) < LONGEST, f"{args}: {done.stderr[:300]}"
    assert done.exit_code != 1 or done.stderr.splitlines()[-1].startswith("error: "), f"{args}: {done.stderr[-300:]}"
    if done.exit_code and str(ACCEPTED) not in done.stderr:
        raise InputError(done.stderr.splitlines()[-1])


# kernels are compiled when they are first used
TARGETS = [Target("command", command, 30, 120.0)]
