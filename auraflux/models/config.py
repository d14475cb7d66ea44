"""Read config.json: families name the kind and the limits of each key where they read it.

A value that does not fit, and a key that is missing, are errors that name the file and the key. Keys that several families read
in the same way have a method of `Keys`.
"""

from collections.abc import Mapping
from typing import Any

from auraflux.errors import FormatError
from auraflux.weights.fields import (
    COUNT,
    EPS,
    EXPERTS,
    LAYER_COUNT,
    MOST_LAYERS,
    NAME,
    NAMES,
    POSITIONS,
    THETA,
    WIDTH,
    ConfigFile,
    Fields,
    fields_of,
)
from auraflux.weights.formats.untrusted import FLAG, OBJECT, Kind, either, integer, list_of, listed, named, shown

# multimodal wrappers; their text_config names the text model
WRAPPERS = {"mistral3": "mistral"}
VOCABULARY = integer(1, 1 << 24)
SLIDING_WINDOW = integer(0, 1 << 24)
EXPERTS_BY_LAYER = either(EXPERTS, list_of(EXPERTS, MOST_LAYERS))
# of the key num_experts_per_tok
OTHER_NAMES = "moe_k", "top_k_experts", "num_experts_per_token", "moe_top_k"
LISTED = "moe_topk"  # another, which may be a list
NESTED = "ffn_config"  # DBRX has it in a section


def text_type(config: dict[str, Any]) -> str | None:
    """Return the model_type that says what the text part is."""
    outer, inner = _parts(config)
    kind = outer.get("model_type", NAME, None)
    return inner.get("model_type", NAME, WRAPPERS[kind]) if kind in WRAPPERS else kind


def _parts(config: dict[str, Any]) -> tuple[Fields, Fields]:
    """Return the keys of config.json, and those under `text_config`."""
    outer = fields_of(config, "config.json")
    return outer, Fields(outer.where, outer.get("text_config", OBJECT, {}))


class Keys(Fields):
    """The keys of a config.json, those under `text_config` before those around it.

    outer    the keys around `text_config` alone
    aliases  keys that families read -> what the file calls them
    """

    def __init__(self, config: dict[str, Any], aliases: Mapping[str, str] | None = None):
        self.kind = text_type(config)
        self.outer, _ = _parts(config)
        super().__init__(self.outer.where, {**config, **(config.get("text_config") or {})})
        self._aliases = dict(aliases or {})

    def _value(self, key: str) -> Any:
        found = self._found.get(self._aliases.get(key, key))
        return self._found.get(key) if found is None else found

    def name_of(self, key: str) -> str:
        other = self._aliases.get(key, key)
        return key if self._found.get(other) is None and self._found.get(key) is not None else other

    def changed(self, changes: Mapping[str, Any]) -> "Keys":
        """Return the same keys with some values replaced, None for missing."""
        flat = {**self._found, "text_config": None, "model_type": self.kind, **changes}
        return Keys(ConfigFile(flat, self.where), self._aliases)

    @property
    def found(self) -> ConfigFile:
        """All keys as a file's contents."""
        return ConfigFile(self._found, self.where)

    @property
    def title(self) -> str:
        return f"{named(self.where)} of model_type {self.kind!r}"

    def missing(self, key: str, kind: Kind[Any]) -> FormatError:
        return FormatError(f"{self.title} has no {self.name_of(key)!r}. The keys it has: {listed(sorted(self._found), 100)}.")

    @property
    def layers(self) -> int:
        return self.read("num_hidden_layers", LAYER_COUNT)

    @property
    def hidden(self) -> int:
        return self.read("hidden_size", WIDTH)

    @property
    def inner(self) -> int:
        return self.read("intermediate_size", WIDTH)

    def vocab(self, default: int | None = None) -> int:
        found = self.get("vocab_size", VOCABULARY, default)
        return self.read("vocab_size", VOCABULARY) if found is None else found

    @property
    def heads(self) -> int:
        return self.read("num_attention_heads", COUNT)

    def kv_heads(self, heads: int, default: int | None = None) -> int:
        """Return the heads of keys, which those of queries share."""
        found = self.get("num_key_value_heads", COUNT, default or heads)
        if heads % found:
            raise FormatError(
                f"{named(self.where)} has {heads} num_attention_heads, which {found} num_key_value_heads cannot share."
            )
        return found

    def eps(self, default: float | None = None) -> float:
        found = self.get("rms_norm_eps", EPS, default)
        return self.read("rms_norm_eps", EPS) if found is None else found

    def context(self, default: int) -> int:
        return self.get("max_position_embeddings", POSITIONS, default)

    def theta(self, default: float = 10000.0) -> float:
        return self.get("rope_theta", THETA, default)

    def tied(self, default: bool = False) -> bool:
        return self.get("tie_word_embeddings", FLAG, default)

    def tied_outside(self, default: bool) -> bool:
        """Return whether embeddings are tied, which the keys around `text_config` say first."""
        found = self.outer.get("tie_word_embeddings", FLAG, None)
        return self.tied(default) if found is None else found

    @property
    def expert_inner(self) -> int:
        return self.read("moe_intermediate_size", WIDTH)

    def experts(self, count_key: str, choice_key: str = "num_experts_per_tok", default: int | None = None) -> tuple[int, int]:
        """Return how many experts a layer has, and how many of them a token goes to."""
        count = self.read(count_key, EXPERTS) if default is None else self.get(count_key, EXPERTS, default)
        chosen, where, name = self.read(choice_key, EXPERTS), named(self.where), self.name_of(choice_key)
        if chosen < 1:
            raise FormatError(f"{where} has {name} = {chosen}; a token needs at least one expert.")
        if count and chosen > count:
            raise FormatError(f"{where} has {name} = {chosen}, more than {self.name_of(count_key)} = {count}.")
        return count, chosen

    def same(self, key: str, default: int | None = None) -> int:
        """Return a number that is given once, or for each layer and is the same for all."""
        found = self.read(key, EXPERTS_BY_LAYER) if default is None else self.get(key, EXPERTS_BY_LAYER, default)
        each = found if isinstance(found, list) else [found]
        if len(set(each)) != 1:
            raise FormatError(f"{self.title} has {key} {shown(found)}; one number for all layers is supported.")
        return each[0]

    def sliding_window(self) -> int | None:
        """Return how many positions a layer with a sliding window sees; None where there is no window."""
        return self.get("sliding_window", SLIDING_WINDOW, 0) or None

    def window(self) -> int:
        """Return how many positions a layer with a sliding window sees, which must be said."""
        if self.read("sliding_window", SLIDING_WINDOW) < 1:
            raise FormatError(f"{self.title} has sliding_window 0 and layers that need one.")
        return self.read("sliding_window", SLIDING_WINDOW)

    def layer_types(self, *known: str, key: str = "layer_types") -> tuple[str, ...]:
        """Return the kind of each layer, from the checkpoint's own list."""
        kinds, count = tuple(self.read(key, NAMES)), self.layers
        if len(kinds) != count:
            raise FormatError(f"{named(self.where)} lists {len(kinds)} {key} for num_hidden_layers {count}.")
        strange = sorted(set(kinds) - set(known))
        if strange:
            raise FormatError(f"{named(self.where)} has {key} {listed(strange)}; {' and '.join(known)} are supported.")
        return kinds


def experts_per_token(config: dict[str, Any]) -> int:
    """Return the experts that each layer chooses for a token, by the key of any family."""
    keys = Keys(config)
    if NESTED in keys:
        return keys.section(NESTED).read(_experts_key(keys.section(NESTED)), EXPERTS)
    return keys.same(LISTED) if LISTED in keys else keys.read(_experts_key(keys), EXPERTS)


def has_experts(config: dict[str, Any]) -> bool:
    """Return whether some layers have experts."""
    keys = Keys(config)
    if NESTED in keys:
        return keys.section(NESTED).get(_experts_key(keys.section(NESTED)), EXPERTS, 0) > 0
    return (keys.same(LISTED) if LISTED in keys else keys.get(_experts_key(keys), EXPERTS, 0)) > 0


def _experts_key(keys: Fields) -> str:
    return next((name for name in OTHER_NAMES if name in keys), "num_experts_per_tok")
