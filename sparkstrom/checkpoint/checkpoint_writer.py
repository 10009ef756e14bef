"""Checkpoint writer: a thread that writes one checkpoint at a time, which nothing waits for.

A store that refuses, or answers slowly, costs checkpoints and never the training.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sparkstrom.checkpoint.checkpoint_directory import CheckpointDirectory, Say, reason_of
from sparkstrom.checkpoint.checkpoint_file import Checkpoint

log = logging.getLogger(__name__)

Kind = tuple[str, type[Exception], int | None]  # of failure

LAST_WRITE_S = 120.0  # so long may the last checkpoint take at the end of a fit


@dataclass(frozen=True, slots=True)
class WrittenCheckpoint:
    """A checkpoint that is whole in its directory."""

    path: str
    seconds: float  # copying included
    description: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Offered:
    make: Callable[[], Checkpoint]
    note: str
    since_s: float = field(default_factory=time.monotonic)


class CheckpointWriter:
    """Writes checkpoints to a directory until it is closed.

    say        told the first failure, and that it is over
    written    what is saved, in order; grows at its end
    warnings   the failures that were told
    """

    def __init__(self, directory: CheckpointDirectory, say: Say) -> None:
        self._directory, self._say = directory, say
        self.written: list[WrittenCheckpoint] = []
        self.warnings: list[str] = []
        self._changed = threading.Condition()
        self._offered: _Offered | None = None
        self._failure = ""  # why the last attempt failed; empty when it did not
        self._told: Kind | None = None  # the last failure that was told
        self._failed = 0  # attempts in a row
        self._closed = False
        # A daemon: a store that never answers must not keep the program alive.
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """A checkpoint is being written: offer the next one later."""
        with self._changed:
            return self._offered is not None

    def offer(self, make: Callable[[], Checkpoint], note: str) -> None:
        """Have a checkpoint made and written in the writer's thread.

        ``note`` is what warnings call it, such as "epoch 3". Not while it is ``busy``.
        """
        with self._changed:
            assert self._offered is None, "one checkpoint at a time"
            assert not self._closed, "the checkpoint writer is closed"
            self._offered = _Offered(make, note)
            self._changed.notify_all()

    def close(self, last: Checkpoint | None, timeout_s: float = LAST_WRITE_S) -> None:
        """Write the last checkpoint and end the thread; after ``timeout_s`` it is left alone."""
        end_s = time.monotonic() + timeout_s
        if self._is_idle_by(end_s) and last is not None:
            self.offer(lambda: last, "the end of the fit")
            self._is_idle_by(end_s)
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def unsaved(self) -> str:
        """What is not saved, and why, in words; empty where all is."""
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
            return f"what was learnt after {self.written[-1].path} is not saved: {why}"

    def _is_idle_by(self, end_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: self._offered is None, max(0.0, end_s - time.monotonic())
            )

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._offered is not None or self._closed)
                if self._offered is None:
                    return
                offered = self._offered
            self._perform(offered)
            with self._changed:
                self._offered = None
                self._changed.notify_all()

    def _perform(self, offered: _Offered) -> None:
        try:
            checkpoint = offered.make()
            path = self._directory.write(checkpoint)
        except Exception as error:  # any file system, any kind of error: training goes on
            log.debug("checkpoint of %s", offered.note, exc_info=True)
            self._on_failure(offered, error)
            return
        seconds = time.monotonic() - offered.since_s
        with self._changed:
            self.written.append(WrittenCheckpoint(path, seconds, checkpoint.description))
            failed, self._failed, self._failure = self._failed, 0, ""
        if failed:
            self._say(f"checkpoints are written again, after {failed} that failed: {path}")
        self._remove_old()

    def _on_failure(self, offered: _Offered, error: Exception) -> None:
        is_first = not self._failed
        with self._changed:
            self._failed += 1
            self._failure = f"{offered.note} could not be written ({reason_of(error)})"
        if is_first:
            self._warn(
                _kind("writing", error),
                f"checkpoint of {offered.note} not written to {self._directory.url} "
                f"({reason_of(error)}): training goes on, the next one is tried when it is due",
            )

    def _remove_old(self) -> None:
        try:
            self._directory.remove_old()
        except Exception as error:
            log.debug("removing old checkpoints", exc_info=True)
            self._warn(
                _kind("removing", error),
                f"old checkpoints in {self._directory.url} cannot be removed "
                f"({reason_of(error)}): they stay",
            )

    def _warn(self, kind: Kind, text: str) -> None:
        """Once, and again where it is for another reason than the last time."""
        if kind != self._told:
            self._told = kind
            self.warnings.append(text)
            self._say(text)


def _kind(doing: str, error: Exception) -> Kind:
    """Words of stores differ from failure to failure: they name requests."""
    return doing, type(error), getattr(error, "errno", None)
