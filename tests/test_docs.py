"""Documentation pages: links point to existing files and headings."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    page for pattern in ("*.md", "docs/*.md", "bench/**/*.md", "deploy/*.md", "auraflux/**/*.md") for page in ROOT.glob(pattern)
)


def prose(page: Path) -> str:
    """Return a page without code blocks and inline code."""
    return re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: its headings as GitHub spells them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line) for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE))
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{link} is not there"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{link} names no heading"


def test_readme_table_matches_the_results():
    from bench.numbers import README, with_table

    assert with_table(README.read_text()) == README.read_text(), "run `python -m bench.numbers`"
