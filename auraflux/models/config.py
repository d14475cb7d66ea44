"""How families read config.json: a key that is missing is an error that names it."""

from typing import Any

from auraflux.errors import FormatError
from auraflux.weights.boundary import listed, shown


class Keys:
    """The keys of a config.json, those under `text_config` before those beside it."""

    def __init__(self, config: dict[str, Any]):
        self.kind = config.get("model_type")
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

    def layer_types(self, *known: str) -> tuple[str, ...]:
        """The kind of each layer, from the checkpoint's own list."""
        kinds, count = tuple(self["layer_types"]), self["num_hidden_layers"]
        if len(kinds) != count:
            raise FormatError(f"config.json lists {len(kinds)} layer_types for num_hidden_layers {count}.")
        strange = sorted(set(kinds) - set(known))
        if strange:
            raise FormatError(f"config.json has layer_types {listed(strange)}; {' and '.join(known)} are supported.")
        return kinds


def experts_per_token(config: dict[str, Any]) -> int:
    """Of each layer that has experts, as all families call it."""
    return Keys(config)["num_experts_per_tok"]


def has_experts(config: dict[str, Any]) -> bool:
    """Whether some layers have experts."""
    return "num_experts_per_tok" in Keys(config)
