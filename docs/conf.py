"""Sphinx's settings for the site; scripts/docs builds it.

The pages are Markdown that GitHub shows as well. What only a site can have is added here: pictures
that follow its colours, the list of texts under each entry of troubleshooting.md, and pages that
no table of contents names yet.
"""

from __future__ import annotations

import ast
import dataclasses
import gc
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments.lexers.special import TextLexer

gc.disable()  # it takes half of a build's time; without it, a build takes 1.3 GB, not 0.8

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
os.environ["KERAS_BACKEND"] = "jax"  # what sparkstrom.models.keras wants to be imported with

import error_texts  # noqa: E402  both lie where sys.path has just been told to look

from sparkstrom.base.version import __version__  # noqa: E402

project = "sparkstrom"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"sparkstrom {__version__}"
html_static_path = ["site"]
html_css_files = ["site.css"]
html_show_copyright = False
html_copy_source = False
templates_path: list[str] = []
myst_heading_anchors = 3
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_use_ivar = True  # attributes that docstrings list are documented where they are defined
# Errors in "Raises" are documented twice: in the package, and where they are defined.
suppress_warnings = ["ref.python"]

# Examples of the wire format and diagrams that GitHub draws: their words say enough.
PLAIN_FENCES = (
    "bitmap", "control", "direct", "frame", "gaps", "levels", "merged", "mermaid", "report",
    "sum-dense", "sum-sparse", "told",
)  # fmt: skip
# Records of measurements are beside the benchmarks; the site offers them as files.
RECORD_LINK = re.compile(r"\[([^\]]+)\]\((\.\./benchmarks/[^)#]+\.md)(?:#[^)]*)?\)")
UNLISTED = "<!-- pages that are listed nowhere else -->"


def setup(app: Any) -> None:
    """Called by Sphinx."""
    for fence in PLAIN_FENCES:
        app.add_lexer(fence, TextLexer)
    app.connect("source-read", add_to_source)
    app.connect("autodoc-process-docstring", add_fields)
    app.connect("doctree-read", inline_pictures)


def add_to_source(app: Any, page: str, source: list[str]) -> None:
    """What stands in a page only on the site."""
    if page == "index":
        source[0] = source[0].replace(UNLISTED, "\n".join(unlisted(app, source[0])))
    elif page == "decisions/README":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n[a-z]*\n```\n"
    elif page == "troubleshooting":
        source[0] = with_texts(source[0])
    source[0] = RECORD_LINK.sub(r"{download}`\1 <\2>`", source[0])


def unlisted(app: Any, index: str) -> list[str]:
    """Pages of docs/ that the index does not name."""
    pages = {page for page in app.env.found_docs if "/" not in page and page != "index"}
    return sorted(page for page in pages if not re.search(rf"^{page}$", index, re.MULTILINE))


def with_texts(page: str) -> str:
    """Each entry of troubleshooting.md with the texts that it is about, as they are raised."""
    told = error_texts.told()
    entries = {entry.heading: entry for entry in error_texts.entries(page)}
    out = []
    for part in re.split(r"(?m)^(?=##)", page):
        heading = part.partition("\n")[0].removeprefix("### ").strip()
        entry = entries.get(heading)
        texts = sorted({each.text for each in told if entry and entry.covers(each)})
        texts = [" ".join(text.split()) for text in texts if text != error_texts.GAP]
        if texts and [f"`{text}`" for text in texts] != [heading]:
            part += f"<details><summary>{_counted(texts)}</summary>\n\n```text\n"
            part += "\n".join(texts) + "\n```\n\n</details>\n\n"
        out.append(part)
    return "".join(out)


def _counted(texts: list[str]) -> str:
    return "The text" if len(texts) == 1 else f"All {len(texts)} texts"


def add_fields(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """A dataclass' fields, with the comments that stand beside them."""
    if what != "class" or not dataclasses.is_dataclass(thing):
        return
    comments = dict(field_comments(thing))
    lines.append("")
    for field in dataclasses.fields(thing):
        if field.init and comments.get(field.name):
            lines.append(f":param {field.name}: {escaped(comments[field.name])}")


def escaped(text: str) -> str:
    """Plain words in reStructuredText; what stands in double backticks stays."""
    parts = re.split(r"(``[^`]+``)", text)
    words = [re.sub(r"([\\*`|_])", r"\\\1", part) for part in parts[::2]]
    return "".join(each for pair in zip(words, [*parts[1::2], ""], strict=True) for each in pair)


def field_comments(owner: type) -> Iterator[tuple[str, str]]:
    """Name and comment: above a field, behind it, or going on below what stands behind it."""
    lines = textwrap.dedent(inspect.getsource(owner)).splitlines()
    tree = ast.parse("\n".join(lines))
    fields = [node for node in tree.body[0].body if isinstance(node, ast.AnnAssign)]  # type: ignore[attr-defined]
    ended = 0  # the last line of the field before, with its comment
    for node in fields:
        last = node.end_lineno or node.lineno
        above = [_comment(line) for line in lines[ended : node.lineno - 1]]
        words = [lines[last - 1][node.end_col_offset :].strip().lstrip("# ")]
        if words == [""]:
            words = [text for text in above if text]
        else:
            while last < len(lines) and (text := _comment(lines[last])) is not None:
                words.append(text)
                last += 1
        ended = last
        yield node.target.id, " ".join(words)  # type: ignore[union-attr]


def _comment(line: str) -> str | None:
    text = line.strip()
    return text.lstrip("# ") if text.startswith("#") else None


def inline_pictures(app: Any, doctree: nodes.document) -> None:
    """SVG pictures as a part of the page, so that they have the colours that a reader chose."""
    for image in list(doctree.findall(nodes.image)):
        path = HERE / image["uri"]
        if path.suffix == ".svg" and app.builder.format == "html":
            words = f'role="img" aria-label="{image.get("alt", "")}" class="picture"'
            drawn = path.read_text().replace("<svg ", f"<svg {words} ", 1)
            image.replace_self(nodes.raw("", f"<figure>{drawn}</figure>", format="html"))
