"""Local rounds whose workers are in this process: all but the processes is the real thing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from sparkstrom import SharedTrainingMaster
from sparkstrom.local import rounds_session
from sparkstrom.local.dealt_rows import dealt
from sparkstrom.local.host_fit import Dealt, HostSite
from sparkstrom.local.local_data import blocks_of_data
from sparkstrom.local.orders import WorkerAnswer, WorkerOrder
from sparkstrom.local.rounds_fit import RoundsFit
from sparkstrom.local.rounds_master import RoundsMaster
from sparkstrom.local.rounds_session import RoundsSession
from sparkstrom.local.wrapper_options import RoundRule
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.runtime.lent_state import LentStates
from sparkstrom.runtime.theta import Theta
from sparkstrom.spark.data.columns import Chosen

CHOSEN = Chosen()


class Pool:
    threads = 1

    def __init__(self, workers: int) -> None:
        self._workers = workers

    def __len__(self) -> int:
        return self._workers


class WorkersHere:
    """As ``WorkersAtWork``; ``before`` is called with each order."""

    def __init__(self, workers: int) -> None:
        self._everybody, self.attempts = range(workers), Counter[int]()
        self._sessions: dict[int, RoundsSession] = {}
        self._reports: dict[int, str] = {}
        self.before: Callable[[int, Any], None] = lambda partition, order: None

    def begin(self) -> range:
        return self._everybody

    def send(self, partition: int, order: WorkerOrder) -> None:
        self.before(partition, order)
        here = rounds_session._here
        here[:] = [one for at, one in self._sessions.items() if at == partition]
        self._reports[partition] = order.carry_out()
        if here:
            self._sessions[partition] = here.pop()

    def answers(self, of: Iterable[int]) -> Iterator[tuple[int, WorkerAnswer]]:
        for partition in list(of):
            yield partition, WorkerAnswer(self._reports.pop(partition))

    def drop(self, partitions: Iterable[int]) -> None:
        pass


class Fit:
    """One fit of (features, labels); ``run`` goes through all its rounds in this thread."""

    def __init__(
        self,
        data: Any,
        model: Any,
        rule: RoundRule,
        directory: Path,
        parameters: Any = None,
        states: LentStates | None = None,
        *,
        batch_rows: int = 4,
        workers: int = 2,
        chosen: Chosen = CHOSEN,
        **spec: Any,
    ) -> None:
        directory.mkdir()
        master = SharedTrainingMaster(batch_size_per_worker=batch_rows)
        pool = cast(Any, Pool(workers))
        site = HostSite(model, master, "a network", pool, directory)
        files = dealt(blocks_of_data(data, chosen), workers, 0, directory)
        self.spec = FitSpec(workers, n_params=model.n_params, version="test", **spec)
        self.theta = Theta(model.n_params, 20)
        self.theta.load(model.initial() if parameters is None else parameters)
        rows, given = Dealt(files, directory), states or LentStates()
        self.fit = RoundsFit(site, self.spec, self.theta, rows, rule, given, judged=False)
        self.master = cast(RoundsMaster, self.fit.master)
        self.workers = WorkersHere(workers)
        self.master._workers = cast(Any, self.workers)

    def run(self) -> list[str]:
        """The workers' last words. Raise what failed."""
        self.master.run()
        if self.master.failure is not None:
            raise self.master.failure.__cause__ or self.master.failure
        return self.master.reports
