"""The names that requests give in `model`: the model's, its aliases, and its adapters, alone or as `model:adapter`."""

from auraflux.serve.transport.link import ModelFacts


def is_model(facts: ModelFacts, aliases: tuple[str, ...], name: str) -> bool:
    """Return whether a name is the model's, also with Ollama's tag."""
    return not {facts.name, *aliases}.isdisjoint((name, name.removesuffix(":latest")))


def adapter_of(facts: ModelFacts, aliases: tuple[str, ...], name: object) -> str | None:
    """Return the adapter that a name gives; None for the model alone, and for other names."""
    if not isinstance(name, str) or not name or is_model(facts, aliases, name):
        return None
    model, _, last = name.rpartition(":")
    adapter = last if model and is_model(facts, aliases, model) else name
    return adapter if adapter in facts.adapters else None
