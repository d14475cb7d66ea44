"""Short names of models: `qwen3:4b` instead of a repository and a file. The table is short_names.json."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LATEST = ":latest"


@dataclass(frozen=True)
class ShortName:
    """A short name, and the built-in name or the name on the Hugging Face hub that it stands for.

    nbytes  size of the download, rounded
    """

    name: str
    model: str
    nbytes: int
    aliases: tuple[str, ...] = ()


@cache
def short_names() -> tuple[ShortName, ...]:
    """Return the table."""
    rows = json.loads(Path(__file__).with_suffix(".json").read_text())
    return tuple(
        ShortName(row["name"], row["model"], round(row["gigabytes"] * 1e9), tuple(row.get("aliases", ()))) for row in rows
    )


@cache
def _by_name() -> dict[str, str]:
    return {each: row.model for row in short_names() for each in (row.name, *row.aliases)}


def full_name(name: str) -> str:
    """Return the name that a short name stands for; other names unchanged."""
    return _by_name().get(name.lower().removesuffix(LATEST), name)


def short_name(model: str) -> str | None:
    """Return the short name of a model; None if it has none."""
    return next((row.name for row in short_names() if row.model == model), None)
