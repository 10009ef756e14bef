"""Tests of the option checkpoint_every: how it is parsed, and when a checkpoint is due."""

from __future__ import annotations

from typing import Any

import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.checkpoint.writer import (
    CheckpointInterval,
    CheckpointSchedule,
    parse_checkpoint_every,
)


@pytest.mark.parametrize(
    ("text", "every"),
    [
        ("5 min", CheckpointInterval(300, "s")),
        ("30 s", CheckpointInterval(30, "s")),
        ("1 second", CheckpointInterval(1, "s")),
        ("2 h", CheckpointInterval(7200, "s")),
        (" 1.5 hours ", CheckpointInterval(5400, "s")),
        ("1 minute", CheckpointInterval(60, "s")),
        ("2 epochs", CheckpointInterval(2, "epochs")),
        ("1 epoch", CheckpointInterval(1, "epochs")),
        ("500updates", CheckpointInterval(500, "updates")),
        ("1 update", CheckpointInterval(1, "updates")),
    ],
)
def test_checkpoint_every_accepts_times_epochs_and_updates(
    text: str, every: CheckpointInterval
) -> None:
    assert parse_checkpoint_every(text) == every


@pytest.mark.parametrize(
    "text",
    ["", "5", "min", "0 s", "0 epochs", "1.5 epochs", "-5 min", "5 m", "5 days", "2 epochs 3 s",
     "5 MIN", "1e3 s", "٥ min", 300, None],
)  # fmt: skip
def test_invalid_checkpoint_every_raises_usage_error_with_examples(text: Any) -> None:
    """Any other text or type raises ``UsageError`` with examples."""
    with pytest.raises(UsageError, match=r"checkpoint_every is .*: give a number .*'500 updates'"):
        parse_checkpoint_every(text)


def test_time_interval_counts_from_last_written_checkpoint() -> None:
    """With an interval of time, a checkpoint is due that long after the last one was written."""
    cadence = CheckpointSchedule(parse_checkpoint_every("10 s"), now_s=100.0)
    assert not cadence.is_due(109.9, 9, 99)
    assert cadence.is_due(110.0, 0, 0)
    assert cadence.is_due(117.0, 0, 0)
    cadence.mark_written(117.0, 0, 0)
    assert not cadence.is_due(126.9, 0, 0)
    assert cadence.is_due(127.0, 0, 0)


def test_update_interval_counts_from_last_written_checkpoint() -> None:
    """With an interval of updates, a checkpoint is due that many updates after the last one."""
    cadence = CheckpointSchedule(parse_checkpoint_every("500 updates"), now_s=0.0, updates=1200)
    assert not cadence.is_due(1e6, 9, 1699)
    assert cadence.is_due(0.0, 0, 1700)
    cadence.mark_written(0.0, 0, 1730)
    assert not cadence.is_due(0.0, 0, 2229)


def test_multiples_of_epoch_interval_are_due_after_late_checkpoint() -> None:
    """With an interval of epochs, multiples of it are due, also after one that was late."""
    cadence = CheckpointSchedule(parse_checkpoint_every("2 epochs"), now_s=0.0, epochs=1)
    assert cadence.is_due(0.0, 2, 0)
    cadence.mark_written(0.0, 3, 0)  # late: the previous checkpoint was still being written
    assert cadence.is_due(0.0, 4, 0)
    assert not cadence.is_due(1e6, 3, 10**6)
