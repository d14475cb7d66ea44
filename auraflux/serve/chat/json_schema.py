"""JSON schemas prepared for llguidance: keywords that a grammar cannot enforce are refused by name and path."""

import json
from typing import Any

from auraflux.errors import InputError
from auraflux.tokenizer.llguidance_limits import LONGEST

# nesting of schemas, lists and objects
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
    # bounded: unbounded white space could generate forever
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}",
    # a key spelled with \u escapes would bypass its schema
    "json_allowed_escapes": 'nrbtf\\"',
    "lenient": False,
}


def prepare_schema(schema: Any, lenient: bool = False) -> dict[str, Any]:
    """Return a schema for llguidance; raise InputError if it is invalid, too large or not enforceable.

    A lenient schema is enforced as far as possible.
    """
    if not isinstance(schema, dict):
        raise InputError(f"A JSON schema must be an object, not {_quoted(schema)}.")
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
        raise InputError(f"The JSON schema has {size:,} characters; the limit is {LONGEST:,}.")


def _checked(schema: Any, at: str) -> Any:
    if not isinstance(schema, dict):
        if not isinstance(schema, bool):
            raise InputError(f"The JSON schema has {_quoted(schema)} at {at}, where a schema is required.")
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
    """Return whether a keyword constrains the output; raise InputError if it does and cannot be enforced."""
    if key == "uniqueItems":
        raise InputError(f"The JSON schema has 'uniqueItems' at {at}, which cannot be enforced here.")
    if key == "minProperties" and isinstance(value, int):
        # optional keys may repeat, so only required ones can be counted
        if value > max(1, len(schema.get("required", ()))):
            raise InputError(
                f"The JSON schema has 'minProperties' {value} at {at}; only up to the number of 'required' keys is enforced."
            )
        return value > len(schema.get("required", ()))
    if key == "format":
        if schema.get("type", "string") not in ("string", ["string", "null"], ["null", "string"]):
            return False
        if value not in FORMATS:
            known = ", ".join(FORMATS)
            raise InputError(f"The JSON schema has the format {_quoted(value)} at {at}; the supported formats: {known}.")
    if key == "$ref" and not (isinstance(value, str) and value.startswith("#")):
        raise InputError(
            f"The JSON schema refers to {_quoted(value)} at {at}; only references within the schema are supported."
        )
    return key != "x-guidance"


def _of(value: Any, kind: type, at: str) -> Any:
    if not isinstance(value, kind):
        raise InputError(f"The JSON schema has {_quoted(value)} at {at}, where a JSON {kind.__name__} of schemas is required.")
    return value


def _quoted(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
