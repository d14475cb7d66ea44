"""`keep_alive`: how long a model stays loaded after its last request, in Ollama's form."""

import math

from auraflux.durations import parse_duration
from auraflux.errors import InputError


def parse_keep_alive(given: float | str | None) -> float | None:
    """Return the seconds of "5m", "1h30m", 300 or "300"; infinity for a negative duration, None for none."""
    if given is None or given == "":
        return None
    seconds = parse_duration(given) if isinstance(given, str) else float(given)
    if seconds is None or math.isnan(seconds):
        raise InputError(f"keep_alive is {str(given)[:40]!r}; write it like 300 (seconds), '5m', '1h30m', 0, or -1 for ever.")
    return math.inf if seconds < 0 else seconds
