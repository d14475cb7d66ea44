"""llama.cpp's mmproj files: the tower of a model in GGUF, read as a checkpoint with Hugging Face's names and config."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.quant import QTensor
from auraflux.vision.projectors import EDGE, PROJECTORS, SIDE, Projector, TokenID, TowerMetadata
from auraflux.weights.experts.packed_files import ExpertFiles
from auraflux.weights.experts.row_table import TablePart
from auraflux.weights.fields import NAME, WIDTH, ConfigFile, Fields
from auraflux.weights.formats.gguf import convert, dense_tensor
from auraflux.weights.formats.gguf_reader import contents, read_header
from auraflux.weights.formats.stored import Stored
from auraflux.weights.formats.untrusted import integer, list_of, named, number

CHANNELS = list_of(number(-10, 10), 3)
PIXELS = integer(1, 1 << 32)
BLOCK = re.compile(r"v\.blk\.(\d+)\.([a-z0-9_]+)\.(.+)")


class MMProjFile:
    """A tower in a GGUF file, as a checkpoint of the model that it belongs to.

    kind    clip.projector_type
    images  what a preprocessor_config.json would say
    """

    form = "gguf"
    experts: ExpertFiles | None = None

    def __init__(self, path: Path, text: Mapping[str, Any], token_id: TokenID):
        self.path, reader = path, read_header(path)
        self._found = {tensor.name: tensor for tensor in reader.tensors}
        shapes = {tensor.name: tuple(int(size) for size in reversed(tensor.shape)) for tensor in reader.tensors}
        found = {key: contents(field) for key, field in reader.fields.items() if not key.startswith("GGUF.")}
        # the file stores float32: 9.999999747e-6 means 1e-5
        fields = Fields(path, {key: _shortest(value) for key, value in found.items()})
        self._metadata = meta = TowerMetadata(fields, shapes, text)
        self.kind = fields.get("clip.projector_type", NAME, fields.get("clip.vision.projector_type", NAME, ""))
        projector = _projector(self.kind, meta)
        self._names = {ours: each for each in self._found if (ours := self._name(each, projector))}
        vision, outer = projector.config(meta, token_id)
        outer |= {"model_type": projector.model_types[text["model_type"]]}
        self.config: dict[str, Any] = ConfigFile({**outer, "text_config": dict(text), "vision_config": vision}, path)
        self.images = Fields(path, self._image_settings())

    def _name(self, name: str, projector: Projector) -> str | None:
        """Return Hugging Face's name of a tensor; None for one that the tower does not use."""
        found = BLOCK.fullmatch(name)
        if found is not None:
            module = projector.layer.get(self._unswapped(found[2]))
            return None if module is None else f"{projector.prefix}{found[1]}.{_parameter(module, found[3])}"
        module, _, part = name.rpartition(".")
        if name in projector.others:
            return projector.others[name]
        return _parameter(projector.others[module], part) if module in projector.others else None

    def _unswapped(self, module: str) -> str:
        """Return which linear layer of an MLP a name means: older files of Gemma 3 have the two the other way around."""
        meta, other = self._metadata, {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
        if self.kind != "gemma3" or module not in other:
            return module
        swapped = meta.shape("v.blk.0.ffn_up.weight")[-1] != meta.read("embedding_length", WIDTH)
        return other[module] if swapped else module

    def _image_settings(self) -> dict[str, Any]:
        edge = self._metadata.get("image_size", EDGE, None)
        settings: dict[str, Any] = {
            "image_mean": self._metadata.get("image_mean", CHANNELS, None),
            "image_std": self._metadata.get("image_std", CHANNELS, None),
            "min_pixels": self._metadata.get("image_min_pixels", PIXELS, None),
            "max_pixels": self._metadata.get("image_max_pixels", PIXELS, None),
        }
        if self.kind == "gemma3":
            settings["size"] = {"height": edge, "width": edge}
        if self.kind == "pixtral":
            settings["size"] = {"longest_edge": edge}
        if self.kind == "kimik25" and settings["max_pixels"] is not None:
            settings["max_patches"] = settings["max_pixels"] // self._metadata.read("patch_size", SIDE) ** 2
        return settings

    @property
    def notes(self) -> list[str]:
        return []

    def files(self) -> list[Path]:
        return [self.path]

    def sizes(self) -> dict[str, int]:
        return {ours: int(self._found[name].n_bytes) for ours, name in self._names.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        found = self._metadata.shape(self._names[name])
        if self._is_frames(name):
            return (*found[:2], 2, *found[2:])
        if name.endswith("patch_embedder.input_proj.weight"):
            return found[0], found[1] * found[2] * found[3]
        return () if name.endswith(("_min", "_max")) and found == (1,) else found

    def load(self, name: str) -> Stored:
        made = self._dense(self._names[name])
        if self._is_frames(name):
            # a convolution over two frames is stored as two
            return torch.stack([made, self._dense(f"{self._names[name]}.1")], 2)
        if name.endswith("patch_embedder.input_proj.weight"):
            return made.permute(0, 2, 3, 1).reshape(len(made), -1)
        if self.kind == "pixtral" and name.endswith(("q_proj.weight", "k_proj.weight")):
            # llama.cpp rotates adjacent channels, the tower those of the two halves of a head
            return made.view(self._metadata.heads, -1, 2, made.shape[1]).transpose(1, 2).reshape(made.shape)
        if ".wqkv." in name:
            return self._interleaved(made)
        return made - 1 if name.endswith("mm_soft_emb_norm.weight") else made.view(self.shape(name))

    def _interleaved(self, made: Tensor) -> Tensor:
        """Return queries, keys and values with the channels of rows among those of columns, which llama.cpp takes apart."""
        *turned, values = made.chunk(3)
        turned = [each.unflatten(0, (self._metadata.heads, 2, -1, 2)).transpose(1, 2).flatten(0, 3) for each in turned]
        return torch.cat([*turned, values])

    def load_one(self, name: str, index: int) -> Stored:
        return self._dense(self._names[name])[index]

    def load_interleaved(self, name: str, lanes: int, expands_scales: bool) -> QTensor | None:
        """Return None: a tower's weights are dense."""
        return None

    def release(self, name: str) -> None:
        """Do nothing: the file is small."""

    def table_part(self, name: str) -> TablePart:
        raise FormatError(f"{name} in {self.path} does not support row reads.")

    def unmap(self, names: Sequence[str]) -> None:
        """Do nothing: one file holds all tensors."""

    def _is_frames(self, name: str) -> bool:
        return name.endswith("patch_embed.proj.weight") and f"{self._names[name]}.1" in self._found

    def _dense(self, name: str) -> Tensor:
        tensor, shape = self._found[name], self._metadata.shape(name)
        found = dense_tensor(tensor)
        if found is None:
            stored = convert(tensor.data, tensor.tensor_type.name)
            if stored is None:
                raise FormatError(f"{named(self.path)} has {name} of type {tensor.tensor_type.name}, which is not supported.")
            found = stored.dequantize(torch.float32)
        return found.reshape(shape)


def _parameter(module: str, part: str) -> str:
    """Return the name of a module's parameter; the ranges of a clipped linear layer are those of the module around it."""
    if part.startswith(("input_", "output_")):
        return f"{module.removesuffix('.linear')}.{part}"
    return f"{module}.{part}"


def _projector(kind: str, meta: TowerMetadata) -> Projector:
    """Return the mapping of a type; refuse one that is not supported, or belongs to another model."""
    if kind not in PROJECTORS:
        raise FormatError(f"{meta.title} has clip.projector_type {kind!r:.80}; {', '.join(PROJECTORS)} are supported.")
    model_type = meta.text.get("model_type")
    if model_type not in PROJECTORS[kind].model_types:
        raise FormatError(f"{meta.title} has a tower of type {kind}, which is not one of a {model_type} model.")
    output, hidden = meta.read("projection_dim", WIDTH), meta.text["hidden_size"]
    if output != hidden:
        raise FormatError(f"{meta.title} projects to {output} channels, and the language model has {hidden}.")
    return PROJECTORS[kind]


def _shortest(value: Any) -> Any:
    if isinstance(value, list):
        return [_shortest(each) for each in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value
