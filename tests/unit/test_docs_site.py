"""Tests of the documentation site: it builds without warnings, and links and names are complete."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]

# Module -> public names: all that it lists in __all__.
PUBLIC = [
    "sparkstrom",
    "sparkstrom.listeners",
    "sparkstrom.ml",
    "sparkstrom.models",
    "sparkstrom.models.jax",
    "sparkstrom.models.keras",
    "sparkstrom.models.lightning",
    "sparkstrom.models.torch",
    "sparkstrom.streams",
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site like scripts/docs, and return its folder."""
    pytest.importorskip("torch")  # the API pages need torch
    for needed in ("sphinx", "furo", "myst_parser"):
        pytest.importorskip(needed, reason=f"{needed} is not here: the extra test-all has it")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "--quiet", "-b", "html"]
    done = subprocess.run(
        [*command, "-d", str(out / "doctrees"), str(ROOT / "docs"), str(out / "html")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return out / "html"


class Page(HTMLParser):
    """A parsed page: its ids, and the targets of its links and sources."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            elif name in ("href", "src") and value:
                self.links.add(value)


@cache
def read_page(path: Path) -> Page:
    """Return a parsed page; each is parsed once, because parsing all of them takes seconds."""
    return Page(path.read_text())


def find_broken_links(folder: Path) -> Iterator[str]:
    """Yield each link to a missing file or anchor of the site."""
    pages = {path: read_page(path) for path in folder.rglob("*.html")}
    for path, page in pages.items():
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not target.exists():
                yield f"{path.relative_to(folder)}: {link}: no such file"
            elif anchor and target in pages and anchor not in pages[target].ids:
                yield f"{path.relative_to(folder)}: {link}: no such anchor"


def test_site_has_no_broken_links_or_anchors(site: Path) -> None:
    assert list(find_broken_links(site)) == []


def test_site_loads_no_remote_scripts_or_styles(site: Path) -> None:
    """The site must work without a network."""
    remote = {
        link
        for path in site.rglob("*.html")
        for link in read_page(path).links
        if link.startswith(("http:", "https:", "//")) and link.endswith((".js", ".css"))
    }
    assert remote == set()


def test_link_check_finds_broken_links(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<p id="here"><a href="a.html#here"><a href="b.html">')
    (tmp_path / "c.html").write_text('<a href="a.html#there"><img src="d.png">')
    assert sorted(find_broken_links(tmp_path)) == [
        "a.html: b.html: no such file",
        "c.html: a.html#there: no such anchor",
        "c.html: d.png: no such file",
    ]


def test_index_links_to_every_page(site: Path) -> None:
    """The index links to every page."""
    index = read_page(site / "index.html").links
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert {page for page in pages if f"{page}.html" not in index} == set()


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_has_its_documentation(site: Path, module: str) -> None:
    loaded = importlib.import_module(module)
    ids = {i for path in (site / "api").glob("*.html") for i in read_page(path).ids}
    names = [name for name in loaded.__all__ if name not in ("__version__", "errors")]
    homes = {name: getattr(loaded, name).__module__ for name in names}
    assert [n for n in names if not {f"{module}.{n}", f"{homes[n]}.{n}"} & ids] == []


def test_troubleshooting_page_includes_error_messages(site: Path) -> None:
    """The page shows the messages of errors that its source includes."""
    page = (site / "troubleshooting.html").read_text()
    assert "enlarge shared memory (docker: --shm-size)" in page
    assert "none of its updates was committed" in page
