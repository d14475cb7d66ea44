"""Delta ops against transformers' functions, and invariants under any split of the tokens."""

import copy
import os
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops._cases import Args, relative_rms
from auraflux.ops.delta.cases import closing, conv, gates, layer_inputs, prefill, scan, scan_gate, starts, step
from auraflux.ops.delta.reference import (
    delta_gates,
    delta_layer_step,
    gated_delta_prefill,
    gated_delta_step,
    scan_gates,
    selective_scan,
    short_conv,
)
from auraflux.ops.simd.isa import ISA, ISAS
from auraflux.ops.simd.processor import cpu_features

LENGTHS = [1, 6, 7, 16, 33, 100]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(5)


def tokens(args: Args, start: int, end: int) -> Args:
    """Return the state with tokens start to end of a single sequence."""
    cut = {name: args[name][start:end].contiguous() for name in ("q", "k", "v", "decay", "beta")}
    return {"state": args["state"], **cut}


def close(found: Tensor, expected: Tensor, tol: float = 1e-5) -> bool:
    return relative_rms(found, expected) <= tol


def transformers_rule(name: str, args: Args) -> tuple[Tensor, Tensor]:
    """Call a delta rule of transformers: batch first, a logarithmic decay, keys repeated per value head, q scaled inside."""
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    q, k, v, decay, beta = (args[name].unsqueeze(0) for name in ("q", "k", "v", "decay", "beta"))
    shared = v.shape[2] // q.shape[2]
    q, k = (q * q.shape[-1] ** 0.5).repeat_interleave(shared, 2), k.repeat_interleave(shared, 2)
    out, state = getattr(module, name)(q, k, v, g=decay.log(), beta=beta, initial_state=args["state"], output_final_state=True)
    return out[0], state


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("rule", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_prefill_matches_transformers(rule: str, length: int):
    args = prefill(length)
    out, state = transformers_rule(rule, copy.deepcopy(args))
    assert close(gated_delta_prefill(**args), out)
    assert close(args["state"], state)


def test_step_matches_transformers():
    args = step(heads=8, key_heads=4, key_width=64, value_width=100)
    out, state = transformers_rule("torch_recurrent_gated_delta_rule", copy.deepcopy(args))
    assert close(gated_delta_step(**args), out)
    assert close(args["state"], state)


@pytest.mark.parametrize("length", LENGTHS)
def test_scan_matches_transformers(length: int):
    """Compare gates and scan together, as transformers fuses them."""
    module = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
    heads, groups, key_width, width = 6, 2, 16, 24
    sizes = {"heads": heads, "groups": groups, "key_width": key_width, "value_width": width}
    args, gate = scan(length, **sizes), scan_gate(length, heads, scale=1.0)
    args["decay"], args["step"] = scan_gates(**gate)
    wide, keys = heads * width, groups * key_width
    x, b, c = (part[None].contiguous() for part in args["xbc"].split([wide, keys, keys], 1))
    out, state = module.mamba2_chunk_scan(
        x.view(1, length, heads, width), gate["dt"][None], -gate["a_log"].exp(), b.view(1, length, groups, -1),
        c.view(1, length, groups, -1), chunk_size=32, D=args["skip"], dt_bias=gate["dt_bias"], dt_softplus=True,
        initial_states=args["state"].transpose(2, 3).contiguous(), return_final_states=True,
    )  # fmt: skip
    assert close(selective_scan(**args), out.reshape(length, wide))
    assert close(args["state"], state.transpose(2, 3))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 20])
def test_conv_matches_transformers(length: int):
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    args = conv(length, channels=100)
    state = args["state"].mT.contiguous()
    out = module.causal_conv1d_update(args["x"].T.unsqueeze(0), state, args["weight"].T.contiguous(), activation="silu")
    assert close(short_conv(**args), out[0].T)
    assert torch.equal(args["state"], state.mT)


def test_layer_step_matches_float64():
    args = layer_inputs(3, 4, 2, 64, torch.float32)
    qkv, conv_, state, taps = (args[name].double() for name in ("qkv", "conv", "state", "taps"))
    mixed = torch.nn.functional.silu((torch.cat([conv_, qkv[:, None]], 1) * taps).sum(1))
    q, k, v = (part.view(3, -1, 64) for part in mixed.split([128, 128, 256], 1))
    q, k = ((x * (x.square().sum(-1, True) + 1e-6).rsqrt()).repeat_interleave(2, 1) for x in (q, k))
    decay = torch.exp(-args["a_log"].exp() * torch.nn.functional.softplus(args["a"] + args["dt_bias"])).double()
    state = state * decay[..., None, None]
    change = (v - (k[:, :, None] @ state)[:, :, 0]) * args["b"].double().sigmoid()[..., None]
    state = state + k[..., None] * change[:, :, None]
    read = (q[:, :, None] @ state)[:, :, 0] / 8
    read = read * (read.square().mean(-1, True) + 1e-6).rsqrt() * args["norm"] * torch.nn.functional.silu(args["z"])
    assert close(delta_layer_step(**args), read.float())
    assert close(args["state"], state.float())
    assert torch.equal(args["conv"], torch.cat([conv_[:, 1:], qkv[:, None]], 1).float())


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qkv", lambda x: x[:, 1:].contiguous(), "'qkv' has 511 channels; without 4 value heads of 64 they do not hold"),
        ("z", lambda x: x[:, :3].contiguous(), r"'z' has shape \[2, 3, 64\]; \[2, 4, 64\]"),
        ("conv", Tensor.half, "'conv' has dtype float16; float32 is needed"),
        ("state", lambda x: x[:1], r"'state' has shape \[1, 4, 64, 64\]; \[2, 4, 64, 64\]"),
        ("starts", lambda x: x[:2], r"'starts' has shape \[2\]; \[3\]"),
    ],
)
def test_layer_step_rejects_mismatched_arguments(name: str, change, message: str):
    args = layer_inputs(2, 4, 2, 64, torch.float32)
    with pytest.raises(InputError, match=message):
        delta_layer_step(**{**args, name: change(args[name])})


@pytest.mark.parametrize("length", LENGTHS)
def test_prefill_equals_steps(length: int):
    args = closing(prefill(length, key_width=64, value_width=100))
    once = copy.deepcopy(args)
    out = torch.cat([gated_delta_step(**tokens(args, t, t + 1)) for t in range(length)])
    assert close(gated_delta_prefill(**once), out)
    assert close(once["state"], args["state"])


@given(st.integers(1, 80), st.lists(st.integers(0, 80), max_size=4))
@settings(max_examples=30, deadline=None)
def test_prefill_may_be_split_anywhere(length: int, cuts: list[int]):
    torch.manual_seed(length)
    args = prefill(length, heads=2, key_heads=1, key_width=32, value_width=48)
    once, places = copy.deepcopy(args), sorted(min(cut, length) for cut in [0, *cuts, length])
    parts = [gated_delta_prefill(**tokens(args, a, b), starts=starts([b - a])) for a, b in pairwise(places)]
    assert close(gated_delta_prefill(**once), torch.cat(parts))
    assert close(once["state"], args["state"])


@given(st.integers(0, 30), st.lists(st.integers(0, 30), max_size=5))
@settings(max_examples=30, deadline=None)
def test_conv_may_be_split_anywhere(length: int, cuts: list[int]):
    torch.manual_seed(length)
    args = conv(length, channels=40)
    once, places = copy.deepcopy(args), sorted(min(cut, length) for cut in [0, *cuts, length])
    x = args.pop("x")
    parts = [short_conv(**{**args, "x": x[a:b].contiguous(), "starts": starts([b - a])}) for a, b in pairwise(places)]
    assert close(short_conv(**once), torch.cat(parts), 1e-6)
    assert torch.equal(once["state"], args["state"])


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5))
@settings(max_examples=20, deadline=None)
def test_ragged_batch_equals_separate_calls(lengths: list[int]):
    torch.manual_seed(sum(lengths))
    args = prefill(*lengths, heads=2, key_heads=1, key_width=32, value_width=40)
    batch, places = copy.deepcopy(args), args.pop("starts").tolist()
    out = gated_delta_prefill(**batch)
    for b, (start, end) in enumerate(pairwise(places)):
        alone = {**tokens(args, start, end), "state": args["state"][b : b + 1].clone()}
        assert torch.equal(gated_delta_prefill(**alone, starts=starts([end - start])), out[start:end])
        assert torch.equal(alone["state"][0], batch["state"][b])


@pytest.mark.parametrize("changed", [0, 5, 15, 16, 31, 39])
def test_no_output_depends_on_later_tokens(changed: int):
    args = prefill(40, key_width=64, value_width=64)
    other = copy.deepcopy(args)
    for name in ("q", "k", "v", "decay", "beta"):
        other[name][changed] = torch.rand_like(other[name][changed])
    before, after = gated_delta_prefill(**args), gated_delta_prefill(**other)
    assert torch.equal(before[:changed], after[:changed])
    assert not torch.equal(before[changed], after[changed])


@pytest.mark.parametrize("by_step", [True, False])
def test_state_does_not_drift_from_float64(by_step: bool):
    args = prefill(1000, heads=2, key_heads=1, key_width=64, value_width=64)
    args["decay"] = args["decay"] ** 0.01
    state = args["state"][0].double()
    for k, v, decay, beta in zip(*(args[name].double() for name in ("k", "v", "decay", "beta")), strict=True):
        state *= decay[:, None, None]
        state += k.T * ((v - (k @ state).squeeze(1)) * beta[:, None])[:, None]
    if by_step:
        for t in range(1000):
            gated_delta_step(**tokens(args, t, t + 1))
    else:
        gated_delta_prefill(**args)
    assert close(args["state"][0].double(), state, 3e-6)


@pytest.mark.parametrize("length", [1, 5, 40])
def test_closed_gate_forgets_everything(length: int):
    args = prefill(length)
    args["decay"][length // 2] = 0.0
    other = {**copy.deepcopy(args), "state": torch.randn_like(args["state"]) * 1e6}
    out, forgotten = gated_delta_prefill(**args), gated_delta_prefill(**other)
    assert torch.equal(out[length // 2 :], forgotten[length // 2 :])
    assert torch.equal(args["state"], other["state"])


@pytest.mark.parametrize("length", [1, 5, 40])
def test_open_gate_without_writes_preserves_the_state_bitwise(length: int):
    args = prefill(length, key_width=63, value_width=100)
    args["decay"].fill_(1.0)
    args["beta"].fill_(0.0)
    before = args["state"].clone()
    gated_delta_prefill(**args)
    assert torch.equal(args["state"], before)


def test_empty_sequences_leave_their_state():
    delta, short = prefill(0, 3, 0), conv(0, 3, 0, channels=10)
    before = [x["state"].clone() for x in (delta, short)]
    gated_delta_prefill(**delta)
    short_conv(**short)
    for args, old in zip((delta, short), before, strict=True):
        assert torch.equal(args["state"][[0, 2]], old[[0, 2]])
        assert not torch.equal(args["state"][1], old[1])


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_conv_stores_the_last_three_inputs(length: int):
    args = conv(length, channels=7)
    inputs = torch.cat([args["state"][0], args["x"]])
    short_conv(**args)
    assert torch.equal(args["state"][0], inputs[-3:])


def test_gates_stay_finite_at_the_extremes():
    a = torch.tensor([[-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4]])
    decay, beta = delta_gates(a, a.clone(), torch.zeros(7), torch.zeros(7))
    assert torch.equal(decay[0, [0, -1]], torch.tensor([1.0, 0.0]))
    assert torch.equal(beta[0, [0, -1]], torch.tensor([0.0, 1.0]))
    assert close(decay.double(), torch.exp(-torch.nn.functional.softplus(a.double(), threshold=1000)), 1e-6)


def test_every_gate_is_accurate():
    args = gates(300, 20, scale=8.0)
    decay, _ = delta_gates(**args)
    a, a_log, dt_bias = (args[name].double() for name in ("a", "a_log", "dt_bias"))
    power = a_log.exp() * torch.log1p(torch.exp(a + dt_bias))
    # an error of the power becomes a relative error of the decay
    assert ((decay.double() / torch.exp(-power) - 1).abs() < 4e-7 * (1 + power))[power < 80].all()


@pytest.mark.parametrize(
    ("op", "args", "name", "change", "message"),
    [
        (gated_delta_step, step(), "state", Tensor.double, "'state' has dtype float64; float32 is needed"),
        (gated_delta_step, step(), "state", lambda x: x[0], "'state' has shape"),
        (gated_delta_step, step(2), "state", lambda x: x[:1], "'state' holds 1 sequences, 'q' one token each of 2"),
        (gated_delta_step, step(), "q", lambda x: x[..., :64].contiguous(), r"'q' has shape \[1, 2, 64\]; \[1, 2, 128\]"),
        (gated_delta_step, step(), "k", lambda x: x[:, :1].contiguous(), r"'k' has shape \[1, 1, 128\]; \[1, 2, 128\]"),
        (gated_delta_step, step(), "v", lambda x: x[:, :3].contiguous(), r"'v' has shape \[1, 3, 128\]; \[1, 4, 128\]"),
        (gated_delta_step, step(2), "v", lambda x: x.mT.contiguous().mT, "'v' .* is not contiguous"),
        (gated_delta_step, step(), "v", Tensor.int, "'v' has dtype int32"),
        (gated_delta_step, step(), "decay", lambda x: x[0], r"'decay' has shape \[4\]; \[1, 4\]"),
        (gated_delta_step, step(), "beta", lambda x: x.T.contiguous(), r"'beta' has shape \[4, 1\]; \[1, 4\]"),
        (gated_delta_step, step(heads=4, key_heads=3), "q", lambda x: x, "4 value heads cannot be split evenly among 3"),
        (gated_delta_prefill, prefill(3, 4), "starts", Tensor.long, "'starts' has dtype int64; int32 is needed"),
        (gated_delta_prefill, prefill(3, 4), "starts", lambda x: x[:2], r"'starts' has shape \[2\]; \[3\]"),
        (gated_delta_prefill, prefill(3, 4), "starts", lambda x: x + 1, r"'starts' is \[1, 4, 8\]; it must increase from 0"),
        (gated_delta_prefill, prefill(3, 4), "starts", lambda x: x * 2, "the number of tokens, 7"),
        (gated_delta_prefill, prefill(3, 4, 5), "starts", lambda x: x[[0, 2, 1, 3]], r"\[0, 7, 3, 12\]; it must increase"),
        (
            short_conv,
            conv(4, channels=8),
            "state",
            lambda x: x[:, :2].contiguous(),
            r"'state' has shape \[1, 2, 8\]; \[1, 3, 8\]",
        ),
        (short_conv, conv(4, channels=8), "state", Tensor.half, "'state' has dtype float16; float32 is needed"),
        (short_conv, conv(4, channels=8), "weight", lambda x: x.T.contiguous(), r"'weight' has shape \[8, 4\]; \[4, 8\]"),
        (short_conv, conv(4, channels=8), "x", lambda x: x[0], r"'x' has shape \[8\]"),
        (short_conv, conv(4, channels=8), "starts", lambda x: x - 1, "it must increase from 0 to the number of tokens, 4"),
        (delta_gates, gates(3, 8), "b", lambda x: x[:2], r"'b' has shape \[2, 8\]; \[3, 8\]"),
        (delta_gates, gates(3, 8), "a_log", lambda x: x[:2], r"'a_log' has shape \[2\]; \[8\]"),
        (delta_gates, gates(3, 8), "dt_bias", lambda x: x[:2], r"'dt_bias' has shape \[2\]; \[8\]"),
    ],
)
def test_mismatched_arguments_are_rejected(op, args: Args, name: str, change, message: str):
    args = {**copy.deepcopy(args), name: change(args[name])}
    before = copy.deepcopy(args)
    with pytest.raises(InputError, match=message):
        op(**args)
    assert all(torch.equal(args[key], before[key]) for key in args)


@pytest.mark.slow
@pytest.mark.parametrize("isa", [name for name, isa in ISAS.items() if isa is not ISA and set(isa.features) <= cpu_features()])
def test_other_instruction_sets_agree(isa: str):
    command = [sys.executable, "-m", "pytest", "-q", "tests/ops/test_parity.py", "-k", "gated_delta"]
    done = subprocess.run(command, env={**os.environ, "AURAFLUX_ISA": isa}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
