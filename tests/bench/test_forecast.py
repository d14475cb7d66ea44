"""What is foretold of a divided model follows from its bytes."""

from dataclasses import replace

import pytest

from auraflux.bench.forecast import Host, Kept, Weights, parse_hosts
from auraflux.bench.forecast_ways import forecasts, slowest
from auraflux.bench.machines import Machines, addresses_in, as_measured
from auraflux.errors import SettingsError
from auraflux.run.ranks.measure import Measured, Speeds
from auraflux.run.ranks.wire import Wire, find_wire

GB = 10**9
# eight layers of 0.5 GB and 4 GB of experts, of which a token uses an eighth
MIXED = Weights([GB // 2] * 8, [4 * GB] * 8, GB, GB // 2, 1 / 8, 2048, packed=True)
SLOW = Wire(1e-3, 1e8)


def test_two_machines_hold_what_one_reads_from_disk():
    alone, pipeline, experts, _ = forecasts(MIXED, [Host(24 * GB)] * 2, SLOW)
    assert alone.bound == "disk"
    # 32 GB of experts beside 5 GB; two machines have 19.2 GB each
    assert alone.terms["disk"] == pytest.approx(4 * GB * (1 - (19.2 - 5) / 32) / 2e9)
    assert pipeline.terms["disk"] < alone.terms["disk"] / 8
    assert pipeline.terms["network"] == pytest.approx(2 * (1e-3 + 8192 / 1e8))
    assert experts.terms["network"] == pytest.approx(8 * (1e-3 + 8192 / 1e8))
    assert experts.terms["memory"] < pipeline.terms["memory"] == pytest.approx(alone.terms["memory"])
    assert pipeline.rate > alone.rate


def test_disks_read_as_much_as_each_other_unless_the_network_is_slow():
    # eight of 64 experts, none of which are held
    eight = replace(MIXED, chosen=8, dense=[GB // 100] * 8, ends=GB // 10, head=GB // 20)
    hosts = [Host(int(0.18 * GB / 0.8) + 1)] * 2
    alone, _, fast, _ = forecasts(eight, hosts, find_wire("10gbe"))
    assert fast.options == ""
    assert alone.terms["disk"] / fast.terms["disk"] == pytest.approx(2)
    slow = forecasts(eight, hosts, Wire(0.0, 1e5))[2]
    assert slow.options == "--expert-balance off"
    # one disk has 5.09 of eight on the mean
    assert alone.terms["disk"] / slow.terms["disk"] == pytest.approx(8 / 5.09375)
    assert slowest(2, 0.5, 2, even=True) == pytest.approx(0.75)
    assert slowest(8, 1.0, 3, even=True) == 3


def test_heads_and_columns_are_read_at_the_same_time():
    tensor = forecasts(MIXED, [Host(64 * GB)] * 4, SLOW)[3]
    assert tensor.reason == "a layer has 1 heads of keys"
    fast = Wire(1e-5, 4e11)
    alone, _, _, tensor, _ = forecasts(replace(MIXED, heads=8), [Host(64 * GB)] * 4, fast)
    assert tensor.way == "tensor=4"
    # all but the head, which the first has: eight layers of 0.5 GB, and an eighth of 4 GB
    assert tensor.terms["memory"] == pytest.approx((8 * GB / 4 + GB / 2) / (20 * GB))
    assert tensor.terms["network"] == pytest.approx(16 * (1e-5 + 3 * 8192 / 4e11))
    assert tensor.rate > 2.5 * alone.rate


def test_a_text_is_read_too_and_can_be_dealt_out():
    kept = tuple(Kept(GB, full, by_head=True, sums=4096) for full in [True, False] * 4)
    alone, pipeline, _, context, tensor, _ = forecasts(
        replace(MIXED, heads=8, kept=kept), [Host(80 * GB)] * 2, find_wire("20us/45GB")
    )
    plain = forecasts(replace(MIXED, heads=8), [Host(80 * GB)] * 2, find_wire("20us/45GB"))
    assert [each.way for each in plain] == ["one machine", "pipeline=2", "experts=2", "tensor=2"]
    assert alone.terms["memory"] - plain[0].terms["memory"] == pytest.approx(8 / 20)
    assert pipeline.terms["memory"] - plain[1].terms["memory"] == pytest.approx(8 / 20)
    # four of eight layers see everything
    assert context.terms["memory"] - plain[0].terms["memory"] == pytest.approx(6 / 20)
    assert context.terms["network"] == pytest.approx(4 * (20e-6 + 4096 / 45e9))
    assert tensor.terms["memory"] - plain[-1].terms["memory"] == pytest.approx(4 / 20)


def test_stages_of_a_pipeline_may_be_divided_further():
    fast, hosts = find_wire("20us/45GB"), [Host(12 * GB)] * 4
    found = {each.way: each for each in forecasts(replace(MIXED, chosen=8), hosts, fast)}
    both = found["pipeline=2,experts=2"]
    assert both.reason is None
    assert both.terms["network"] == pytest.approx(2 * (20e-6 + 8192 / 45e9) + 8 * (20e-6 + 8192 / 45e9), rel=0.5)
    assert both.terms["disk"] < found["one machine"].terms["disk"]
    kept = tuple(Kept(GB, True, by_head=True, sums=4096) for _ in range(8))
    long = {each.way: each for each in forecasts(replace(MIXED, chosen=8, kept=kept), [Host(80 * GB)] * 4, fast)}
    ways = {"pipeline=2,experts=2", "pipeline=2,context=2", "experts=4,context=4"}
    assert ways < set(long)
    # a quarter of 8 GB of keys and values in each, rather than all of it
    less = long["experts=4"].terms["memory"] - long["experts=4,context=4"].terms["memory"]
    assert less == pytest.approx(6 / 20)


def test_figures_and_what_was_measured_are_planned_alike():
    link = Wire(150e-6, 117e6)
    found = [
        Measured("10.0.0.1", 24 * GB, Speeds(20e9, None), None),
        Measured("10.0.0.2", 32 * GB, Speeds(20e9, 3e9), link),
    ]
    machines = as_measured(found)
    given = Machines(parse_hosts("24GB,32GB/3GB"), find_wire("1gbe"))
    assert (machines.hosts, machines.network) == (given.hosts, given.network)
    eight = replace(MIXED, chosen=8)
    assert forecasts(eight, machines.hosts, machines.network) == forecasts(eight, given.hosts, given.network)
    # what is given counts more than what was measured
    other = machines.taken(SLOW, 40e9)
    assert other.network == SLOW
    assert [host.memory_rate for host in other.hosts] == [40e9] * 2
    assert machines.taken(None, None) == machines


def test_slower_memory_takes_longer_where_it_is():
    hosts = [Host(64 * GB), Host(64 * GB, memory_rate=10e9)]
    alike, uneven = forecasts(MIXED, hosts[:1] * 2, SLOW), forecasts(MIXED, hosts, SLOW)
    assert uneven[0] == alike[0]
    assert 1 < uneven[1].terms["memory"] / alike[1].terms["memory"] < 2
    # a layer is done when all have done their share of it
    assert uneven[2].terms["memory"] == pytest.approx(2 * alike[2].terms["memory"])


def test_machines_are_named_or_described():
    assert addresses_in("16GB,32GB/3GB") == ()
    assert addresses_in("10.0.0.1:29400, 10.0.0.2") == ("10.0.0.1:29400", "10.0.0.2")
    assert addresses_in("laptop, tower.local:5") == ("laptop", "tower.local:5")
    assert addresses_in("laptop") == addresses_in("laptop,16GB") == (), "which are refused with the figures"
    with pytest.raises(SettingsError, match="'16GB' is no address, as others of --hosts are"):
        addresses_in("10.0.0.1,16GB")
    with pytest.raises(SettingsError, match=r"10\.0\.0\.1 is one machine"):
        addresses_in("10.0.0.1")


def test_what_cannot_be_is_said():
    small = forecasts(MIXED, [Host(4 * GB)] * 2, SLOW)
    assert small[0].reason is not None
    assert "5.0 GB that every token reads" in small[0].reason
    loose = Weights(*[getattr(MIXED, name) for name in ("dense", "experts", "ends", "head", "active", "hidden")], packed=False)
    assert "not packed" in str(forecasts(loose, [Host(24 * GB)], SLOW)[0].reason)


def test_machines_as_users_write_them():
    assert parse_hosts("16GB, 32GB/3GB") == [Host(16 * GB), Host(32 * GB, 3e9)]
    with pytest.raises(SettingsError, match="no machine"):
        parse_hosts("0GB")
    with pytest.raises(SettingsError, match="not a size"):
        parse_hosts("much")
    with pytest.raises(SettingsError, match="there is no wire"):
        find_wire("string")
    assert find_wire("20us/45GB") == Wire(20e-6, 45e9)
    for text in ("20us/", "us/45GB", "20us/0GB", "-1us/1GB"):
        with pytest.raises(SettingsError):
            find_wire(text)
