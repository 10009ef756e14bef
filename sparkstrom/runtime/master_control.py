"""Master control: what the driver's main thread asks of the master, wherever that runs.

``runtime.master_thread`` is one in this process; ``spark.controller.remote_master`` stands for one
in a Spark task.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Protocol

from sparkstrom.base.errors import SparkstromError
from sparkstrom.base.identity import Endpoint
from sparkstrom.runtime.fit_state import Outcome, Progress, Snapshot


class MasterControl(Protocol):
    """Wait on ``finished``; then ``failure``, or after ``end`` ``outcome()``."""

    endpoint: Endpoint  # that workers join at
    join_stream: int
    finished: threading.Event  # done, or failed
    failure: SparkstromError | None

    @property
    def progress(self) -> Progress:
        """The newest look."""
        ...

    @property
    def updater_copies(self) -> tuple[bytes, ...]:
        """Workers' states that a last checkpoint is to have, once it has ended; (): none came."""
        ...

    @property
    def settles(self) -> bool:
        """Will it be ``finished`` soon, once all tasks have returned?"""
        ...

    @property
    def knows_theta(self) -> bool:
        """Once it has ended: are the driver's parameters those that were learnt?"""
        ...

    @property
    def reachable(self) -> bool:
        """Would ``snapshot`` and ``copy_updaters`` be answered now?"""
        ...

    def start(self) -> None:
        """Begin the fit."""

    def request_stop(self, reason: str) -> None:
        """Drain, audit, done: keep what is trained."""

    def give_up(self, reason: str) -> None:
        """The fit has failed outside the mesh: tell the workers to end."""

    def snapshot(self, *, updaters: bool = False) -> Snapshot:
        """A copy of theta; raise SparkstromError where there is none to be had.

        ``updaters``: workers' states are asked for next; who has them sets those of now aside.
        """
        ...

    def copy_updaters(self, *, everybody: bool) -> Future[tuple[bytes, ...]]:
        """Some worker's updater and encoder state, or each's; (): nobody lent one in time.

        What a snapshot has set aside is of that snapshot, and is given out once.
        """
        ...

    def end(self) -> None:
        """Stop it; only once the job has ended."""

    def outcome(self) -> Outcome:
        """The result of a fit that is done."""
        ...
