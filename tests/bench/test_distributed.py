"""`bench ranks` on a simulated network measures that network's latency and bandwidth."""

import pytest
from click.testing import CliRunner

from auraflux.bench.distributed.ranks import bench_ranks
from auraflux.cli import main
from auraflux.distributed.comm.slow_link import LINKS, SimulatedLink
from auraflux.distributed.parallel import Parallel
from auraflux.loading.options import LoadOptions
from tests.engine.tiny import tiny


def test_message_time_is_latency_plus_transfer():
    assert SimulatedLink(1e-3, 1e6).seconds(2000) == pytest.approx(3e-3)
    assert SimulatedLink().seconds(10**9) == 0
    assert LINKS["wifi"].seconds(8192) > LINKS["1gbe"].seconds(8192) > LINKS["10gbe"].seconds(8192) > 0


@pytest.mark.slow
def test_pipeline_waits_for_the_network_once_per_rank():
    found = bench_ranks(
        tiny(),
        [Parallel("pipeline", 2, network="wifi")],
        prompt=16,
        tokens=12,
        sequences=2,
        options=LoadOptions(kv="none", calibrate="off"),
    )
    single, ranks = found
    assert (single.way, ranks.way, ranks.wire) == ("one process", "pipeline=2", "wifi")
    assert ranks.wire_s == pytest.approx(2 * LINKS["wifi"].seconds(4 * 64))
    assert ranks.best_s > ranks.wire_s
    # control messages and one row of 64 values
    assert 4 * 64 < ranks.sent_nbytes < 3 * 4096


def test_old_spellings_of_options_are_accepted(monkeypatch):
    seen = {}

    def measured(model, layouts, **sizes):
        seen.update(layouts=[(str(each), each.network) for each in layouts], sequences=sizes["sequences"])
        return []

    monkeypatch.setattr("auraflux.bench.distributed.ranks.bench_ranks", measured)
    words = ["bench", "ranks", str(tiny()), "--way", "pipeline=2", "--wire=wifi", "--texts", "2", "--json"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert seen == {"layouts": [("pipeline=2", "wifi")], "sequences": 2}
    assert done.stderr.splitlines() == [
        "note: --way is now --parallel.",
        "note: --wire is now --network.",
        "note: --texts is now --sequences.",
    ]
