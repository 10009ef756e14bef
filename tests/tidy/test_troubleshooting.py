"""Every text that people may see when something fails has its entry in docs/troubleshooting.md."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/troubleshooting.md"


def load_error_texts():
    spec = importlib.util.spec_from_file_location("error_texts", ROOT / "docs/error_texts.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["error_texts"] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


error_texts = load_error_texts()
TEXTS = error_texts.told()
ENTRIES = error_texts.entries(PAGE.read_text())

# Sites whose text was made elsewhere, where it is looked at. A new one belongs here only when that
# is so: otherwise write its text as a literal at the site, or as a constant of a module.
PASSED_ON = {
    ("checkpoint/checkpoint_writer.py", "self.warnings.append(text)"),
    ("local/orders.py", "SetupError(self.failure)"),
    ("local/orders.py", "TrainingError(self.failure, "),
    ("local/orders.py", "UsageError(self.failure)"),
    ("protocol/master/admission.py", "ev.Abort(str(error), "),
    ("protocol/master/master.py", "ev.Abort(reason)"),
    ("protocol/master/master.py", "ev.Abort(message.reason, "),
    ("protocol/master/master.py", "ev.Abort(failed.reason, "),
    ("protocol/master/phases.py", "ev.Abort(reason, kind=ev.Failure.SETUP, lack=Lack.AT_START)"),
    ("protocol/master/statuses.py", "ev.Note(self.slow[node])"),
    ("protocol/master/vacancies.py", "ev.Abort(reason, partition=at, "),
    ("runtime/failures.py", "UsageError(abort.reason)"),
    ("runtime/failures.py", "SetupError(abort.reason)"),
    ("runtime/failures.py", "RowsRefused(abort.reason, "),
    ("runtime/failures.py", "TrainingError(abort.reason, "),
    ("runtime/master_thread.py", "ev.GivenUp(reason)"),
    ("runtime/master_thread.py", "log.warning('%s', text)"),
    ("spark/averaging/rounds.py", "UsageError(reason)"),
    ("spark/averaging/rounds.py", "TrainingError(reason, "),
    ("spark/driver/accuracy_warnings.py", "log.warning('%s', text)"),
    ("spark/driver/fit_call.py", "self.warnings.append(text)"),
    ("spark/driver/followed_fit.py", "self._showing.warn(warning)"),
    ("spark/driver/listener_thread.py", "log.warning('%s', text)"),
    ("spark/driver/listener_thread.py", "self._warn(str(self._raised"),
    ("spark/driver/listener_thread.py", "self.warnings.append(text)"),
    ("spark/driver/memory_watch.py", "self._warn(text)"),
    ("spark/driver/start_watch.py", "NetworkError(closed[0] + _whose("),
}

TEXTS_MAX = 12  # that one pattern may find
LETTERS_MIN = 8  # in a pattern; one of fewer may find one text

HOW = """
{count} texts have no entry in docs/troubleshooting.md:

{texts}

For each, either add an entry there, under the section it belongs to, whose heading is how the text
begins, with … for what is filled in:

    ### `the fixed words of the text`

    What lies behind it, and what to do.

or add a line below the heading of the entry that says already what to do about it:

    <!-- covers: a regular expression that finds the text, … included -->
"""


def is_passed_on(text) -> bool:
    place = text.where.partition(":")[0]
    return text.text == error_texts.GAP and any(
        place == path and text.code.startswith(code) for path, code in PASSED_ON
    )


def uncovered(texts, entries) -> list:
    return [
        text
        for text in texts
        if not is_passed_on(text) and not any(entry.covers(text) for entry in entries)
    ]


def test_every_text_has_an_entry() -> None:
    lost = uncovered(TEXTS, ENTRIES)
    said = "\n".join(f"    {text.where}  {text.kind}\n        {text.text}" for text in lost)
    assert not lost, HOW.format(count=len(lost), texts=said)


@pytest.mark.parametrize("name", sorted(error_texts.error_classes()))
def test_every_class_has_an_entry(name: str) -> None:
    assert f"### `{name}`\n" in PAGE.read_text()


@pytest.mark.parametrize(("path", "code"), sorted(PASSED_ON))
def test_every_site_that_passes_on_is_there(path: str, code: str) -> None:
    told = (text for text in TEXTS if text.text == error_texts.GAP)
    assert any(text.where.startswith(f"{path}:") and text.code.startswith(code) for text in told)


def test_every_entry_is_about_something() -> None:
    """Whoever removes a text removes its entry, or the pattern."""
    useless = [
        f"{entry.heading}: {pattern}"
        for entry in ENTRIES
        for pattern in entry.patterns
        if not any(re.search(pattern, text.text) for text in TEXTS)
    ]
    assert useless == []


def test_no_pattern_is_about_everything() -> None:
    """One that finds whatever comes would hide what is new."""
    patterns = [pattern for entry in ENTRIES for pattern in entry.patterns]
    texts = {text.text for text in TEXTS}
    counts = {
        pattern: sum(re.search(pattern, text) is not None for text in texts) for pattern in patterns
    }
    assert [
        pattern
        for pattern, count in counts.items()
        if count > (1 if len(re.findall("[a-z]", pattern)) < LETTERS_MIN else TEXTS_MAX)
    ] == []
    classes = {name for entry in ENTRIES for name in entry.classes}
    told = {
        "BadValue",
        "NoDl4jNetwork",
        "NotImported",
        "CheckpointDamaged",
        "DriverLost",
        "FrameError",
        "PeerError",
        "TransportError",
        "WireError",
    }
    assert classes <= told


@pytest.mark.parametrize(
    "source",
    [
        'raise SetupError(f"the moon is {x} km away: wait")',
        'raise errors.TrainingError(reason="the moon is {} km away: wait".format(x))',
        'said = f"the moon is {x} " + "km away: wait"; raise UsageError(said)',
        'FAR = "the moon is {} km away: wait"; raise UsageError(FAR.format(x))',
        'raise UsageError(far(x))\n\ndef far(x):\n    return f"the moon is {x} km away: wait"',
        'log.warning("the moon is %s km away: wait", x)',
        'warnings.append(f"the moon is {x} km away: wait")',
        'return [ev.Abort(f"the moon is {x} km away: wait", "", host)]',
        'ev.Note(f"the moon is {x} km away: wait")',
        'class Vain:\n    MOON = "the moon is {x:.0f} km away: wait"',
    ],
)
def test_a_new_text_is_found_and_has_no_entry(source: str) -> None:
    module = error_texts.Module(error_texts.PACKAGE / "moon.py", ast.parse(source))
    found = list(error_texts.told_in(module))
    assert [text.text for text in found] == ["the moon is … km away: wait"]
    assert uncovered(found, ENTRIES) == found


def test_a_text_that_cannot_be_read_is_asked_for() -> None:
    module = error_texts.Module(
        error_texts.PACKAGE / "moon.py", ast.parse("raise UsageError(it())")
    )
    found = list(error_texts.told_in(module))
    assert [text.text for text in found] == [error_texts.GAP]
    assert uncovered(found, ENTRIES) == found


def test_headings_are_there_once() -> None:
    assert [h for h, n in Counter(entry.heading for entry in ENTRIES).items() if n > 1] == []
