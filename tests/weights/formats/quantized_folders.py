"""Folders of AWQ, GPTQ, compressed-tensors, ModelOpt and FP8 weights, packed independently from the formats' specifications.

Codes, scales and zeros approximate a model's weights; expected values are computed in float64.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

F16, BF16, E8M0 = torch.float16, torch.bfloat16, torch.float8_e8m0fnu
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


class Codes(NamedTuple):
    """Quantized weight [N, K]: codes [N, K], zeros and scales [N, G], group of each input [K]."""

    codes: np.ndarray
    zeros: np.ndarray
    scales: Tensor
    g_idx: np.ndarray
    bits: int

    def values(self) -> np.ndarray:
        scales = self.scales.double().numpy()
        return scales[:, self.g_idx] * (self.codes.astype(np.float64) - self.zeros[:, self.g_idx])


def draw(
    weight: Tensor, bits: int, group: int, *, symmetric: bool, dtype: torch.dtype, seed: int, shuffled: bool = False
) -> Codes:
    """Quantize a weight [N, K] in groups along its inputs; group -1 is one scale per row."""
    rng = np.random.default_rng(seed)
    rows, width = weight.shape
    group = width if group < 0 else group
    g_idx = np.arange(width) // group
    if shuffled:
        g_idx = rng.permutation(g_idx)
    groups, half = g_idx.max() + 1, 2 ** (bits - 1)
    zeros = np.full((rows, groups), half) if symmetric else rng.integers(0, 2**bits, (rows, groups))
    found = weight.double().numpy()
    tops = np.stack([np.abs(found[:, g_idx == g]).max(1) for g in range(groups)], 1)
    scales = torch.from_numpy(tops / (half / 2)).to(dtype)
    codes = np.rint(found / scales.double().numpy()[:, g_idx] + zeros[:, g_idx]).clip(0, 2**bits - 1).astype(np.uint8)
    return Codes(codes, zeros, scales, g_idx, bits)


def stream(codes: np.ndarray, bits: int) -> Tensor:
    """Pack codes [R, C] as a little-endian bit stream along each row, in 32-bit words."""
    rows, count = codes.shape
    flags = (codes[..., None].astype(np.uint8) >> np.arange(bits, dtype=np.uint8)) & 1
    flags = flags.reshape(rows, count * bits)
    flags = np.pad(flags, ((0, 0), (0, -flags.shape[1] % 32)))
    return torch.from_numpy(np.packbits(flags, axis=1, bitorder="little").view("<i4").copy())


def awq(made: Codes) -> dict[str, Tensor]:
    def words(found: np.ndarray) -> Tensor:
        # [R, N], eight outputs to a word, nibble i for output AWQ_ORDER[i]
        eights = found.reshape(len(found), -1, 8)[..., AWQ_ORDER]
        return stream(eights.reshape(len(found), -1), 4)

    return {"qweight": words(made.codes.T), "qzeros": words(made.zeros.T), "scales": made.scales.t().contiguous()}


def gptq(made: Codes, less: int = 1) -> dict[str, Tensor]:
    stored = (made.zeros.T - less) % 2**made.bits
    return {
        "qweight": stream(made.codes, made.bits).t().contiguous(),
        "qzeros": stream(stored, made.bits),
        "scales": made.scales.t().contiguous(),
        "g_idx": torch.from_numpy(made.g_idx.astype(np.int32)),
    }


def packed(made: Codes, symmetric: bool) -> dict[str, Tensor]:
    """Return the tensors of compressed-tensors' pack-quantized format."""
    found = {
        "weight_packed": stream(made.codes, made.bits),
        "weight_scale": made.scales,
        "weight_shape": torch.tensor(made.codes.shape),
    }
    if not symmetric:
        found["weight_zero_point"] = stream(made.zeros.T, made.bits).t().contiguous()
    if (np.diff(made.g_idx) < 0).any():
        found["weight_g_idx"] = torch.from_numpy(made.g_idx.astype(np.int32))
    return found


def int8(made: Codes, symmetric: bool) -> dict[str, Tensor]:
    """Return the tensors of compressed-tensors' int-quantized format."""
    half = 2 ** (made.bits - 1)
    signed = torch.from_numpy((made.codes.astype(np.int16) - half).astype(np.int8))
    found = {"weight": signed, "weight_scale": made.scales}
    if not symmetric:
        found["weight_zero_point"] = torch.from_numpy((made.zeros - half).astype(np.int8))
    return found


def ct_config(bits: int, group: int, symmetric: bool, layout: str = "pack-quantized", **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "channel" if group < 0 else "group"}
    weights |= {} if group < 0 else {"group_size": group}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "format": layout, **more}}
    found = {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups, "ignore": ["lm_head"]}
    return {**found, "quantization_status": "compressed"}


Make = Callable[[Tensor, int], tuple[dict[str, Tensor], Tensor]]


def maker(lay_out: Callable[[Codes], dict[str, Tensor]], **options: Any) -> Make:
    def make(weight: Tensor, number: int) -> tuple[dict[str, Tensor], Tensor]:
        made = draw(weight, seed=number, **options)
        return lay_out(made), torch.from_numpy(made.values())

    return make


def fp8(weight: Tensor, block: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales [N/R, K/C] and expected values: each product rounded to float32."""
    rows, width = weight.shape
    of_row, of_input = np.arange(rows) // block[0], np.arange(width) // block[1]
    tops = np.zeros((of_row[-1] + 1, of_input[-1] + 1))
    np.maximum.at(tops, (of_row[:, None], of_input[None]), np.abs(weight.double().numpy()))
    scales = torch.from_numpy(tops / 448)
    scales = scales.log2().ceil().exp2().to(dtype) if dtype is E8M0 else scales.to(dtype)
    spread = scales.float().numpy()[of_row][:, of_input]
    codes = torch.from_numpy(weight.float().numpy() / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, scales, torch.from_numpy(codes.double().numpy() * spread.astype(np.float64)).float()


def fp8_folder(
    block: tuple[int, int], dtype: torch.dtype = torch.float32, part: str = "weight_scale_inv", **config: Any
) -> tuple[dict[str, Any], Make]:
    """Return config and maker of an FP8 folder; a block size of 0 spans the dimension, (0, 0) has a scalar scale."""
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", **config}

    def make(weight: Tensor, number: int) -> tuple[dict[str, Tensor], Tensor]:
        codes, scales, expected = fp8(weight, (block[0] or len(weight), block[1] or weight.shape[1]), dtype)
        return {"weight": codes, part: scales.view(()) if block == (0, 0) else scales}, expected

    return config, make


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def nvfp4(shape: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return random packed codes, e4m3 scales that cover all finite values, and the levels of the codes."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, shape)
    numbers = np.array([code for code in range(256) if code & 127 != 127], np.uint8)
    scales = rng.choice(numbers[numbers < 0x48], (*shape[:-1], shape[-1] // 16))
    scales.reshape(-1)[: len(numbers)] = numbers[: scales.size]
    octets = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)
    return torch.from_numpy(octets), torch.from_numpy(scales).view(torch.float8_e4m3fn), torch.from_numpy(E2M1[codes])


def nvfp4_expected(levels: Tensor, scales: Tensor) -> Tensor:
    """Return level * scale, computed in float64 and rounded to float32 once."""
    spread = np.repeat(scales.numpy().astype(np.float64), 16, -1)
    return torch.from_numpy((levels.numpy() * spread).astype(np.float32))


def modelopt_folder(algorithm: str = "NVFP4", **config: Any) -> tuple[dict[str, Any], Make]:
    config = {"quant_method": "modelopt", "quant_algo": algorithm, "exclude_modules": ["lm_head", "*norm*"], **config}

    def make(weight: Tensor, number: int) -> tuple[dict[str, Tensor], Tensor]:
        octets, scales, levels = nvfp4(tuple(weight.shape), number)
        factor = torch.tensor(0.0113 / (number + 1))
        product = torch.from_numpy((scales.double().numpy() * factor.double().numpy()).astype(np.float32))
        parts = {"weight": octets, "weight_scale": scales, "weight_scale_2": factor, "input_scale": torch.tensor(0.3)}
        return parts, nvfp4_expected(levels, product)

    return config, make


def modelopt_fp8_folder(block: tuple[int, int], algorithm: str) -> tuple[dict[str, Any], Make]:
    inner = fp8_folder(block, part="weight_scale")[1]

    def make(weight: Tensor, number: int) -> tuple[dict[str, Tensor], Tensor]:
        parts, expected = inner(weight, number)
        scales = parts["weight_scale"]
        shape = (scales.shape[0], 1, scales.shape[1], 1) if block[0] > 1 else (-1,) if block[0] else ()
        return parts | {"weight_scale": scales.view(shape), "input_scale": torch.tensor(0.3)}, expected

    return {"quant_method": "modelopt", "quant_algo": algorithm, "kv_cache_quant_algo": "FP8"}, make


def ct_nvfp4_folder() -> tuple[dict[str, Any], Make]:
    config = ct_config(4, 16, True, "nvfp4-pack-quantized")
    config["config_groups"]["group_0"]["weights"] |= {"type": "float", "strategy": "tensor_group"}

    def make(weight: Tensor, number: int) -> tuple[dict[str, Tensor], Tensor]:
        octets, scales, levels = nvfp4(tuple(weight.shape), number)
        factor = torch.tensor([97.3 * (number + 1)])
        quotient = torch.from_numpy((scales.double().numpy() / factor.double().numpy()).astype(np.float32))
        parts = {"weight_packed": octets, "weight_scale": scales, "weight_global_scale": factor}
        return parts, nvfp4_expected(levels, quotient)

    return config, make


def ct_mxfp4_config() -> dict[str, Any]:
    config = ct_config(4, 32, True, "mxfp4-pack-quantized")
    config["config_groups"]["group_0"]["weights"] |= {"type": "float", "scale_dtype": "torch.uint8"}
    return config


def mxfp4_folder(config: dict[str, Any], codes_name: str = "weight_packed") -> tuple[dict[str, Any], Make]:
    """Return config and maker of MXFP4: random codes, exponents near those of a weight."""

    def make(weight: Tensor, number: int) -> tuple[dict[str, Tensor], Tensor]:
        rng = np.random.default_rng(number)
        rows, width = weight.shape
        codes, exponents = rng.integers(0, 16, (rows, width)), rng.integers(118, 124, (rows, width // 32))
        exponents[0, 0], exponents[1, 0] = 0, 130
        expected = E2M1[codes] * np.repeat(2.0 ** (exponents - 127.0), 32, 1)
        octets = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
        parts = {codes_name: torch.from_numpy(octets), "weight_scale": torch.from_numpy(exponents.astype(np.uint8))}
        return parts, torch.from_numpy(expected)

    return config, make


def ct_fp8_folder(block: tuple[int, int], **weights: Any) -> tuple[dict[str, Any], Make]:
    config = ct_config(8, -1, True, "float-quantized", input_activations={"num_bits": 8, "type": "float", "dynamic": True})
    config["config_groups"]["group_0"]["weights"] |= {"type": "float", **weights}
    return config, fp8_folder(block, BF16, "weight_scale")[1]


def awq_folder(group: int = 32, **config: Any) -> tuple[dict[str, Any], Make]:
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm", **config}
    return config, maker(awq, bits=4, group=group, symmetric=False, dtype=F16)


def gptq_folder(bits: int, group: int, symmetric: bool, layout: str = "gptq", shuffled: bool = False, **config: Any):
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": shuffled, **config}
    lay_out = partial(gptq, less=1 if layout == "gptq" else 0)
    options = {"bits": bits, "group": group, "symmetric": symmetric, "dtype": F16, "shuffled": shuffled}
    return {**config, "checkpoint_format": layout}, maker(lay_out, **options)


def ct_folder(bits: int, group: int, symmetric: bool, dtype: torch.dtype = BF16, shuffled: bool = False):
    lay_out = partial(packed, symmetric=symmetric)
    options = {"bits": bits, "group": group, "symmetric": symmetric, "dtype": dtype, "shuffled": shuffled}
    return ct_config(bits, group, symmetric), maker(lay_out, **options)


def int8_folder(group: int, symmetric: bool, bits: int = 8):
    more = {"input_activations": {"num_bits": 8, "type": "int", "dynamic": True}}
    config = ct_config(bits, group, symmetric, "int-quantized", **more)
    return config, maker(partial(int8, symmetric=symmetric), bits=bits, group=group, symmetric=symmetric, dtype=BF16)


FOLDERS = {
    "awq": awq_folder(),
    "awq-64": awq_folder(64),
    "awq-rows": awq_folder(-1),
    "awq-old-words": (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"},
        awq_folder()[1],
    ),
    "gptq-4": gptq_folder(4, 64, True),
    "gptq-4-zeros": gptq_folder(4, 32, False),
    "gptq-8": gptq_folder(8, 32, True),
    "gptq-8-zeros-rows": gptq_folder(8, -1, False),
    "gptq-3": gptq_folder(3, 32, False),
    "gptq-2": gptq_folder(2, 64, False),
    "gptq-v2": gptq_folder(4, 32, False, "gptq_v2"),
    "gptq-act-order": gptq_folder(4, 32, True, shuffled=True),
    "gptq-16": gptq_folder(4, 16, False),
    "ct-4": ct_folder(4, 64, True),
    "ct-4-zeros": ct_folder(4, 32, False),
    "ct-4-f16-rows": ct_folder(4, -1, True, F16),
    "ct-8": ct_folder(8, 32, True),
    "ct-8-zeros": ct_folder(8, -1, False),
    "ct-5": ct_folder(5, 32, False),
    "ct-act-order": ct_folder(4, 32, False, shuffled=True),
    "ct-int8": int8_folder(-1, True),
    "ct-int8-zeros": int8_folder(64, False),
    "ct-w4a8": int8_folder(64, True, 4),
    "ct-w4a8-zeros": int8_folder(32, False, 4),
    "fp8": fp8_folder((128, 128), weight_block_size=[128, 128]),
    "fp8-bf16-scales": fp8_folder((64, 32), BF16, weight_block_size=[64, 32]),
    "fp8-powers": fp8_folder((128, 128), E8M0, weight_block_size=[128, 128]),
    "fp8-deepseek-v4": fp8_folder((128, 128), E8M0, "scale", weight_block_size=[128, 128]),
    "fp8-small-blocks": fp8_folder((16, 16), weight_block_size=[16, 16]),
    "fp8-tensor": fp8_folder((0, 0), part="weight_scale"),
    "fp8-rows": fp8_folder((1, 0), part="weight_scale", quant_method="fbgemm_fp8", activation_scale_ub=1200.0),
    "ct-fp8-rows": ct_fp8_folder((1, 0), strategy="channel"),
    "ct-fp8-tensor": ct_fp8_folder((0, 0), strategy="tensor"),
    "ct-fp8-blocks": ct_fp8_folder((128, 128), strategy="block", block_structure=[128, 128]),
    "ct-mxfp4": mxfp4_folder(ct_mxfp4_config()),
    "modelopt-mxfp4": mxfp4_folder({"quant_method": "modelopt", "quant_algo": "MXFP4"}, "weight"),
    "ct-nvfp4": ct_nvfp4_folder(),
    "nvfp4": modelopt_folder(),
    "modelopt-fp8": modelopt_fp8_folder((0, 0), "FP8"),
    "modelopt-fp8-rows": modelopt_fp8_folder((1, 0), "FP8_PER_CHANNEL_PER_TOKEN"),
    "modelopt-fp8-blocks": modelopt_fp8_folder((128, 128), "fp8_pb_wo"),
    "ct-fp8-groups": ct_fp8_folder((1, 64), strategy="group", group_size=64),
}


def rewrite(
    folder: Path,
    target: Path,
    config: dict[str, Any],
    make: Make,
    skip: tuple[str, ...] = ("embed_tokens", "lm_head", "norm", "mlp.gate."),
) -> dict[str, Tensor]:
    """Write a model's folder with its matrices quantized, and return the expected weights.

    make  (matrix, index) -> its tensors and the expected weight
    """
    target.mkdir()
    files: dict[str, Tensor] = {}
    expected: dict[str, Tensor] = {}
    for number, (name, weight) in enumerate(sorted(load_file(folder / "model.safetensors").items())):
        if weight.dim() < 2 or any(each in name for each in skip):
            files[name] = expected[name] = weight
            continue
        parts, expected[name] = make(weight, number)
        module = name.removesuffix("weight")
        files |= {f"{module}{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(files, target / "model.safetensors", metadata={"format": "pt"})
    found = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**found, "quantization_config": config}))
    return expected
