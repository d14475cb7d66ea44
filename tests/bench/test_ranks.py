"""What `bench ranks` finds of a pretended network is what that network takes."""

import pytest

from auraflux.bench.ranks import bench_ranks
from auraflux.run.ranks.parallel import Parallel
from auraflux.run.ranks.wire import WIRES, Wire
from tests.run.tiny import tiny


def test_a_message_takes_its_latency_and_its_bytes():
    assert Wire(1e-3, 1e6).seconds(2000) == pytest.approx(3e-3)
    assert Wire().seconds(10**9) == 0
    assert WIRES["wifi"].seconds(8192) > WIRES["1gbe"].seconds(8192) > WIRES["10gbe"].seconds(8192) > 0


@pytest.mark.slow
def test_a_slow_network_is_waited_for_once_a_rank():
    found = bench_ranks(
        tiny(), [Parallel("pipeline", 2, wire="wifi")], prompt=16, tokens=12, texts=2, kv="none", calibrate="off"
    )
    alone, ranks = found
    assert (alone.way, ranks.way, ranks.wire) == ("one process", "pipeline=2", "wifi")
    assert ranks.wire_s == pytest.approx(2 * WIRES["wifi"].seconds(4 * 64))
    assert ranks.best_s > ranks.wire_s
    # notes and one row of 64 numbers
    assert 4 * 64 < ranks.sent_nbytes < 3 * 4096
