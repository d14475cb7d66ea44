"""What Python takes around kernels is measured of the calls that a model makes."""

from auraflux.bench.overhead import calls_of, cost_of


def test_a_step_is_told_by_its_calls():
    calls = calls_of("llama", 2)
    names = [call.op.name for call in calls]
    assert names[0] == "embed"
    assert names.count("turboquant_attention") == 4
    cost = cost_of(next(call for call in calls if call.op.name == "linear"))
    assert cost.kernels is not None
    assert cost.kernels > 0
