"""Dense modules: linear layers that make the embedding of pooled hidden states, as in sentence-transformers.

They lie in folders of their own beside the model, or as tensors `dense.0.weight`, `dense.1.weight` in a GGUF file.
"""

from dataclasses import dataclass
from itertools import count, pairwise, takewhile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.weights.fields import WIDTH
from auraflux.weights.formats.embedding import Embedding, activation_of, dense_config
from auraflux.weights.formats.stored import Checkpoint, dense
from auraflux.weights.formats.untrusted import FLAG, brief, named, regular_file, shown

WEIGHTS = "model.safetensors"


@dataclass(frozen=True, eq=False)
class DenseModule:
    """activation(weight x + bias), in float32.

    weight      [O, I]
    bias        [O] or None
    activation  name in torch.nn
    """

    weight: Tensor
    bias: Tensor | None = None
    activation: str = "Identity"

    def __call__(self, x: Tensor) -> Tensor:
        return getattr(torch.nn, self.activation)()(torch.nn.functional.linear(x, self.weight, self.bias))


def load_dense_modules(
    checkpoint: Checkpoint, embedding: Embedding | None, hidden: int, device: torch.device
) -> list[DenseModule]:
    """Load the Dense modules of a model; refuse those whose widths do not follow each other, from hidden states on."""
    if embedding is None or embedding.refusal is not None:
        return []
    path = checkpoint.path
    if path.is_dir():
        found = [_of_folder(path, folder, device) for folder in embedding.dense]
    else:
        names = takewhile(checkpoint.sizes().__contains__, (f"dense.{number}.weight" for number in count()))
        found = [DenseModule(dense(checkpoint.load(name)).float().to(device)) for name in names]
    widths = [hidden, *(size for module in found for size in reversed(module.weight.shape))]
    if any(before != after for before, after in list(pairwise(widths))[::2]):
        raise FormatError(f"the Dense modules of {named(path)} do not follow each other: {hidden} wide, then {widths[1:]}.")
    return found


def _of_folder(path: Path, folder: str, device: torch.device) -> DenseModule:
    config, file = dense_config(path, folder), path / folder / WEIGHTS
    shape = config.read("out_features", WIDTH), config.read("in_features", WIDTH)
    shapes = {"linear.weight": shape, "linear.bias": shape[:1]} if config.get("bias", FLAG, True) else {"linear.weight": shape}
    try:
        with safe_open(regular_file(file, path), "pt") as opened:
            stored = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
            if stored != shapes:
                raise FormatError(f"{named(file)} has tensors {shown(stored)}; its config needs {shown(shapes)}.")
            tensors = {name: opened.get_tensor(name).float().to(device) for name in shapes}
    except (OSError, SafetensorError) as err:
        raise FormatError(f"{named(file)} cannot be read as safetensors: {brief(err)}.") from err
    return DenseModule(tensors["linear.weight"], tensors.get("linear.bias"), activation_of(config))
