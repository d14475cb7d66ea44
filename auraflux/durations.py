"""Durations as users write them, such as "20ms" or "1h30m"."""

import math
import re

from auraflux.errors import SettingsError

UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
PART = r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)"
DURATION = re.compile(rf"([+-]?)((?:{PART})+)", re.ASCII)
NUMBER = re.compile(r"[+-]?\d{1,12}(?:\.\d{0,9})?", re.ASCII)
MAX_LENGTH = 100


def parse_duration(text: str) -> float | None:
    """Return the seconds of "20ms", "1h30m" or "300"; None for a text that is no duration."""
    text = text.strip()
    if len(text) > MAX_LENGTH:
        return None
    if NUMBER.fullmatch(text):
        return float(text)
    found = DURATION.fullmatch(text)
    if found is None:
        return None
    total = sum(float(number) * UNITS_S[unit] for number, unit in re.findall(PART, found[2]))
    return -total if found[1] == "-" else total


def parse_latency(given: str | float) -> float:
    """Return the seconds of a latency such as "20ms" or 0.02."""
    seconds = parse_duration(given) if isinstance(given, str) else float(given)
    if seconds is None or not 0 < seconds < math.inf:
        raise SettingsError(f"{str(given)[:40]!r} is not a latency. Write it like 20ms or 0.5s.")
    return seconds
