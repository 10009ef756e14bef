"""Failures: the error that the driver raises where a machine has aborted the fit."""

from __future__ import annotations

from sparkstrom.base.errors import (
    RowsRefused,
    SetupError,
    SparkstromError,
    TrainingError,
    UsageError,
)
from sparkstrom.protocol.common import events as ev

CHECKING = "reading rows"  # what a worker was doing that has refused a row


def failure_of(abort: ev.Abort) -> SparkstromError:
    """The error that ``fit`` raises for it."""
    match abort.kind:
        case ev.Failure.USAGE:
            return UsageError(abort.reason)
        case ev.Failure.SETUP:
            return SetupError(abort.reason)
        case ev.Failure.TRAINING:
            partition = -1 if abort.partition is None else abort.partition  # as users see it
            where = abort.host, partition, abort.trace, abort.phase
            if abort.phase == CHECKING:
                return RowsRefused(abort.reason, *where)
            return TrainingError(abort.reason, *where)
