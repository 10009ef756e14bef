"""Decide when a fit's checkpoints are due, and write them in a separate thread.

Training never waits for the thread: if the storage fails or is slow, checkpoints are skipped and
training continues.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import COUNT_MAX, shown
from sparkstrom.checkpoint.directory import CheckpointDirectory, WriteLine, format_error, log
from sparkstrom.checkpoint.files import Checkpoint

INTERVAL_PATTERN = r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)\s*"  # an amount and its unit
SECONDS_PER_UNIT = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("min", "mins", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
}
COUNT_UNITS = {"epoch": "epochs", "epochs": "epochs", "update": "updates", "updates": "updates"}
FINAL_WRITE_TIMEOUT_S = 120.0  # for writing the last checkpoint, at the end of a fit
FailureKind = tuple[str, type[Exception], int | None]  # operation, error class, errno


@dataclass(frozen=True, slots=True)
class CheckpointInterval:
    """The interval between two checkpoints, in time, epochs or updates."""

    amount: float  # number of units
    unit: str  # "s", "epochs" or "updates"


def parse_checkpoint_every(text: object) -> CheckpointInterval:
    """Parse the option ``checkpoint_every``, such as "5 min". Raise UsageError if it is invalid."""
    match = re.fullmatch(INTERVAL_PATTERN, text) if isinstance(text, str) else None
    if match and float(match[1]) <= COUNT_MAX:
        amount, unit = float(match[1]), match[2]
        if unit in SECONDS_PER_UNIT and amount > 0:
            return CheckpointInterval(amount * SECONDS_PER_UNIT[unit], "s")
        if unit in COUNT_UNITS and amount >= 1 and amount.is_integer():
            return CheckpointInterval(amount, COUNT_UNITS[unit])
    raise UsageError(
        f"checkpoint_every is {shown(text)}: give a number of seconds, minutes or hours, or a whole"
        " number of epochs or updates, such as '30 s', '5 min', '2 h', '2 epochs', '500 updates'"
    )


class CheckpointSchedule:
    """Decides when the next checkpoint is due, by time or by the number of epochs or updates.

    The methods get the time, the epochs and the updates, but use only the one in which the interval
    is given.

    Args:
        every: interval from the fit's beginning or the last checkpoint to the next one.
        now_s: the current time in seconds.
        epochs: number of epochs trained so far.
        updates: number of updates committed so far.
    """

    def __init__(
        self, every: CheckpointInterval, now_s: float, epochs: int = 0, updates: int = 0
    ) -> None:
        self._every = every
        self.mark_written(now_s, epochs, updates)

    def is_due(self, now_s: float, epochs: int, updates: int) -> bool:
        """Return whether a checkpoint is due now."""
        return self._position(now_s, epochs, updates) >= self._due

    def mark_written(self, now_s: float, epochs: int, updates: int) -> None:
        """Record that a checkpoint is being written now; the next one is due an interval later."""
        at = self._position(now_s, epochs, updates)
        # Stay with multiples, such as the 2nd, 4th, ... epoch, even if one checkpoint was late.
        if self._every.unit == "epochs":
            at = math.floor(at / self._every.amount) * self._every.amount
        self._due = at + self._every.amount

    def _position(self, now_s: float, epochs: int, updates: int) -> float:
        """Return the argument that has the unit of the schedule's interval."""
        return {"s": now_s, "epochs": epochs, "updates": updates}[self._every.unit]


@dataclass(frozen=True, slots=True)
class WrittenCheckpoint:
    """A record of a checkpoint that has been written completely."""

    path: str  # the file's path or URL
    seconds: float  # time taken to copy the parameters and write the file
    description: dict[str, Any]  # the checkpoint's description


@dataclass(frozen=True, slots=True)
class _PendingWrite:
    """A request to the writer's thread to create and write a checkpoint."""

    make: Callable[[], Checkpoint]  # creates the checkpoint; called in the thread
    note: str  # name of the checkpoint in warnings, such as "epoch 3"
    since_s: float = field(default_factory=time.monotonic)  # time of the request


class CheckpointWriter:
    """Writes checkpoints to a directory in its own thread, one at a time.

    Args:
        directory: where to write.
        report: called with a line of text after the first of several failures in a row, and when
            writing works again.

    Attributes:
        written: the checkpoints written so far, in order.
        warnings: the failures reported so far.
    """

    def __init__(self, directory: CheckpointDirectory, report: WriteLine) -> None:
        self._directory, self._report = directory, report
        self.written: list[WrittenCheckpoint] = []
        self.warnings: list[str] = []
        self._changed = threading.Condition()
        self._offered: _PendingWrite | None = None
        self._failure = ""  # reason why the last attempt failed; "" if it succeeded
        self._last_reported: FailureKind | None = None  # the last failure reported
        self._failure_count = 0  # consecutive failed attempts
        self._closed = False
        # A daemon thread, because storage that never answers must not keep the program alive.
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written, so that ``offer`` may not be called now."""
        with self._changed:
            return self._offered is not None

    def offer(self, make: Callable[[], Checkpoint], note: str) -> None:
        """Have the writer's thread create and write a checkpoint; not allowed while ``busy``.

        Args:
            make: creates the checkpoint.
            note: name of the checkpoint in warnings, such as "epoch 3".
        """
        with self._changed:
            assert self._offered is None, "one checkpoint at a time"
            assert not self._closed, "the checkpoint writer is closed"
            self._offered = _PendingWrite(make, note)
            self._changed.notify_all()

    def close(self, last: Checkpoint | None, timeout_s: float = FINAL_WRITE_TIMEOUT_S) -> None:
        """Write ``last``, unless it is None, and end the thread; wait at most ``timeout_s``.

        If an earlier write takes all of this time, ``last`` is not written.
        """
        end_s = time.monotonic() + timeout_s
        if self._wait_until_idle(end_s) and last is not None:
            self.offer(lambda: last, "the end of the fit")
            self._wait_until_idle(end_s)
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def unsaved_reason(self) -> str:
        """A text that names what is not saved and why; "" if everything is saved."""
        with self._changed:
            if self._offered is not None:
                waited_s = time.monotonic() - self._offered.since_s
                why = f"writing {self._offered.note} takes more than {waited_s:.0f} s"
            elif self._failure:
                why = self._failure
            else:
                return ""
            if not self.written:
                return f"no checkpoint is saved in {self._directory.url}: {why}"
            return f"what was learned after {self.written[-1].path} is not saved: {why}"

    def _wait_until_idle(self, end_s: float) -> bool:
        """Wait until no checkpoint is being written; return False on timeout at ``end_s``."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._offered is None, max(0.0, end_s - time.monotonic())
            )

    def _run(self) -> None:
        """Write offered checkpoints until the writer is closed; runs in the writer's thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._offered is not None or self._closed)
                if self._offered is None:
                    return
                offered = self._offered
            self._write_pending(offered)
            with self._changed:
                self._offered = None
                self._changed.notify_all()

    def _write_pending(self, offered: _PendingWrite) -> None:
        """Create and write one checkpoint; record its result or failure."""
        try:
            checkpoint = offered.make()
            path = self._directory.write(checkpoint)
        except Exception as error:  # file systems raise errors of any kind; training continues
            log.debug("checkpoint of %s", offered.note, exc_info=True)
            self.record_failure(offered.note, error)
            return
        seconds = time.monotonic() - offered.since_s
        with self._changed:
            self.written.append(WrittenCheckpoint(path, seconds, checkpoint.description))
            failed, self._failure_count, self._failure = self._failure_count, 0, ""
        if failed:
            self._report_success(failed, path)
        self._remove_old()

    def record_failure(self, note: str, error: Exception) -> None:
        """Record that a checkpoint was not written; warn if this is the first failure in a row.

        Not allowed from another thread while ``busy``. ``note``: the checkpoint's name in warnings.
        """
        is_first = not self._failure_count
        with self._changed:
            self._failure_count += 1
            self._failure = f"{note} could not be written ({format_error(error)})"
        if is_first:
            self._warn_of_failure(note, error)

    def _warn_of_failure(self, note: str, error: Exception) -> None:
        """Warn that the checkpoint ``note`` was not written."""
        self._warn(
            failure_kind("writing", error),
            f"checkpoint of {note} not written to {self._directory.url} "
            f"({format_error(error)}): training continues, the next one is tried when due",
        )

    def _report_success(self, failed: int, path: str) -> None:
        """Report that ``path`` was written after ``failed`` attempts that failed."""
        self._report(f"checkpoints are written again, after {failed} that failed: {path}")

    def _remove_old(self) -> None:
        """Remove old checkpoints; warn if that fails."""
        try:
            self._directory.remove_old()
        except Exception as error:
            log.debug("removing old checkpoints", exc_info=True)
            self._warn(
                failure_kind("removing", error),
                f"old checkpoints in {self._directory.url} cannot be removed "
                f"({format_error(error)}): they stay",
            )

    def _warn(self, kind: FailureKind, text: str) -> None:
        """Report a failure, unless the last reported failure was of the same kind."""
        if kind != self._last_reported:
            self._last_reported = kind
            self.warnings.append(text)
            self._report(text)


def failure_kind(doing: str, error: Exception) -> FailureKind:
    """Return (``doing``, error class, errno), by which repeated failures are recognized.

    ``doing`` names the failed operation, such as "writing". The errno is None if there is none.
    """
    return doing, type(error), getattr(error, "errno", None)
