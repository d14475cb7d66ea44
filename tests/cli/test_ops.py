"""`auraflux ops`: every op with its origins, and what kernels decline."""

import json
from collections import Counter

import pytest
import torch
from click.testing import CliRunner

from auraflux.cli import main
from auraflux.ops import _cases, _dispatch
from auraflux.ops._cases import Case
from auraflux.ops._dispatch import Declined, Op
from auraflux.ops.simd.isa import ISA

ORIGINS = """
aura_value_int2 aura_value_int3 aura_value_int4 aura_value_int6 aura_value_int8
aura_flash_sdpa_kb4_vb2_d64 aura_flash_sdpa_kb4_vb4_d64 aura_flash_sdpa_kb4_vb2_d128 aura_flash_sdpa_kb4_vb4_d128
aura_flash_pass2_d64 aura_flash_pass2_d80 aura_flash_pass2_d96 aura_flash_pass2_d128 aura_flash_pass2_d256 aura_flash_pass2_d512
flash_attn_vec_tq_dk256 flash_attn_vec_tq_dk512 flash_attn_vec_tq_reduce fwht_shared
dequant_matvec_4bit dequant_matvec_4bit_fast dequant_matvec_4bit_v3 dequant_matvec_4bit_v4 dequant_matvec_4bit_v5
dequant_matvec_8bit_v3 dequant_matvec_2bit
dequant_matvec_4bit_v3_n_tokens dequant_matvec_4bit_fast_n_tokens dequant_matvec_8bit_v3_n_tokens
bf16_matvec bf16_matmul_n_tokens
fused_gate_up_swiglu embed_gather_4bit
dequant_matvec_4bit_batched dequant_matvec_4bit_v3_experts swiglu_fused_batched weighted_sum moe_bucket_accumulate
swiglu_fused swiglu_fused_vec4
moe_softmax_topk moe_normalize_weights
moe_combine_residual moe_combine_residual_flat moe_combine_residual_unscaled moe_combine_residual_n_tokens
rms_norm_sum_sq rms_norm_apply rms_norm_apply_bf16 rms_norm_bf16_fused_n_tokens rms_norm_per_head_n_tokens
residual_add residual_add_n_tokens rms_norm_qk gated_rms_norm
sigmoid_gate split_q_gate
rope_n_tokens yarn_rope_apply
attn_scores_batched attn_softmax_batched attn_values_batched kv_cache_append_n_tokens
mla_q_prime_4bit mla_out_per_head_4bit mla_sdpa_folded mla_sdpa_tile_accumulate mla_sdpa_tile_finalize
mla_split_q_kv mla_kv_cache_append
gated_delta_net_step gated_delta_net_chunkwise gated_delta_net_sequential
conv1d_step conv1d_state_update compute_decay_beta
"""


def listed(*words: str) -> list[dict]:
    done = CliRunner().invoke(main, ["ops", "--json", *words])
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def test_every_origin_has_exactly_one_op():
    found = Counter(name for row in listed() for name in row["origins"])
    assert {name: count for name, count in found.items() if count > 1} == {}
    assert set(ORIGINS.split()) - set(found) == set()
    assert set(found) - set(ORIGINS.split()) == set()


def test_json_shape():
    for row in listed():
        assert list(row) == ["op", "family", "origins", "backends", "declined"]
        assert row["backends"][0] == "reference"
        assert isinstance(row["declined"], dict)


def test_table_names_every_op_and_origin():
    done = CliRunner().invoke(main, ["ops"])
    assert done.exit_code == 0, done.stderr
    for name in [*ORIGINS.split(), *(op.name for op in _dispatch.all_ops())]:
        assert name in done.stdout


def doubled(x: torch.Tensor) -> torch.Tensor:
    """Return twice x."""
    return 2 * x


doubled.__module__ = "toy.reference"


@pytest.fixture
def one_op(monkeypatch):
    """A program that knows only the op `doubled`, with the given kernel."""

    def make(kernel) -> Op:
        op = Op(doubled, ("twice",), None)
        op._kernels.update(cpu=kernel, cuda=None)
        cases = [Case(op, "short", lambda: {"x": torch.ones(3)}), Case(op, "long", lambda: {"x": torch.ones(300)})]
        monkeypatch.setattr(_dispatch, "all_ops", lambda: [op])
        monkeypatch.setattr(_cases, "all_cases", lambda: cases)
        return op

    return make


def test_check_shows_declined_cases(one_op):
    def kernel(x):
        if x.numel() > 100:
            raise Declined("more than [x] 100")
        return x + x

    one_op(kernel)
    (row,) = listed("--check")
    assert row["declined"] == {"cpu": ["more than [x] 100"]}
    assert row["checked"]["cpu"] == {
        "cases": 2,
        "worst_error": 0.0,
        "worst_case": "short",
        "declined": {"more than [x] 100": ["long"]},
        "wrong": {},
    }
    table = CliRunner().invoke(main, ["ops", "--check"]).stdout
    assert "cpu: more than [x] 100" in table
    assert "1 of 2 cases" in table


def test_check_fails_on_a_wrong_kernel(one_op):
    one_op(lambda x: 3 * x)
    done = CliRunner().invoke(main, ["ops", "--check"])
    assert done.exit_code == 1
    assert "WRONG" in done.stdout
    assert done.stderr == "error: kernels that differ from their reference: doubled.\n"


def test_check_counts_a_crash_as_wrong(one_op):
    def kernel(x):
        raise RuntimeError("out of luck")

    one_op(kernel)
    done = CliRunner().invoke(main, ["ops", "--check", "--json"])
    assert done.exit_code == 1
    (row,) = json.loads(done.stdout)
    assert row["checked"]["cpu"]["wrong"]["short"] == "RuntimeError: out of luck"


def test_a_case_is_explained():
    pytest.importorskip("triton")
    done = CliRunner().invoke(main, ["ops", "--device", "cuda", "--explain", "add_norm_linears", "bf16-4-4096"])
    assert done.exit_code == 0
    *above, chosen = done.output.strip().splitlines()
    assert chosen.strip().startswith("> ")
    assert all(line.strip().startswith("- ") and ": " in line for line in above[1:])
    found = json.loads(
        CliRunner().invoke(main, ["ops", "--device", "cuda", "--explain", "add_norm_linears", "bf16-4-4096", "--json"]).output
    )
    assert found["bf16-4-4096"]["taken"] == chosen.strip().removeprefix("> ")


@pytest.mark.parametrize(("words", "known"), [(["linar", "x"], "linear"), (["linear", "4bit"], "4bit-1")])
def test_unknown_names_are_refused(words: list[str], known: str):
    pytest.importorskip("triton")
    done = CliRunner().invoke(main, ["ops", "--device", "cuda", "--explain", *words])
    assert done.exit_code == 1
    assert done.output.startswith("error: there is no ")
    assert known in done.output


def explained(*words: str) -> dict:
    done = CliRunner().invoke(main, ["ops", "--explain", *words, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_case_is_explained_for_a_cpu():
    found = explained("linear", "4bit-1", "--device", "cpu")
    assert [inner["taken"] for inner in found["4bit-1"]["then"]] == [
        "activations in int8 with AMX" if ISA.matrix_tiles else "activations in int8"
    ]


def test_a_model_is_explained():
    pytest.importorskip("triton")
    done = CliRunner().invoke(main, ["ops", "--device", "cuda", "--explain", "model", "llama-8b"])
    assert done.exit_code == 0, done.output
    assert "llama-8b on an H200: decode" in done.output
    assert "llama-8b on an H200: prompt" in done.output
    assert "> matvec_int4" in done.output


@pytest.mark.parametrize(
    "words", [["linear", "4bit-1", "--kv", "none"], ["linear", "4bit-1", "--batch", "2", "--exact"], ["model", "llama-9b"]]
)
def test_model_options_need_a_model(words: list[str]):
    done = CliRunner().invoke(main, ["ops", "--explain", *words])
    assert done.exit_code == 1
    assert done.output.startswith("error: ")
    assert len(done.output.strip().splitlines()) == 1


@pytest.mark.parametrize("option", ["--batch", "--at"])
def test_extreme_sizes_are_refused(option: str):
    done = CliRunner().invoke(main, ["ops", "--explain", "model", "llama-8b", option, "1" + 30 * "0"])
    assert done.exit_code == 2
    assert f"Invalid value for '{option}'" in done.output
