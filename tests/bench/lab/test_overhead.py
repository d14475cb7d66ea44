"""The Python overhead of ops, measured on the calls of a model."""

from bench.lab.overhead import calls_of, cost_of


def test_the_calls_of_a_step_are_timed():
    calls = calls_of("llama", 2)
    names = [call.op.name for call in calls]
    assert names[0] == "embed"
    assert names.count("turboquant_attention") == 4
    cost = cost_of(next(call for call in calls if call.op.name == "linear"))
    assert cost.kernels is not None
    assert cost.kernels > 0
