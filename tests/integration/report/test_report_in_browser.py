"""Test of the report in a real browser: it draws all plots, requests nothing and logs no error.

It runs with light and dark colours, on wide and narrow pages. ``.ci/run`` installs the browser.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparkstrom.cli.main import main
from tests.unit.observe.run_logs import PLOTS, REAL

BROWSERS = ("chromium", "chromium-browser", "google-chrome")

NOT_HERE = "playwright is not here: the extra test-all has it"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)} (apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason=NOT_HERE)
    with playwright.sync_playwright() as playing:
        launched = playing.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    page = tmp_path_factory.mktemp("report") / "page.html"
    assert main(["report", str(REAL), "-o", str(page)]) == 0
    return page


# The smallest contrast between elements and the background of a figure, as WCAG 2 defines it.
CONTRAST = """(pairs) => {
  const bright = (colour) => {
    const parts = colour.match(/[0-9.]+/g).slice(0, 3).map((one) => {
      const part = one / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const of = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  const card = bright(getComputedStyle(document.querySelector('figure')).backgroundColor);
  return Object.fromEntries(pairs.map(([query, property]) => [query, Math.min(
    ...[...document.querySelectorAll(query)].map(
      (one) => of(bright(getComputedStyle(one)[property]), card)))]));
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_report_page_draws_all_plots_without_requests(
    browser: Any, report: Path, scheme: str, width: int
) -> None:
    context = browser.new_context(
        color_scheme=scheme, viewport={"width": width, "height": 900}, offline=True
    )
    page, told, asked = context.new_page(), [], []
    page.on("console", lambda message: told.append(message.text))
    page.on("pageerror", lambda error: told.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(report.as_uri())
    assert told == []
    assert asked == [report.as_uri()]
    assert page.locator("svg.plot").count() == PLOTS
    for plot in page.locator("svg.plot").all():
        box = plot.bounding_box()
        assert box["width"] > 250
        assert box["height"] > 100
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    contrast = page.evaluate(
        CONTRAST, [["polyline.curve", "stroke"], [".plot text", "fill"], ["h4", "color"]]
    )
    assert contrast["polyline.curve"] >= 3
    assert min(contrast[".plot text"], contrast["h4"]) >= 4.5
    page.get_by_text("Values").first.click()
    assert page.locator("figure table").first.is_visible()
    context.close()
