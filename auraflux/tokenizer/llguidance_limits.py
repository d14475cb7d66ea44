"""llguidance, which compiles grammars into token masks, with limits on the work of one grammar."""

from typing import Any

from auraflux.errors import InputError

# characters of a grammar or schema
LONGEST = 1 << 17


def guidance() -> Any:
    """Return the llguidance package, an optional dependency."""
    try:
        import llguidance
    except ImportError as err:
        raise InputError("Grammars and JSON schemas need llguidance: pip install llguidance.") from err
    return llguidance


def limits() -> Any:
    """Return the work limits of one grammar: about 20 ms to compile it and 15 ms for a mask."""
    return guidance().LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def error_text(error: str) -> str:
    """Shorten an error of llguidance to one line without its parser state."""
    said = " ".join(error.partition("\n<state>")[0].split())
    return (said[:300] + "…" if len(said) > 300 else said).rstrip(".")
