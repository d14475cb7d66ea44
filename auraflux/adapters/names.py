"""Names of adapters: NAME=FOLDER on the command line, `model:name` in requests."""

from collections.abc import Iterable

from auraflux.errors import SettingsError

MOST = 64  # adapters of a model
LONGEST = 128  # characters


def parse_adapters(given: Iterable[str]) -> dict[str, str]:
    """Return folders by name from NAME=FOLDER."""
    found: dict[str, str] = {}
    for each in given:
        name, equals, folder = each.partition("=")
        if not (name and equals and folder):
            raise SettingsError(f"--adapter {each!r:.200} must be NAME=FOLDER.")
        if name in found:
            raise SettingsError(f"--adapter gives the name {name!r:.80} twice.")
        found[name] = folder
    return found


def check_names(names: Iterable[str]) -> None:
    """Refuse names that requests could not give."""
    found = list(names)
    if len(found) > MOST:
        raise SettingsError(f"{len(found)} adapters are given; a model takes at most {MOST}.")
    for name in found:
        if not (isinstance(name, str) and 0 < len(name) <= LONGEST and name.isprintable()) or ":" in name:
            raise SettingsError(
                f"an adapter cannot be named {name!r:.80}; at most {LONGEST} characters without a colon are needed."
            )
