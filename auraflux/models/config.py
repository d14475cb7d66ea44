"""How families read config.json: a key that is missing is an error that names it."""

from typing import Any

from auraflux.errors import FormatError
from auraflux.weights.boundary import listed, shown

# types that say only that there are images too: what the text part is, it says itself
WRAPPERS = {"mistral3": "mistral"}


def text_type(config: dict[str, Any]) -> Any:
    """The model_type that says what the text part is."""
    kind, inner = config.get("model_type"), config.get("text_config")
    if isinstance(kind, str) and kind in WRAPPERS:
        return inner.get("model_type", WRAPPERS[kind]) if isinstance(inner, dict) else WRAPPERS[kind]
    return kind


class Keys:
    """The keys of a config.json, those under `text_config` before those beside it."""

    def __init__(self, config: dict[str, Any]):
        self.kind = text_type(config)
        inner = config.get("text_config")
        self._found = {**config, **inner} if isinstance(inner, dict) else config

    def __getitem__(self, key: str) -> Any:
        value = self._found.get(key)
        if value is None:
            present = listed(sorted(self._found), 100)
            raise FormatError(f"config.json of model_type {self.kind!r} has no {key!r}. The keys it has: {present}.")
        return value

    def __contains__(self, key: str) -> bool:
        return self._found.get(key) is not None

    def get(self, key: str, default: Any) -> Any:
        """The value of a key that may be missing or null."""
        value = self._found.get(key)
        return default if value is None else value

    def refuse(self, key: str, *accepted: Any) -> None:
        """Stop at a value this package would not honour."""
        value = self._found.get(key)
        if value is not None and value not in accepted:
            wanted = " or ".join(map(repr, accepted))
            raise FormatError(f"config.json of model_type {self.kind!r} has {key} {shown(value)}; only {wanted} is supported.")

    def window(self) -> int:
        """How many positions a layer with a sliding window sees."""
        if self["sliding_window"] < 1:
            raise FormatError(f"config.json of model_type {self.kind!r} has sliding_window 0 and layers that need one.")
        return self["sliding_window"]

    def layer_types(self, *known: str, key: str = "layer_types") -> tuple[str, ...]:
        """The kind of each layer, from the checkpoint's own list."""
        kinds, count = tuple(self[key]), self["num_hidden_layers"]
        if len(kinds) != count:
            raise FormatError(f"config.json lists {len(kinds)} {key} for num_hidden_layers {count}.")
        strange = sorted(set(kinds) - set(known))
        if strange:
            raise FormatError(f"config.json has {key} {listed(strange)}; {' and '.join(known)} are supported.")
        return kinds


def experts_per_token(config: dict[str, Any]) -> int:
    """Experts that each layer chooses for a token, as most families call it, and as ERNIE, Gemma 4 and Kimi Linear do."""
    return Keys(config)[_experts_key(config)]


def has_experts(config: dict[str, Any]) -> bool:
    """Whether some layers have experts."""
    return bool(Keys(config).get(_experts_key(config), 0))


def _experts_key(config: dict[str, Any]) -> str:
    keys = Keys(config)
    return next((name for name in ("moe_k", "top_k_experts", "num_experts_per_token") if name in keys), "num_experts_per_tok")
