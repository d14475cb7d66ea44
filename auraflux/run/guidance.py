"""llguidance, which makes grammars into masks; known here by its limits, so that no grammar takes minutes of work."""

from typing import Any

from auraflux.errors import InputError

# characters of a grammar or schema
LONGEST = 1 << 17


def guidance() -> Any:
    """Give the llguidance package, which is no part of a plain installation."""
    try:
        import llguidance
    except ImportError as err:
        raise InputError("Grammars and JSON schemas need llguidance: pip install 'auraflux[serve]'.") from err
    return llguidance


def limits() -> Any:
    """Give the work that one grammar may take: by its speeds about 20 ms to read it and 15 ms for a mask."""
    return guidance().LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def sentence(error: str) -> str:
    """Give what an error of llguidance says, on one line and without what it adds for its own developers."""
    said = " ".join(error.partition("\n<state>")[0].split())
    return (said[:300] + "…" if len(said) > 300 else said).rstrip(".")
