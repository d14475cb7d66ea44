"""The skeleton of every model: token embedding, decoder layers around a residual stream, final norm and LM head.

A family supplies `make_mixer` and `make_mlp`, and overrides other methods where it differs.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from auraflux.adapters.linears import linear
from auraflux.cache import Batch, Cache, Logits, MixedBatch
from auraflux.models.layer import FeedForward, Layer, LayerInput, Mixer, Residual
from auraflux.models.mtp import MTPHead, MTPNames
from auraflux.ops import combine, embed
from auraflux.weights.experts.resident import ExpertPredictor
from auraflux.weights.formats.stored import Stored
from auraflux.weights.loader import Weights

# names in checkpoints of embedding models
HEADLESS = re.compile(r"(layers\.\d+\.|embed_tokens\.|norm\.weight$)")
# vision and audio towers and their projectors, and the Dense modules of embedding models
UNUSED = re.compile(
    r"^(model\.)?(visual|vision_(tower|model|embedder|adapter|projection)|audio_tower|embed_vision|embed_audio"
    r"|mm_projector|multi_modal_projector|dense\.\d+)\.|rotary_emb\."
)


class Config(Protocol):
    """The fields that the skeleton reads of a family's config."""

    @property
    def hidden(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def eps(self) -> float: ...
    @property
    def tied(self) -> bool: ...


ConfigT = TypeVar("ConfigT", bound=Config)


class Decoder(ABC, Generic[ConfigT]):
    """Embedding, layers, final norm and head; or one pipeline stage, of which the first has the embedding, norm and head.

    norms                 a layer's norms as checkpoints name them: before the mixer, and before the MLP
    shift                 added to the norms' weights, see `Weights.vector`
    span                  the numbers of the layers that are here
    supports_mixed_batch  a step may have a decode and a prefill part; derived from the layers
    by_context            keys depend on the context of the KV cache; derived from the layers
    idempotent_append     attention layers may append a token twice at one position, which last-token logits need
    mtp                   the MTP head; None where it is not loaded
    notes                 remarks for the user on the weights
    """

    norms = "input_layernorm", "post_attention_layernorm"
    shift = 0.0
    idempotent_append = False
    notes: Sequence[str] = ()

    def __init__(self, config: ConfigT, weights: Weights):
        self.config, self.dtype = config, weights.dtype
        self.span = weights.span or range(config.layers)
        for index in set(range(config.layers)) - set(self.span):
            weights.skip_prefix(f"model.layers.{index}.")
        if self.span.start == 0:
            self.table = weights.matrix("model.embed_tokens", config.vocab, config.hidden)
        self.layers = [self._layer(weights, f"model.layers.{index}", index) for index in self.span]
        self.supports_mixed_batch = all(layer.supports_mixed_batch for layer in self.layers)
        if self.span.start == 0:
            self.make_final_norm(weights)
            self.head = self._head(weights)
        else:
            weights.skip("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
        self.by_context = any(layer.mixer.by_context for layer in self.layers)
        self._link_prefetch()
        self.mtp = self._mtp(weights, self.mtp_names(config))

    @classmethod
    def no_tensor_parallel(cls, config: ConfigT) -> str | None:
        """Return the reason against tensor parallelism; None where it works."""
        return None

    @classmethod
    def no_pipeline_parallel(cls, config: ConfigT) -> str | None:
        """Return the reason against pipeline parallelism; None where it works."""
        return None

    @classmethod
    def mtp_names(cls, config: ConfigT) -> MTPNames | None:
        """Return the names of the MTP head's tensors; None where checkpoints have no known MTP head."""
        return None

    @abstractmethod
    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        """Make the mixer of the layer under a name such as model.layers.3."""

    @abstractmethod
    def make_mlp(self, weights: Weights, name: str, index: int) -> FeedForward:
        """Make the MLP or mixture of the layer under a name such as model.layers.3."""

    def make_norm(self, weights: Weights, name: str) -> Tensor:
        """Load the weight of a norm over the residual stream, [H]."""
        return weights.vector(f"{name}.weight", self.config.hidden, shift=self.shift)

    def make_final_norm(self, weights: Weights) -> None:
        """Load the weights between the last layer and the head."""
        self.norm = self.make_norm(weights, "model.norm")

    def _layer(self, weights: Weights, name: str, index: int) -> Layer:
        mixer_norm, mlp_norm = (self.make_norm(weights, f"{name}.{norm}") for norm in self.norms)
        mixer, mlp = self.make_mixer(weights, name, index), self.make_mlp(weights, name, index)
        return Layer(mixer_norm, mixer, mlp_norm, mlp, self.config.eps)

    def _mtp(self, weights: Weights, names: MTPNames | None) -> MTPHead | None:
        if names is None:
            return None
        made = None
        if weights.mtp:
            token_norm, hidden_norm, norm = (
                self.make_norm(weights, name) for name in (names.token_norm, names.hidden_norm, names.norm)
            )
            projection = weights.matrix(names.projection, self.config.hidden, 2 * self.config.hidden)
            layer = self._layer(weights, names.layer, names.like)
            made = MTPHead(token_norm, hidden_norm, projection, layer, norm, self.config.eps)
        for prefix in names.prefixes:
            weights.skip_prefix(prefix)
        return made

    def _head(self, weights: Weights) -> Stored:
        """Load the LM head: the embedding where the two are tied, or where another rank computes logits.

        A file may have a head that differs from the embedding although its config ties them; the head is used then.
        """
        tied, both = self.config.tied, ("lm_head.weight", "model.embed_tokens.weight")
        if tied and all(map(weights.has, both)) and not weights.equal(*both):
            tied, weights.has_untied_head = False, True
        if not tied and weights.slices.first:
            return weights.matrix("lm_head", self.config.vocab, self.config.hidden)
        weights.skip("lm_head.weight")
        return self.table

    def _link_prefetch(self) -> None:
        """Give each mixture the predictor of the next mixture's experts."""
        predictor: ExpertPredictor | None = None
        for layer in reversed(self.layers):
            predictor = layer.mlp.link_prefetch(predictor, layer.mlp_norm, layer.eps)

    def forward(self, ids: Tensor, batch: Batch | MixedBatch, cache: Cache) -> Tensor:
        """Run a step: ids [T] -> the final hidden states of the tokens that need logits, [N, H]; see `Batch.logits`."""
        found = self._forward(ids, batch, cache)
        return torch.empty(0, device=ids.device) if found is None else self.final_norm(*found)

    def forward_stage(self, x: Tensor, batch: Batch, cache: Cache) -> Tensor:
        """Run a pipeline stage: ids [T] in the first, [T, H] in the others -> hidden states before the final norm, [T, H]."""
        found = self._forward(x, batch, cache)
        if found is None:
            return torch.empty(0, device=x.device)
        x, delta = found
        return x if delta is None else combine(x, delta)

    def _forward(self, x: Tensor, batch: Batch | MixedBatch, cache: Cache) -> Residual | None:
        """Run all layers that are here; the last of the model computes its output only for tokens that need logits."""
        if batch.logits is Logits.ALL or self.span.stop < self.config.layers:
            return self.run_layers(x, batch, cache, len(self.layers))
        # layers after the last one with a cache append nothing
        last = len(cache.layers) - 1 - self.span.start
        layer, store = self.layers[last], cache.layers[-1]
        x, delta = self.run_layers(x, batch, cache, last)
        layer.update_cache(*batch.append_only(x, delta), store)
        needed = batch.with_logits(x, delta)
        return None if needed is None else layer(*needed, store)

    def run_layers(self, x: Tensor, batch: Batch | MixedBatch, cache: Cache, count: int) -> Residual:
        """Run the first `count` layers that are here: ids [T] or, in later pipeline stages, [T, H] -> [T, H] and delta."""
        if self.span.start == 0:
            x = batch.put_embeddings(self.embed_tokens(x))
        delta: Tensor | None = None
        for layer, number in zip(self.layers[:count], self.span, strict=False):
            x, delta = layer(x, delta, batch, cache.layers[number])
        return x, delta

    def prefill_by_layers(self, parts: Sequence[tuple[Tensor, Batch]], cache: Cache) -> None:
        """Append the tokens of all parts to the cache, ids [T] each; every part goes through a layer before the next layer."""
        # layers after the last one with a cache append nothing
        last = len(cache.layers) - 1
        found = [self.run_layers(ids, batch, cache, 0) for ids, batch in parts]
        for layer, store in zip(self.layers[:last], cache.layers, strict=False):
            for at, (_, batch) in enumerate(parts):
                found[at] = layer(*found[at], batch, store)
        for residual, (_, batch) in zip(found, parts, strict=True):
            self.layers[last].update_cache(*residual, batch, cache.layers[last])

    def embed_tokens(self, ids: Tensor) -> Tensor:
        """Start the residual stream: [T] -> [T, H]."""
        return embed(ids, self.table).to(self.dtype)

    def final_norm(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """Normalise the output of the last layer: [T, H]."""
        return LayerInput(x, delta, self.norm, self.config.eps).normed()[1]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the next token: [N, H] -> [N, V] float32."""
        return linear(hidden, self.head).float()


def text_name(name: str) -> str | None:
    """Return the name of a text model's tensor; None for other towers, and for rotary frequencies, which the config gives."""
    if UNUSED.search(name):
        return None
    # multimodal checkpoints say model.language_model.layers (transformers) or language_model.model.layers (others)
    ours = name.removeprefix("language_model.").replace("model.language_model.", "model.")
    # checkpoints of embedding models hold no head, and begin their names below "model"
    return f"model.{ours}" if HEADLESS.match(ours) else ours
