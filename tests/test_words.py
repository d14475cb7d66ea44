"""Retired words: identifiers, option names and docs use the field's words instead (docs/glossary.md)."""

import io
import re
import tokenize
from pathlib import Path

import pytest
from click import Command, Group

from auraflux.cli import main
from tests.source_tree import MODULES, ROOT, name_of

# the word, and what to say instead
RETIRED = {
    "alike": "batch-invariant, same shape",
    "beside": "mixed batch, next to",
    "deal": "shard, place",
    "dealt": "sharded, placed",
    "desk": "model process",
    "door": "router",
    "guess": "draft token, prediction",
    "guesses": "draft tokens, predictions",
    "intake": "admission",
    "pace": "prefill budget, speed",
    "texts": "sequences",
    "told": "reported",
    "unread": "uncomputed",
    "whoever": "name the subject",
}
# in prose only: as identifiers these are ordinary words
PHRASES = {
    "as it is": "unchanged, uncompressed",
    "as they are": "unchanged, uncompressed",
    "by turns": "alternately",
    "in any company": "batch-invariant",
    "taken off": "preempted",
    "the slowest hundredth": "p99",
    "what is written": "decode",
}
OTHERS = {"guess_type"}  # names of the standard library
PROJECT = ROOT.parent
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/*.md", "auraflux/**/*.md", "deploy/*.md", "examples/*.md")
    for page in PROJECT.glob(pattern)
)
SOURCES = [*MODULES, *sorted((PROJECT / "examples").glob("*.py")), *sorted((PROJECT / "bench").glob("*/*.py"))]


def words(identifier: str) -> set[str]:
    """Split an identifier into lower-case words."""
    return set(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", identifier).lower().split("_"))


def test_identifiers_are_split_into_words():
    assert words("PrefixCache") == {"prefix", "cache"}
    assert words("_kept_rows") == {"", "kept", "rows"}


def retired_in(path: Path) -> set[str]:
    """Return the identifiers of a module that use a retired word."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    names = {token.string for token in tokens if token.type == tokenize.NAME} - OTHERS
    return {name for name in names if words(name) & RETIRED.keys()}


def retired_in_page(page: Path) -> set[str]:
    """Return the retired words and phrases in the prose of a page."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL).lower()
    found = {word for word in RETIRED if re.search(rf"\b{word}\b", prose)}
    return found | {phrase for phrase in PHRASES if phrase in re.sub(r"\s+", " ", prose)}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PROJECT)))
def test_identifiers_use_no_retired_word(path: Path):
    found = retired_in(path)
    assert found == set(), f"say instead: {sorted({RETIRED[word] for name in found for word in words(name) & RETIRED.keys()})}"


def test_file_names_use_no_retired_word():
    assert [name_of(path) for path in MODULES if words(path.stem) & RETIRED.keys()] == []


def commands(group: Group, *names: str) -> list[tuple[str, Command]]:
    """List the commands of a group and of its subgroups."""
    found: list[tuple[str, Command]] = []
    for name, command in group.commands.items():
        inner = commands(command, *names, name) if isinstance(command, Group) else [(" ".join((*names, name)), command)]
        found += inner
    return found


@pytest.mark.parametrize(("name", "command"), commands(main))
def test_options_and_their_help_use_no_retired_word(name: str, command: Command):
    for option in command.params:
        spellings = " ".join(option.opts)
        text = f"{spellings} {getattr(option, 'help', '') or ''}".lower()
        assert set(re.findall(r"[a-z]+", text)) & RETIRED.keys() == set(), f"{name} {spellings}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_pages_use_no_retired_word(page: Path):
    found = retired_in_page(page)
    assert found == set(), {word: {**RETIRED, **PHRASES}[word] for word in found}
