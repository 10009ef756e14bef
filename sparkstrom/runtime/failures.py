"""Failures: the error that the driver raises where a machine has aborted the fit."""

from __future__ import annotations

from sparkstrom.base.errors import SetupError, SparkstromError, TrainingError, UsageError
from sparkstrom.protocol.common import events as ev


def failure_of(abort: ev.Abort) -> SparkstromError:
    """The error that ``fit`` raises for it."""
    match abort.kind:
        case ev.Failure.USAGE:
            return UsageError(abort.reason)
        case ev.Failure.SETUP:
            return SetupError(abort.reason)
        case ev.Failure.TRAINING:
            partition = -1 if abort.partition is None else abort.partition  # as users see it
            return TrainingError(abort.reason, abort.host, partition, abort.trace, abort.phase)
