"""JSON schemas made ready for grammars: what a grammar would not enforce is refused, by its name and place."""

import json
from typing import Any

from auraflux.errors import InputError
from auraflux.run.guidance import LONGEST

# of schemas, lists and objects in each other
DEEPEST = 64
REFUSED = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "patternProperties", "propertyNames"),
    *("dependentSchemas", "dependentRequired", "dependencies", "unevaluatedProperties", "unevaluatedItems"),
    *("$dynamicRef", "$recursiveRef", "$dynamicAnchor", "$recursiveAnchor"),
)
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
SCHEMAS_BY_NAME = ("properties", "$defs", "definitions")
LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
SCHEMAS = ("items", "additionalProperties", "additionalItems")
OPTIONS = {
    # between two parts of JSON; without an end a text could go on with white space alone
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}",
    # with \u a key could be written so that what its schema says is not looked at
    "json_allowed_escapes": 'nrbtf\\"',
    "lenient": False,
}


def ready(schema: Any, lenient: bool = False) -> dict[str, Any]:
    """Give a schema as llguidance takes it. InputError where it is none, too large, or says what cannot be enforced.

    A lenient one is enforced as far as possible.
    """
    if not isinstance(schema, dict):
        raise InputError(f"A JSON schema must be an object, not {_shown(schema)}.")
    _measure(schema)
    checked = schema if lenient else _checked(schema, "#")
    return {**checked, "x-guidance": {**OPTIONS, "lenient": lenient}}


def _measure(schema: dict[str, Any]) -> None:
    level: list[Any] = [schema]
    for _ in range(DEEPEST):
        level = [part for each in level for part in (each.values() if isinstance(each, dict) else each)]
        level = [part for part in level if isinstance(part, dict | list)]
        if not level:
            break
    else:
        raise InputError(f"The JSON schema is more than {DEEPEST} levels deep.")
    if (size := len(json.dumps(schema))) > LONGEST:
        raise InputError(f"The JSON schema has {size:,} characters; at most {LONGEST:,} are taken.")


def _checked(schema: Any, at: str) -> Any:
    if not isinstance(schema, dict):
        if not isinstance(schema, bool):
            raise InputError(f"The JSON schema has {_shown(schema)} at {at}, where a schema must stand.")
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        here = f"{at}/{key}"
        if key in REFUSED and value not in ({}, []):
            raise InputError(f"The JSON schema has {key!r} at {at}, which cannot be enforced here.")
        if key in REFUSED or (key == "uniqueItems" and value is False):
            continue
        if key in SCHEMAS_BY_NAME:
            found[key] = {name: _checked(each, f"{here}/{name}") for name, each in _of(value, dict, here).items()}
        elif key in LISTS_OF_SCHEMAS or (key == "items" and isinstance(value, list)):
            found[key] = [_checked(each, f"{here}/{n}") for n, each in enumerate(_of(value, list, here))]
        elif key in SCHEMAS:
            found[key] = _checked(value, here)
        elif _enforced(key, value, schema, at):
            found[key] = value
    return found


def _enforced(key: str, value: Any, schema: dict[str, Any], at: str) -> bool:
    """Whether a keyword must be kept; InputError where it should be and cannot."""
    if key == "uniqueItems":
        raise InputError(f"The JSON schema has 'uniqueItems' at {at}, which cannot be enforced here.")
    if key == "minProperties" and isinstance(value, int):
        # keys may come twice, which only those that must be there cannot
        if value > max(1, len(schema.get("required", ()))):
            raise InputError(
                f"The JSON schema has 'minProperties' {value} at {at}; more than 'required' names cannot be enforced."
            )
        return value > len(schema.get("required", ()))
    if key == "format":
        if schema.get("type", "string") not in ("string", ["string", "null"], ["null", "string"]):
            return False
        if value not in FORMATS:
            known = ", ".join(FORMATS)
            raise InputError(f"The JSON schema has the format {_shown(value)} at {at}; those enforced are: {known}.")
    if key == "$ref" and not (isinstance(value, str) and value.startswith("#")):
        raise InputError(f"The JSON schema refers to {_shown(value)} at {at}; only its own parts can be referred to.")
    return key != "x-guidance"


def _of(value: Any, kind: type, at: str) -> Any:
    if not isinstance(value, kind):
        raise InputError(f"The JSON schema has {_shown(value)} at {at}, where a JSON {kind.__name__} of schemas must stand.")
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
