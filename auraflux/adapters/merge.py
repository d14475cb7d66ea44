"""`MergingWriter`: writes a model's folder with an adapter added to its weights."""

import re
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from auraflux.adapters.peft_folder import Adapter
from auraflux.adapters.placement import ONE_EXPERT, OTHER_NAMES, STACK
from auraflux.errors import FormatError
from auraflux.weights.convert.mlx_folder import FolderWriter
from auraflux.weights.experts.stacks import ExpertSource
from auraflux.weights.formats.stored import Checkpoint, Stored, dense, is_placeholder
from auraflux.weights.formats.untrusted import listed, named, shown
from auraflux.weights.names import Rename

PROJECTION = re.compile(r"(.+)\.(?:switch_mlp|switch_glu|experts)\.(gate|up|down)_proj\.weight$")
ALTERNATING = "gpt_oss"  # gate and up alternate in its stacks


class Deltas:
    """The changes of an adapter by our names of the weights.

    used  modules of the adapter whose weights were loaded
    """

    def __init__(self, adapter: Adapter, rename: Rename, alternating: bool):
        self.adapter, self.alternating, self.used = adapter, alternating, set[str]()
        self._linears: dict[str, str] = {}
        self._experts: dict[tuple[str, int, str], str] = {}
        self._stacks: dict[str, list[str]] = defaultdict(list)
        for module in adapter.pairs:
            for other in (("", ""), *OTHER_NAMES):
                self._add(module, module.replace(*other) if other[0] else module, rename)

    def _add(self, module: str, path: str, rename: Rename) -> None:
        """Add a module under our name of one of the paths that it may have in a checkpoint."""
        stacked = STACK.match(path)
        if stacked:
            mixture = (rename(f"{stacked[1]}.experts.gate_up_proj") or "").removesuffix(".experts.gate_up_proj")
            self._stacks[mixture] += [] if module in self._stacks[mixture] else [module]
            return
        ours = (rename(f"{path}.weight") or "").removesuffix(".weight")
        one = ONE_EXPERT.match(ours)
        if one:
            self._experts[one[1], int(one[2]), one[3]] = module
        else:
            self._linears[ours] = module

    def linear(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """Return the change of a linear layer; None for none."""
        module = self._linears.get(name)
        return None if module is None else self._product(module, shape)

    def _product(self, module: str, shape: tuple[int, ...]) -> Tensor:
        a, b = self.adapter.pairs[module]
        if (len(b), a.shape[1]) != shape:
            raise FormatError(
                f"the adapter in {named(self.adapter.path)} has {shown(list(b.shape))} times {shown(list(a.shape))} for "
                f"{named(module)}, whose weight is {shown(list(shape))}. It was trained for another model."
            )
        self.used.add(module)
        return b.float() @ a.float() * self.adapter.scales.of(module, len(a))

    def expert(self, mixture: str, kind: str, expert: int, count: int, shape: tuple[int, ...]) -> Tensor | None:
        """Return the change of one expert's projection; None for none."""
        module = self._experts.get((mixture, expert, kind))
        if module is not None:
            return self._product(module, shape)
        for module in self._stacks.get(mixture, ()):
            a, b = self.adapter.pairs[module]
            parts = len(b) // shape[0]
            # gate and up share a stack, where there is a gate
            if (
                a.shape[1] == shape[1]
                and len(b) == parts * shape[0]
                and parts <= (1 if kind == "down" else 2)
                and len(a) % count == 0
            ):
                return self._of_stack(module, kind, expert, count, parts)
        return None

    def _of_stack(self, module: str, kind: str, expert: int, count: int, parts: int) -> Tensor:
        a, b = self.adapter.pairs[module]
        self.used.add(module)
        rank, parameter = len(a) // count, "down_proj" if kind == "down" else "gate_up_proj"
        path = STACK.sub(r"\1.experts", module)
        scale = self.adapter.scales.of(f"{path}.{parameter}", rank)
        rows = b.float().view(len(b), rank, count)[:, :, expert] * scale
        if parts == 2:
            half = 0 if kind == "gate" else 1
            rows = rows[half::2] if self.alternating else rows.chunk(2)[half]
        return rows @ a.float().view(count, rank, -1)[expert]


class MergingWriter(FolderWriter):
    """A writer that adds an adapter to the weights before they are quantized."""

    def __init__(self, checkpoint: Checkpoint, rename: Rename, *args: Any, adapter: Adapter, **options: Any):
        super().__init__(checkpoint, rename, *args, **options)
        self.deltas = Deltas(adapter, rename, checkpoint.config.get("model_type") == ALTERNATING)

    def _take(self, name: str, shape: tuple[int | None, ...], index: int | None = None) -> Stored:
        found = super()._take(name, shape, index)
        if index is not None or is_placeholder(found) or len(found.shape) != 2:
            return found
        return _sum(found, self.deltas.linear(name.removesuffix(".weight"), tuple(found.shape)))

    def stack(self, name: str, count: int, source: ExpertSource) -> Stored:
        """Load all experts' matrices of one projection with their changes."""
        match = PROJECTION.match(name)

        def merged(expert: int) -> Stored:
            found = source.matrix(expert)
            if match is None or is_placeholder(found):
                return found
            return _sum(found, self.deltas.expert(match[1], match[2], expert, count, tuple(found.shape)))

        return super().stack(name, count, ExpertSource(merged, source.release))

    def check_loaded(self) -> None:
        """Also raise an error for modules of the adapter that the model does not have."""
        super().check_loaded()
        adapter = self.deltas.adapter
        if missing := sorted(set(adapter.pairs) - self.deltas.used):
            raise FormatError(
                f"the adapter in {named(adapter.path)} changes {listed(missing, 4)}, which the model does not have."
            )


def _sum(found: Stored, delta: Tensor | None) -> Stored:
    if delta is None:
        return found
    dtype = found.dtype if isinstance(found, Tensor) and found.is_floating_point() else torch.float32
    return (dense(found).float() + delta).to(dtype)
