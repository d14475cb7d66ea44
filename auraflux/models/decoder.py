"""The skeleton of every model: an embedding, layers around a residual stream, a norm, and the scores of the next token.

A layer is a mixer (attention, or what takes its place) and an MLP (or a mixture of experts). Each reads the stream through a
norm and gives a delta to be added to it. The delta waits for the next norm, since one op adds and normalises: between layers
stream and delta go together, and the delta is None where nothing waits.

A family supplies `make_mixer` and `make_mlp`, and overrides what else is its own.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from auraflux.cache import Batch, Beside, Cache
from auraflux.models.mtp import MTP, Place
from auraflux.ops import add_norm_linears, add_norm_scores, add_rms_norm, combine, embed, linear, linears, rms_norm
from auraflux.weights.loader import Weights
from auraflux.weights.stored import Stored
from auraflux.weights.streamed import Guess

# towers for images and sound and what joins them to the text
UNUSED = re.compile(
    r"^(model\.)?(visual|vision_tower|vision_model|vision_embedder|audio_tower|embed_vision|embed_audio"
    r"|mm_projector|multi_modal_projector)\.|rotary_emb\."
)
Biases = Sequence[Tensor | None] | None
Residual = tuple[Tensor, Tensor | None]  # the stream and what is still to be added to it, both [T, H]


class Stream(NamedTuple):
    """What a mixer or an MLP reads: the residual stream, what is still to be added to it, and the norm over their sum.

    x      [T, H]
    delta  [T, H] or None
    norm   [H]
    """

    x: Tensor
    delta: Tensor | None
    norm: Tensor
    eps: float

    def normed(self) -> tuple[Tensor, Tensor]:
        """The sum, and its norm."""
        if self.delta is None:
            return self.x, rms_norm(self.x, self.norm, self.eps)
        h, total = add_rms_norm(self.delta, self.x, self.norm, self.eps)
        return total, h

    def linears(self, weights: Sequence[Stored], biases: Biases = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The sum, and products of its norm, see `add_norm_linears`."""
        return add_norm_linears(*self, weights, biases)

    def scores(self, weights: Sequence[Stored], biases: Biases = None) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """The norm, the sum, and products of the norm, see `add_norm_scores`."""
        return add_norm_scores(*self, weights, biases)


class Given(NamedTuple):
    """What a mixer or an MLP reads where a layer has made it ready, and what it gives is added to nothing.

    x  [T, H]
    """

    x: Tensor

    def linears(self, weights: Sequence[Stored], biases: Biases = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The same and its products."""
        return self.x, linears(self.x, weights, biases)

    def scores(self, weights: Sequence[Stored], biases: Biases = None) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """The same, zeros for the sum, and products."""
        return self.x, torch.zeros_like(self.x), linears(self.x, weights, biases)


class Mixer(Protocol):
    """Attention, or what takes its place: the part of a layer that reads other tokens.

    tells_apart  whether it is given the parts of a step together, see `Beside`, and not one after the other
    """

    tells_apart: bool = False

    def __call__(self, stream: Stream, batch: Any, store: Any) -> tuple[Tensor, Tensor]:
        """Give the stream with all that was to be added to it, and what comes next, both [T, H]."""

    def remember(self, stream: Stream, batch: Batch, store: Any) -> Any:
        """Store what later tokens will read; the rest of the work may be left out."""


class FeedForward(Protocol):
    """An MLP or a mixture of experts: the part of a layer that sees each token by itself."""

    def __call__(self, stream: Stream) -> Residual:
        """Give the stream with all that was to be added to it, and what comes next, if it is not added yet."""

    def announce(self, following: Guess | None, norm: Tensor, eps: float) -> Guess | None:
        """Hear how to guess the next mixture's experts; give how to guess those of the first mixture from this layer on."""
        return following


@dataclass(frozen=True, eq=False)
class Layer:
    """A mixer, then an MLP, each behind a norm."""

    mixer_norm: Tensor
    mixer: Mixer
    mlp_norm: Tensor
    mlp: FeedForward
    eps: float

    def __call__(self, x: Tensor, delta: Tensor | None, batch: Batch | Beside, store: Any) -> Residual:
        if self.mixer.tells_apart:
            x, delta = self._mixed(batch, x, delta, store)
        else:
            x, delta = batch.apart(lambda part, x, delta: self._mixed(part, x, delta, store), x, delta)
        return self.mlp(Stream(x, delta, self.mlp_norm, self.eps))

    def _mixed(self, batch: Batch | Beside, x: Tensor, delta: Tensor | None, store: Any) -> tuple[Tensor, Tensor]:
        return self.mixer(Stream(x, delta, self.mixer_norm, self.eps), batch, store)

    def remember(self, x: Tensor, delta: Tensor | None, batch: Batch, store: Any) -> None:
        """Run only the part that stores something."""
        self.mixer.remember(Stream(x, delta, self.mixer_norm, self.eps), batch, store)


class Config(Protocol):
    """What the skeleton wants to know of a family's config."""

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
    """Embedding, layers, norm and head; or some consecutive layers, and the rest only where these are the first.

    norms  of a layer, as checkpoints name them: before its mixer, and before its MLP
    shift  of the norms' weights, see `Weights.vector`
    span   the numbers of its layers
    whole  why its layers cannot be on several ranks; None where they can, see `unsliced` for their heads
    again  whether a layer may be given a token again, which it then stores at the same place, see `at_ends`
    beside whether a step of writing and a piece of a prompt may go through its layers as one, see `write_beside`
    mtp    the layer that predicts further tokens; None where it is not wanted
    """

    norms = "input_layernorm", "post_attention_layernorm"
    shift = 0.0
    whole: str | None = None
    again = False
    beside = False

    def __init__(self, config: ConfigT, weights: Weights):
        self.config, self.dtype = config, weights.dtype
        self.span = weights.span or range(config.layers)
        for index in set(range(config.layers)) - set(self.span):
            weights.skip_under(f"model.layers.{index}.")
        if self.span.start == 0:
            self.table = weights.matrix("model.embed_tokens", config.vocab, config.hidden)
        self.layers = [self._layer(weights, f"model.layers.{index}", index) for index in self.span]
        if self.span.start == 0:
            self.make_end(weights)
            self.head = self._head(weights)
        else:
            weights.skip("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
        self._announce()
        self.mtp = self._mtp(weights, self.mtp_place(config))

    @classmethod
    def unsliced(cls, config: ConfigT) -> str | None:
        """Why its heads cannot be on several ranks; None where they can."""
        return None

    @classmethod
    def mtp_place(cls, config: ConfigT) -> Place | None:
        """Where checkpoints have the layer that predicts further tokens; None where there is none that is known."""
        return None

    @abstractmethod
    def make_mixer(self, weights: Weights, name: str, index: int) -> Mixer:
        """Attention, or what takes its place, of the layer under a name such as model.layers.3."""

    @abstractmethod
    def make_mlp(self, weights: Weights, name: str, index: int) -> FeedForward:
        """The MLP or mixture of the layer under a name such as model.layers.3."""

    def make_norm(self, weights: Weights, name: str) -> Tensor:
        """The weight of a norm over the stream, [H]."""
        return weights.vector(f"{name}.weight", self.config.hidden, shift=self.shift)

    def make_end(self, weights: Weights) -> None:
        """Take what comes between the last layer and the head."""
        self.norm = self.make_norm(weights, "model.norm")

    def _layer(self, weights: Weights, name: str, index: int) -> Layer:
        mixer_norm, mlp_norm = (self.make_norm(weights, f"{name}.{norm}") for norm in self.norms)
        mixer, mlp = self.make_mixer(weights, name, index), self.make_mlp(weights, name, index)
        return Layer(mixer_norm, mixer, mlp_norm, mlp, self.config.eps)

    def _mtp(self, weights: Weights, place: Place | None) -> MTP | None:
        if place is None:
            return None
        made = None
        if weights.mtp:
            token_norm, hidden_norm, norm = (
                self.make_norm(weights, name) for name in (place.token_norm, place.hidden_norm, place.norm)
            )
            joint = weights.matrix(place.joint, self.config.hidden, 2 * self.config.hidden)
            layer = self._layer(weights, place.layer, place.like)
            made = MTP(token_norm, hidden_norm, joint, layer, norm, self.config.eps)
        for prefix in place.beyond:
            weights.skip_under(prefix)
        return made

    def _head(self, weights: Weights) -> Stored:
        """The matrix that scores the next token: the embedding's own where the two are tied, or where another rank scores."""
        if not self.config.tied and weights.slices.first:
            return weights.matrix("lm_head", self.config.vocab, self.config.hidden)
        weights.skip("lm_head.weight")
        return self.table

    def _announce(self) -> None:
        """Tell each mixture how to guess what the next one will ask for."""
        guess: Guess | None = None
        for layer in reversed(self.layers):
            guess = layer.mlp.announce(guess, layer.mlp_norm, layer.eps)

    def __call__(self, ids: Tensor, batch: Batch, cache: Cache) -> Tensor:
        """Run the new tokens of a batch: ids [T] -> [T, H], after the last norm."""
        return self.normed(*self.carried(ids, batch, cache, len(self.layers)))

    def normed(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """What comes out of the last layer, after the last norm: [T, H]."""
        return Stream(x, delta, self.norm, self.config.eps).normed()[1]

    def part(self, x: Tensor, batch: Batch, cache: Cache) -> Tensor:
        """Run tokens (ids [T] for the first layers) through these layers: [T, H], nothing still to be added.

        Of a silent batch's last layer only what it keeps is wanted, and what is given means nothing.
        """
        stream = self.embedded(x) if self.span.start == 0 else x
        last = batch.silent and self.span.stop == self.config.layers
        stream, delta = self.through(stream, batch, cache, len(self.layers) - last)
        if last:
            self.layers[-1].remember(stream, delta, batch, cache.layers[-1])
        return stream if delta is None else combine(stream, delta)

    def remember(self, ids: Tensor, batch: Batch, cache: Cache) -> None:
        """Run tokens after which nobody asks what follows: of the last layer that keeps something only that is wanted."""
        last = len(cache.layers) - 1
        self.layers[last].remember(*self.carried(ids, batch, cache, last), batch, cache.layers[last])

    def at_ends(self, ids: Tensor, batch: Batch, cache: Cache) -> Tensor:
        """Run tokens of which only each sequence's last is asked what follows: its final hidden state, [B, H]."""
        last = len(self.layers) - 1
        layer, store = self.layers[last], cache.layers[last]
        x, delta = self.carried(ids, batch, cache, last)
        layer.remember(x, delta, batch, store)
        places = batch.turn_to_ends()
        return self.normed(*layer(x[places], None if delta is None else delta[places], batch, store))

    def write_beside(self, ids: Tensor, both: Beside, cache: Cache) -> Tensor:
        """Run a step of writing beside a piece of a prompt: the final hidden states of what is written, [B, H]."""
        last = len(self.layers) - 1
        layer, store = self.layers[last], cache.layers[last]
        x, delta = self.carried(ids, both, cache, last)
        (written, read), (written_delta, read_delta) = both.split(x), both.split(delta)
        layer.remember(read, read_delta, both.reading, store)
        return self.normed(*layer(written, written_delta, both.writing, store))

    def carried(self, ids: Tensor, batch: Batch | Beside, cache: Cache, count: int) -> Residual:
        """Run tokens through the first layers: the stream and what is still to be added to it, both [T, H]."""
        return self.through(self.embedded(ids), batch, cache, count)

    def through(self, x: Tensor, batch: Batch | Beside, cache: Cache, count: int) -> Residual:
        """Run the stream through so many layers: with what is still to be added to it, both [T, H]."""
        delta: Tensor | None = None
        for layer, number in zip(self.layers[:count], self.span, strict=False):
            x, delta = layer(x, delta, batch, cache.layers[number])
        return x, delta

    def embedded(self, ids: Tensor) -> Tensor:
        """Begin the stream: [T] -> [T, H]."""
        return embed(ids, self.table).to(self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Score the next token: [N, H] -> [N, V] float32."""
        return linear(hidden, self.head).float()


def text_name(name: str) -> str | None:
    """The name of a tensor of the text part; None for those of other parts, and for rotary frequencies, which configs tell."""
    if UNUSED.search(name):
        return None
    # beside a vision tower transformers says model.language_model.layers, all others language_model.model.layers
    return name.removeprefix("language_model.").replace("model.language_model.", "model.")
