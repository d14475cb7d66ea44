"""`auraflux bench model`: options that do not apply are refused."""

import pytest
from click.testing import CliRunner

from auraflux.cli import main


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--expert-memory", "1GB"], "need a GPU"),
        (["--gpu-memory", "8GB"], "need a GPU"),
        (["--expert-io", "direct"], "are not packed"),
    ],
)
def test_bench_of_random_weights_refuses_what_it_would_ignore(options: list[str], message: str):
    shape = ["--random", "--shape", "qwen3-30b-a3b", "--layers", "1", "--device", "cpu"]
    done = CliRunner().invoke(main, ["bench", "model", *shape, *options])
    assert done.exit_code == 1
    assert message in done.stderr


def test_routing_needs_random_weights():
    done = CliRunner().invoke(main, ["bench", "model", "--routing", "zipf"])
    assert done.exit_code == 1
    assert "--routing needs --random" in done.stderr
