"""`keep_alive`: how long a model stays loaded after its last request, in Ollama's form."""

import math
import re

from auraflux.errors import InputError

UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
PART = r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)"
DURATION = re.compile(rf"([+-]?)((?:{PART})+)", re.ASCII)
NUMBER = re.compile(r"[+-]?\d{1,12}(?:\.\d{0,9})?", re.ASCII)


def parse_keep_alive(given: float | str | None) -> float | None:
    """Return the seconds of "5m", "1h30m", 300 or "300"; infinity for a negative duration, None for none."""
    if given is None or given == "":
        return None
    seconds = _seconds(given)
    if seconds is None or math.isnan(seconds):
        raise InputError(f"keep_alive is {str(given)[:40]!r}; write it like 300 (seconds), '5m', '1h30m', 0, or -1 for ever.")
    return math.inf if seconds < 0 else seconds


def _seconds(given: float | str) -> float | None:
    if not isinstance(given, str):
        return float(given)
    text = given.strip()
    if len(text) > 100:
        return None
    if NUMBER.fullmatch(text):
        return float(text)
    found = DURATION.fullmatch(text)
    if found is None:
        return None
    total = sum(float(number) * UNITS_S[unit] for number, unit in re.findall(PART, found[2]))
    return -total if found[1] == "-" else total
