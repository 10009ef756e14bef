"""Tests of the text of ``TrainingError``: one line, followed by the worker's trace."""

from __future__ import annotations

import pickle
import traceback

from sparkstrom.base.errors import TrainingError


def test_training_error_is_one_line_with_trace_as_note() -> None:
    """The message is one line; the worker's trace is a note, also after pickling."""
    error = TrainingError("NaN", "host-b", 3, "Traceback\n  in step\nValueError: NaN")
    assert str(error) == "NaN (partition 3 on host-b)"
    printed = "".join(traceback.format_exception(pickle.loads(pickle.dumps(error))))
    assert printed.endswith("TrainingError: NaN (partition 3 on host-b)\nTraceback\n  in step\n"
                            "ValueError: NaN\n")  # fmt: skip
    assert not hasattr(TrainingError("no trace"), "__notes__")


def test_training_error_message_names_phase() -> None:
    error = pickle.loads(pickle.dumps(TrainingError("NaN", "host-b", 3, phase="training")))
    assert str(error) == "NaN (partition 3 on host-b, training)"
