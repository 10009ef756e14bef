"""Orders: what a worker process is sent, and what it answers."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from sparkstrom.base.errors import SetupError, SparkstromError, TrainingError, UsageError
from sparkstrom.local.dealt_rows import RowFile
from sparkstrom.spark.executor.task_place import TaskPlace

HOST = "localhost"  # in messages


class WorkerOrder(Protocol):
    """Something to do in a worker process."""

    def carry_out(self) -> str:
        """Do it, and return a report as JSON."""
        ...


class WorkerAnswer(NamedTuple):
    """What became of it."""

    report: str
    failure: str = ""  # why there is no report
    trace: str = ""
    is_superseded: bool = False  # the fit goes on without this attempt
    kind: str = ""  # the error's class
    host: str = HOST

    def as_error(self, partition: int) -> SparkstromError:
        """What the calling process raises for it."""
        match self.kind:
            case "UsageError":
                return UsageError(self.failure)
            case "SetupError":
                return SetupError(self.failure)
        return TrainingError(self.failure, self.host, partition, self.trace)


@dataclass(frozen=True, slots=True)
class ShareGradients:
    """Train on one partition, as a Spark task does."""

    job: bytes  # a packed HostJob
    place: TaskPlace
    rows: RowFile

    def carry_out(self) -> str:
        """Join, train, leave."""
        from sparkstrom.spark.executor.tasks import run

        return run(pickle.loads(self.job), self.place, self.rows.blocks())
