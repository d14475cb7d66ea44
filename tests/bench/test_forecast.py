"""Forecasts of parallel layouts follow from a model's bytes."""

from dataclasses import replace

import pytest

from auraflux.bench.distributed.forecast import Host, LayerKV, Weights, parse_hosts
from auraflux.bench.distributed.hosts import Machines, addresses_in, as_measured
from auraflux.bench.distributed.layouts import forecasts, slowest_disk_reads
from auraflux.distributed.comm.slow_link import SimulatedLink, find_link
from auraflux.distributed.measure import HostSpeeds, RankMeasurement
from auraflux.errors import SettingsError

GB = 10**9
# eight layers of 0.5 GB and 4 GB of experts, of which a token uses an eighth
MIXED = Weights([GB // 2] * 8, [4 * GB] * 8, GB, GB // 2, 1 / 8, 2048, packed=True)
SLOW = SimulatedLink(1e-3, 1e8)


def test_two_hosts_hold_experts_that_one_reads_from_disk():
    single, pipeline, experts, _ = forecasts(MIXED, [Host(24 * GB)] * 2, SLOW)
    assert single.bound == "disk"
    # 32 GB of experts and 5 GB of other weights; two machines have 19.2 GB each
    assert single.terms["disk"] == pytest.approx(4 * GB * (1 - (19.2 - 5) / 32) / 2e9)
    assert pipeline.terms["disk"] < single.terms["disk"] / 8
    assert pipeline.terms["network"] == pytest.approx(2 * (1e-3 + 8192 / 1e8))
    assert experts.terms["network"] == pytest.approx(8 * (1e-3 + 8192 / 1e8))
    assert experts.terms["memory"] < pipeline.terms["memory"] == pytest.approx(single.terms["memory"])
    assert pipeline.rate > single.rate


def test_expert_reads_are_balanced_unless_the_network_is_slow():
    # eight of 64 experts, none of them cached
    eight = replace(MIXED, chosen=8, dense=[GB // 100] * 8, ends=GB // 10, head=GB // 20)
    hosts = [Host(int(0.18 * GB / 0.8) + 1)] * 2
    single, _, fast, _ = forecasts(eight, hosts, find_link("10gbe"))
    assert fast.options == ""
    assert single.terms["disk"] / fast.terms["disk"] == pytest.approx(2)
    slow = forecasts(eight, hosts, SimulatedLink(0.0, 1e5))[2]
    assert slow.options == "--expert-balance off"
    # on average the busier disk has 5.09 of eight
    assert single.terms["disk"] / slow.terms["disk"] == pytest.approx(8 / 5.09375)
    assert slowest_disk_reads(2, 0.5, 2, even=True) == pytest.approx(0.75)
    assert slowest_disk_reads(8, 1.0, 3, even=True) == 3


def test_tensor_parallel_divides_memory_time():
    tensor = forecasts(MIXED, [Host(64 * GB)] * 4, SLOW)[3]
    assert tensor.reason == "a layer has 1 heads of keys"
    fast = SimulatedLink(1e-5, 4e11)
    single, _, _, tensor, _ = forecasts(replace(MIXED, heads=8), [Host(64 * GB)] * 4, fast)
    assert tensor.way == "tensor=4"
    # all but the head, which rank 0 has: eight layers of 0.5 GB, and an eighth of 4 GB
    assert tensor.terms["memory"] == pytest.approx((8 * GB / 4 + GB / 2) / (20 * GB))
    assert tensor.terms["network"] == pytest.approx(16 * (1e-5 + 3 * 8192 / 4e11))
    assert tensor.rate > 2.5 * single.rate


def test_kv_cache_is_counted_and_sharded_by_context_parallel():
    kv = tuple(LayerKV(GB, full, by_head=True, sums=4096) for full in [True, False] * 4)
    single, pipeline, _, context, tensor, _ = forecasts(
        replace(MIXED, heads=8, kv=kv), [Host(80 * GB)] * 2, find_link("20us/45GB")
    )
    without_kv = forecasts(replace(MIXED, heads=8), [Host(80 * GB)] * 2, find_link("20us/45GB"))
    assert [each.way for each in without_kv] == ["one machine", "pipeline=2", "experts=2", "tensor=2"]
    assert single.terms["memory"] - without_kv[0].terms["memory"] == pytest.approx(8 / 20)
    assert pipeline.terms["memory"] - without_kv[1].terms["memory"] == pytest.approx(8 / 20)
    # four of eight layers have global attention
    assert context.terms["memory"] - without_kv[0].terms["memory"] == pytest.approx(6 / 20)
    assert context.terms["network"] == pytest.approx(4 * (20e-6 + 4096 / 45e9))
    assert tensor.terms["memory"] - without_kv[-1].terms["memory"] == pytest.approx(4 / 20)


def test_pipeline_stages_combine_with_other_parallelism():
    fast, hosts = find_link("20us/45GB"), [Host(12 * GB)] * 4
    found = {each.way: each for each in forecasts(replace(MIXED, chosen=8), hosts, fast)}
    both = found["pipeline=2,experts=2"]
    assert both.reason is None
    assert both.terms["network"] == pytest.approx(2 * (20e-6 + 8192 / 45e9) + 8 * (20e-6 + 8192 / 45e9), rel=0.5)
    assert both.terms["disk"] < found["one machine"].terms["disk"]
    kv = tuple(LayerKV(GB, True, by_head=True, sums=4096) for _ in range(8))
    long = {each.way: each for each in forecasts(replace(MIXED, chosen=8, kv=kv), [Host(80 * GB)] * 4, fast)}
    ways = {"pipeline=2,experts=2", "pipeline=2,context=2", "experts=4,context=4"}
    assert ways < set(long)
    # a quarter of 8 GB of keys and values in each, rather than all of it
    less = long["experts=4"].terms["memory"] - long["experts=4,context=4"].terms["memory"]
    assert less == pytest.approx(6 / 20)


def test_described_and_measured_hosts_have_the_same_forecast():
    link = SimulatedLink(150e-6, 117e6)
    found = [
        RankMeasurement("10.0.0.1", 24 * GB, HostSpeeds(20e9, None), None),
        RankMeasurement("10.0.0.2", 32 * GB, HostSpeeds(20e9, 3e9), link),
    ]
    machines = as_measured(found)
    given = Machines(parse_hosts("24GB,32GB/3GB"), find_link("1gbe"))
    assert (machines.hosts, machines.network) == (given.hosts, given.network)
    eight = replace(MIXED, chosen=8)
    assert forecasts(eight, machines.hosts, machines.network) == forecasts(eight, given.hosts, given.network)
    # given values override measured ones
    other = machines.override(SLOW, 40e9)
    assert other.network == SLOW
    assert [host.memory_rate for host in other.hosts] == [40e9] * 2
    assert machines.override(None, None) == machines


def test_slow_host_dominates_expert_parallel():
    hosts = [Host(64 * GB), Host(64 * GB, memory_rate=10e9)]
    equal, uneven = forecasts(MIXED, hosts[:1] * 2, SLOW), forecasts(MIXED, hosts, SLOW)
    assert uneven[0] == equal[0]
    assert 1 < uneven[1].terms["memory"] / equal[1].terms["memory"] < 2
    # a layer takes as long as its slowest rank
    assert uneven[2].terms["memory"] == pytest.approx(2 * equal[2].terms["memory"])


def test_hosts_are_named_or_described():
    assert addresses_in("16GB,32GB/3GB") == ()
    assert addresses_in("10.0.0.1:29400, 10.0.0.2") == ("10.0.0.1:29400", "10.0.0.2")
    assert addresses_in("laptop, tower.local:5") == ("laptop", "tower.local:5")
    assert addresses_in("laptop") == addresses_in("laptop,16GB") == (), "which are refused with the figures"
    with pytest.raises(SettingsError, match="'16GB' is no address, as others of --hosts are"):
        addresses_in("10.0.0.1,16GB")
    with pytest.raises(SettingsError, match=r"10\.0\.0\.1 is one machine"):
        addresses_in("10.0.0.1")


def test_impossible_layouts_are_refused():
    small = forecasts(MIXED, [Host(4 * GB)] * 2, SLOW)
    assert small[0].reason is not None
    assert "5.0 GB that every token reads" in small[0].reason
    loose = Weights(*[getattr(MIXED, name) for name in ("dense", "experts", "ends", "head", "active", "hidden")], packed=False)
    assert "not packed" in str(forecasts(loose, [Host(24 * GB)], SLOW)[0].reason)


def test_host_descriptions_are_parsed():
    assert parse_hosts("16GB, 32GB/3GB") == [Host(16 * GB), Host(32 * GB, 3e9)]
    with pytest.raises(SettingsError, match="no machine"):
        parse_hosts("0GB")
    with pytest.raises(SettingsError, match="not a size"):
        parse_hosts("much")
    with pytest.raises(SettingsError, match="unknown network"):
        find_link("string")
    assert find_link("20us/45GB") == SimulatedLink(20e-6, 45e9)
    for text in ("20us/", "us/45GB", "20us/0GB", "-1us/1GB"):
        with pytest.raises(SettingsError):
            find_link(text)
