"""Tests that docs/troubleshooting.md quotes existing messages and lists all error classes.

Not every message has an entry: when each had one, the page had 12,600 words, most of them a
repetition of the message, and the few entries that help were hard to find. A message itself should
say what to do; an entry is for what does not fit into it: checks in several places, or causes
outside of sparkstrom. These tests check that each message is a literal where it is raised, so that
it can be read and searched for, and that no entry quotes a message that no longer exists.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/troubleshooting.md"


def load_error_texts():
    spec = importlib.util.spec_from_file_location("error_texts", ROOT / "docs/error_texts.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["error_texts"] = module  # dataclasses search for it there
    spec.loader.exec_module(module)
    return module


error_texts = load_error_texts()


@cache
def all_texts():
    """Parse the package once, and only in a process that runs these tests."""
    return error_texts.told()


@cache
def all_entries():
    return error_texts.entries(PAGE.read_text())


# Places that pass on a text which was made, and is checked, elsewhere. Add a new one only if this
# is so: otherwise write its text as a literal at the place, or as a constant of a module.
PASSED_ON = {
    ("checkpoint/directory.py", "CheckpointDamaged("),
    ("codec/sealed_frames.py", "FrameError(Rejection."),
    ("models/row_checks.py", "BadValue(role, "),
    ("runtime/message_endpoint.py", "FrameError(Rejection."),
    ("runtime/trainer_thread.py", "PeerError(directive.reason)"),
    ("transport/aeron/media_driver.py", "DriverLost(*DRIVER_ENDED)"),
    ("checkpoint/writer.py", "self.warnings.append(text)"),
    ("local/worker_pool.py", "SetupError(self.failure)"),
    ("local/worker_pool.py", "TrainingError(self.failure, "),
    ("local/worker_pool.py", "UsageError(self.failure)"),
    ("protocol/master/membership.py", "ev.Abort(str(error), "),
    ("protocol/master/master.py", "ev.Abort(reason)"),
    ("protocol/master/master.py", "ev.Abort(failed.reason, "),
    (
        "protocol/master/phases.py",
        "ev.Abort(reason, kind=ev.Failure.SETUP, lack=WorkerShortage.AT_START)",
    ),
    ("protocol/master/statuses.py", "ev.Note(self.slow[node])"),
    ("protocol/master/phases.py", "ev.Abort(text, partition=at, "),
    ("runtime/master_control.py", "UsageError(abort.reason)"),
    ("runtime/master_control.py", "SetupError(abort.reason)"),
    ("runtime/master_control.py", "RowsRefused(abort.reason, "),
    ("runtime/master_control.py", "TrainingError(abort.reason, "),
    ("runtime/master_thread.py", "ev.AbortRequested(reason)"),
    ("runtime/master_thread.py", "log.warning('%s', text)"),
    ("rehearsal/worker.py", "PeerError(command.reason)"),
    ("rounds/worker_round.py", "UsageError(reason)"),
    ("rounds/worker_round.py", "TrainingError(reason, "),
    ("fit/accuracy_warnings.py", "log.warning('%s', text)"),
    ("fit/fit_context.py", "self.warnings.append(text)"),
    ("fit/session.py", "self._reporting.warn(warning)"),
    ("fit/session.py", "reporting.warn(warning)"),
    ("fit/listeners.py", "log.warning('%s', text)"),
    ("fit/listeners.py", "self._warn(str(self._raised"),
    ("fit/listeners.py", "self.warnings.append(text)"),
    ("spark/jobs.py", "NetworkError(blocked[0] + hosts"),
    ("worker/training_task.py", "log.warning('%s', text)"),
}

TEXTS_MAX = 12  # texts that one pattern may match
LETTERS_MIN = 8  # in a pattern; one with fewer may match one text


def is_passed_on(text) -> bool:
    place = text.where.partition(":")[0]
    return text.text == error_texts.GAP and any(
        place == path and text.code.startswith(code) for path, code in PASSED_ON
    )


def unreadable_places(texts) -> list[str]:
    """Return the places whose text is neither a literal nor passed on from elsewhere."""
    return [text.where for text in texts if text.text == error_texts.GAP and not is_passed_on(text)]


def test_every_message_is_literal_where_raised() -> None:
    assert unreadable_places(all_texts()) == []


def test_every_error_class_is_in_table() -> None:
    table = PAGE.read_text().partition("\n## ")[0]
    assert [name for name in error_texts.error_classes() if f"`{name}`" not in table] == []


@pytest.mark.parametrize(("path", "code"), sorted(PASSED_ON))
def test_place_that_passes_on_message_exists(path: str, code: str) -> None:
    """Each place in ``PASSED_ON`` still exists and passes on a text."""
    told = (text for text in all_texts() if text.text == error_texts.GAP)
    assert any(text.where.startswith(f"{path}:") and text.code.startswith(code) for text in told)


def test_every_entry_pattern_matches_some_message() -> None:
    """If a message is removed, its entry or pattern must be removed, too."""
    useless = [
        f"{entry.heading}: {pattern}"
        for entry in all_entries()
        for pattern in entry.patterns
        if not any(re.search(pattern, text.text) for text in all_texts())
    ]
    assert useless == []


def test_no_entry_pattern_matches_many_messages() -> None:
    """A pattern that matches many messages would also match new ones."""
    patterns = [pattern for entry in all_entries() for pattern in entry.patterns]
    texts = {text.text for text in all_texts()}
    counts = {
        pattern: sum(re.search(pattern, text) is not None for text in texts) for pattern in patterns
    }
    assert [
        pattern
        for pattern, count in counts.items()
        if count > (1 if len(re.findall("[a-z]", pattern)) < LETTERS_MIN else TEXTS_MAX)
    ] == []


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
        'class TimeoutReason:\n    MOON = "the moon is {x:.0f} km away: wait"',
    ],
)
def test_new_message_in_any_form_is_detected(source: str) -> None:
    """A new message is found in each of these forms."""
    module = error_texts.Module(error_texts.PACKAGE / "moon.py", ast.parse(source))
    found = list(error_texts.told_in(module))
    assert [text.text for text in found] == ["the moon is … km away: wait"]
    assert unreadable_places(found) == []


def test_message_computed_by_unknown_function_is_reported() -> None:
    """A message that is computed by an unknown function is reported."""
    module = error_texts.Module(
        error_texts.PACKAGE / "moon.py", ast.parse("raise UsageError(it())")
    )
    found = list(error_texts.told_in(module))
    assert [text.text for text in found] == [error_texts.GAP]
    assert unreadable_places(found) == ["moon.py:1"]


def test_entry_headings_are_unique() -> None:
    assert [h for h, n in Counter(entry.heading for entry in all_entries()).items() if n > 1] == []
