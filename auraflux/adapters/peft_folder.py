"""Read a LoRA adapter as PEFT saves it: a folder with adapter_config.json and adapter_model.safetensors.

Names are those of transformers' modules. The experts that transformers 5 stacks are `experts.lora_A` and, for the inner of two
wrappers, `experts.base_layer.lora_A`; the shapes say which of the two stacks a pair changes.
"""

import math
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from auraflux.adapters.pairs import LowRank
from auraflux.errors import FormatError
from auraflux.weights.fields import NAME, Fields
from auraflux.weights.formats.untrusted import FLAG, Kind, brief, listed, mapping_of, named, read_json, regular_file

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
PARTS = re.compile(r"(.+)\.lora_([AB])\.weight$")
# without quantifiers: a pattern from a file must not take exponential time
PLAIN_PATTERN = re.compile(r"(?:[\w.^$-]|\\[.d])*")
ALPHA: Kind[float] = Kind("a number", lambda value: type(value) in (int, float) and abs(value) < 1e9)
PATTERNS = mapping_of(ALPHA, 1 << 14)
ANYTHING: Kind[Any] = Kind("anything", lambda value: True)
# options of PEFT that change what an adapter computes
CHANGES = {
    "use_dora": "DoRA scales the columns of every weight",
    "lora_bias": "its matrices have biases",
    "fan_in_fan_out": "its matrices are transposed",
    "use_qalora": "QA-LoRA pools the inputs",
    "use_bdlora": "its matrices are block-diagonal",
    "modules_to_save": "it replaces whole modules",
    "trainable_token_indices": "it replaces rows of the embedding",
    "layer_replication": "it repeats layers",
    "alora_invocation_tokens": "it begins to work within a prompt",
    "arrow_config": "it chooses between adapters by token",
    "kasa_config": "KaSA changes the weights",
    "velora_config": "VeLoRA changes the inputs",
    "monteclora_config": "it draws its weights",
}


@dataclass(frozen=True)
class Adapter:
    """An adapter in memory.

    name   that requests give
    pairs  the matrices of each module, not scaled, by transformers' name of it
    """

    name: str
    path: Path
    pairs: dict[str, LowRank]
    scales: "Scales"

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in float32."""
        return sum(4 * (each.a.numel() + each.b.numel()) for each in self.pairs.values())


def read_adapter(name: str, path: Path) -> Adapter:
    """Read an adapter; refuse what would not be computed as PEFT computes it."""
    if not (path / CONFIG).exists():
        raise FormatError(f"{named(path)} has no {CONFIG}: an adapter is a folder that PEFT saved.")
    fields = Fields(path / CONFIG, read_json(path / CONFIG, path))
    _check(fields)
    if not (path / TENSORS).exists():
        raise FormatError(f"{named(path)} has no {TENSORS}. Save the adapter with PEFT's save_pretrained, as safetensors.")
    scales, tensors = Scales.read(fields), _read(path)
    halves: dict[str, dict[str, Tensor]] = defaultdict(dict)
    unknown = []
    for key, tensor in tensors.items():
        match = PARTS.match(key.removeprefix(PREFIX))
        if match is None or tensor.dim() != 2 or not tensor.is_floating_point() or not tensor.numel():
            unknown.append(key)
        else:
            halves[match[1]][match[2]] = tensor
    unknown += [module for module, parts in halves.items() if len(parts) < 2 or len(parts["A"]) != parts["B"].shape[1]]
    if unknown or not halves:
        what = listed(unknown, 4) if unknown else "no tensors"
        raise FormatError(f"{named(path / TENSORS)} has {what}; matrices lora_A [r, in] and lora_B [out, r] are needed.")
    return Adapter(name, path, {module: LowRank(parts["A"], parts["B"]) for module, parts in halves.items()}, scales)


def _check(fields: Fields) -> None:
    kind = fields.read("peft_type", NAME)
    if kind != "LORA":
        raise FormatError(f"{fields.title} is a {named(kind)} adapter; only LORA is supported.")
    if fields.get("bias", NAME, "none") != "none":
        raise FormatError(f"{fields.title} trains biases (bias), which is not supported; give an adapter with bias 'none'.")

    for key, why in CHANGES.items():
        if fields.get(key, ANYTHING, None):
            raise FormatError(f"{fields.title} has {key}: {why}, which is not supported.")


def _read(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(regular_file(path / TENSORS, path), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, RuntimeError, SafetensorError) as err:
        raise FormatError(f"{named(path / TENSORS)} cannot be read: {brief(err)}.") from err


@dataclass(frozen=True)
class Scales:
    """The scale of each module: alpha / r, or alpha / sqrt(r). The rank is that of the matrices, whatever patterns say.

    alphas  by pattern of the module's name
    """

    alpha: float
    alphas: dict[str, float]
    by_root: bool

    @classmethod
    def read(cls, fields: Fields) -> "Scales":
        alphas = fields.get("alpha_pattern", PATTERNS, {})
        for pattern in alphas:
            if PLAIN_PATTERN.fullmatch(pattern) is None:
                raise FormatError(f"{fields.title} has the pattern {named(pattern)!r:.80}; only module names are supported.")
        return cls(fields.get("lora_alpha", ALPHA, 8), alphas, fields.get("use_rslora", FLAG, False))

    def of(self, module: str, rank: int) -> float:
        """Return the scale of a module, of the first pattern that matches the end of its name, as PEFT chooses it."""
        patterns = (value for key, value in self.alphas.items() if re.match(rf"(.*\.)?({key})$", module))
        return next(patterns, self.alpha) / (math.sqrt(rank) if self.by_root else rank)
