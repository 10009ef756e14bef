"""Tests of the corpus of planted bugs: each fits the sources, and has a reason and a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.planted.corpus import Bug, bugs

ROOT = Path(__file__).parents[2]

SOURCE = """
class Lease:
    def renew(self, now_s):
        if self.lost and not (
            self.ended or
            now_s > self.until_s  # too late
        ):
            self.until_s = now_s
        self.renewals += 1

    def end(self):
        self.ended = True
        self.renewals += 1
"""


def test_each_planted_bug_fits_sources_and_names_tests() -> None:
    wrong = []
    for bug in sorted(bugs(), key=lambda bug: bug.file):
        source = (ROOT / "sparkstrom" / bug.file).read_text()
        try:
            planted = bug.planted(source)
            compile(planted, bug.file, "exec")
            if planted == source:
                wrong.append(f"{bug.name} changes nothing")
        except (ValueError, SyntaxError) as error:
            wrong.append(f"{bug.name}: {error}")
        if not bug.why or not (bug.tests or bug.modes):
            wrong.append(f"{bug.name} does not say why, or what catches it")
        wrong += [f"{bug.name}: no {test}" for test in bug.tests if not (ROOT / test).exists()]
    assert wrong == []


def plant_in_sample(find: str, replace: str, within: str | None = None) -> str:
    return Bug("bug", "why", "lease.py", find, replace, within).planted(SOURCE)


def test_find_matches_regardless_of_layout_and_comments() -> None:
    """``find`` matches regardless of line breaks, indentation and comments."""
    changed = plant_in_sample(
        "not (self.ended or now_s > self.until_s)", "self.ended", "Lease.renew"
    )
    assert "        if self.lost and self.ended:\n            self.until_s" in changed


def test_find_searches_only_named_function() -> None:
    with pytest.raises(ValueError, match="is 2 times in Lease of"):
        plant_in_sample("self.renewals += 1", "", "Lease")
    with pytest.raises(ValueError, match=r"there is no Lease\.begin of"):
        plant_in_sample("self.renewals += 1", "", "Lease.begin")
    changed = plant_in_sample("self.renewals += 1", "", "Lease.end")
    assert changed == SOURCE.removesuffix("        self.renewals += 1\n")


def test_multiline_replacement_keeps_indentation() -> None:
    """A replacement of several lines is indented like the code that it replaces."""
    changed = plant_in_sample(
        "self.ended = True", "if self.lost:\n    self.ended = True", "Lease.end"
    )
    assert "        if self.lost:\n            self.ended = True\n        self.renewals" in changed
