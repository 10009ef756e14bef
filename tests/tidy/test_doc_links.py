"""Tests that links between our Markdown files have existing targets, as GitHub resolves them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md")),
    *(page for folder in ("docs", "benchmarks") for page in sorted((ROOT / folder).rglob("*.md"))),
]

LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")


def heading_anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub, like our site, gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


def find_broken_links(page: Path) -> list[str]:
    """Return the links of a page whose file or anchor does not exist."""
    text = CODE.sub("", FENCE.sub("", page.read_text()))
    out = []
    for link in LINK.findall(text):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in heading_anchors(target)):
            out.append(link)
    return out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_page_have_existing_targets(page: Path) -> None:
    assert find_broken_links(page) == []


def test_broken_links_are_found_outside_code(tmp_path: Path) -> None:
    """Missing files and anchors are reported, but not links in code."""
    (tmp_path / "b.md").write_text("# What is *it*, then?\n")
    page = tmp_path / "a.md"
    page.write_text("[1](b.md#what-is-it-then) [2](b.md#else) [3](c.md) [4](#here)\n`[5](d.md)`\n")
    assert find_broken_links(page) == ["b.md#else", "c.md", "#here"]


@pytest.mark.parametrize("picture", sorted((ROOT / "docs/pictures").glob("*.svg")), ids=str)
def test_picture_is_used_and_has_no_external_references(picture: Path) -> None:
    shown = "".join(page.read_text() for page in PAGES)
    assert f"pictures/{picture.name})" in shown
    assert "http" not in picture.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
