"""Mutations of JSON values, bytes and strings, drawn from the given random generator."""

import copy
import json
import random
from typing import Any

# edge cases
ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 255, 1 << 16, 1 << 31, -(1 << 31), 1 << 63, 10**9, 10**30, 100_000, 99_999_999_999),
    *(0.0, -0.0, 1.5, -1e300, 1e300, 1e-320, float("inf"), float("-inf"), float("nan")),
    *("", "0", "a", "null", "true", "/", "..", "../../etc/passwd", "\0", "\ud800", "é" * 99, "x" * 5000, "{{ 1 }}", "%s%n"),
    *([], {}, [[]], {"": {}}, [None], [0], [1, "a"], {"a": 1}, [{}], list(range(99)), ["full_attention"] * 3),
]
MAX_GROWTH = 500  # values by which a JSON value may grow


def odd(rng: random.Random) -> Any:
    """Return a random edge case."""
    return copy.deepcopy(rng.choice(ODD))


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """List the key paths of all values within a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [path]
    for key, each in inner:
        found += paths_in(each, (*path, key))
    return found


def mutated(rng: random.Random, value: Any, most: int = 3) -> Any:
    """Return a copy of a JSON value, mutated in a few places."""
    made, found = copy.deepcopy(value), paths_in(value)
    largest = len(found) + MAX_GROWTH
    for _ in range(rng.randint(1, most)):
        # repeated growth would take more memory here than in the tested code
        if len(found) > largest:
            break
        made = _changed(rng, made, rng.choice(found))
        found = paths_in(made)
    return made


def _changed(rng: random.Random, value: Any, path: tuple[Any, ...]) -> Any:
    """Mutate a JSON value at one path."""
    if not path:
        return odd(rng) if rng.random() < 0.1 else value
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    how, key = rng.randrange(6), path[-1]
    if how == 0:
        del parent[key]
    elif how == 1 and isinstance(parent, dict):
        parent[rng.choice(["", "x", "text_config", "rope_scaling", "_name"])] = parent.pop(key)
    elif how == 2:
        parent[key] = nearby(rng, parent[key])
    elif how == 3:
        parent[key] = [parent[key]] if rng.random() < 0.5 else {"x": parent[key]}
    else:
        parent[key] = odd(rng)
    return value


def nearby(rng: random.Random, value: Any) -> Any:
    """Return another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return rng.choice(
            [-value, value + 1, value - 1, value * 2, value * 1000, value // 2, value * 10**9, float(value), str(value)]
        )
    if isinstance(value, str):
        return text(rng, value)
    if isinstance(value, list) and value:
        return rng.choice([value * 2, value[1:], value[::-1], value * 1000])
    return odd(rng)


def text(rng: random.Random, value: str) -> str:
    """Return a string with characters inserted, removed or repeated."""
    at = rng.randint(0, len(value))
    new = rng.choice(["", " ", "\n", "\0", "\x1b[31m", "é", "\u202e", "🦙", "\ud800", "'", '"', "%", "{", "/", "..", value])
    return value[:at] + new + value[at + rng.randint(0, 3) :]


def mutated_bytes(rng: random.Random, data: bytes, most: int = 8) -> bytes:
    """Return bytes with bits flipped and ranges removed, repeated or replaced."""
    made = bytearray(data)
    for _ in range(rng.randint(1, most)):
        if not made:
            break
        at, length = rng.randrange(len(made)), rng.choice([1, 1, 2, 4, 8, 64])
        how = rng.randrange(6)
        if how == 0:
            made[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            del made[at : at + length]
        elif how == 2:
            made[at:at] = made[at : at + length]
        elif how == 3:
            made[at : at + length] = bytes(rng.choice([0, 255, 127, 128]) for _ in range(length))
        elif how == 4:
            made[at : at + 8] = rng.choice([0, 1, 1 << 31, 1 << 32, (1 << 63) - 1, (1 << 64) - 1]).to_bytes(8, "little")
        elif rng.random() < 0.2:
            del made[at:]
    return bytes(made)


def mutated_json(rng: random.Random, value: Any) -> bytes:
    """Encode a JSON value, sometimes with mutated bytes."""
    encoded = json.dumps(value).encode()
    return mutated_bytes(rng, encoded, 2) if rng.random() < 0.1 else encoded
