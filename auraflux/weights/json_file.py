"""Settings that lie beside weights as JSON."""

import json
from pathlib import Path
from typing import Any

from auraflux.errors import FormatError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or a FormatError that says what is wrong with it."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as err:
        raise FormatError(f"{path} cannot be read as JSON: {err}.") from err
    if not isinstance(found, dict):
        raise FormatError(f"{path} holds {type(found).__name__}, not an object.")
    return found
