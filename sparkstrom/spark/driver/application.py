"""Application: what fits ask of Spark, however this program talks to it.

``classic_application`` has a SparkContext in this process; ``spark.connect`` a session of Spark
Connect, which has DataFrames and nothing else. All rules are on this side of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from sparkstrom.base.errors import UsageError
from sparkstrom.runtime.theta import Theta
from sparkstrom.spark.data.columns import Chosen
from sparkstrom.spark.data.partitioning import Spread
from sparkstrom.spark.driver.averaging_master import TrainingMaster
from sparkstrom.spark.driver.cluster import Slots
from sparkstrom.spark.driver.fit_listeners import FitListener
from sparkstrom.spark.driver.initial_parameters import Handle, StateHandle
from sparkstrom.spark.driver.spark_job import SparkJob
from sparkstrom.spark.driver.training_master import SharedTrainingMaster

if TYPE_CHECKING:
    from sparkstrom.protocol.master.residual_checkpoints import CheckpointFiles
    from sparkstrom.spark.averaging.round_job import AveragingJob
    from sparkstrom.spark.averaging.rounds_control import RoundsControl
    from sparkstrom.spark.controller.control_words import LineOrder
    from sparkstrom.spark.controller.controller_job import PlacedController
    from sparkstrom.spark.driver.evaluation import Evaluation, Wanted
    from sparkstrom.spark.executor.job import TrainingJob

Say = Callable[[str], None]


STOPPED = (
    "the Spark session was stopped (spark.stop()): make a network with a new session; a network of"
    " the stopped one still has its parameters (new.parameters = network.parameters, or"
    " network.save and SparkNetwork.load)"
)


def need_session(application: Application) -> None:
    """Raise UsageError if the application's session was stopped."""
    if application.is_stopped:
        raise UsageError(STOPPED)


class PlaceSearch(Protocol):
    """Looks for the place of a controller's task."""

    def run(self) -> PlacedController:
        """Raise SetupError where no executor can have it, TrainingError where its task fails."""
        ...


class Application(Protocol):
    """One Spark application, from its driver program or from a client of that."""

    @property
    def name(self) -> str:
        """Of the application, or of its session, as far as handles are good."""
        ...

    @property
    def live_conf(self) -> Any:
        """``get(key, default)`` of Spark's configuration."""
        ...

    @property
    def host(self) -> str:
        """This program's machine, as executors may call it."""
        ...

    @property
    def is_stopped(self) -> bool:
        """Was its session stopped, so that Spark runs nothing any more?"""
        ...

    def conf(self) -> Mapping[str, str]:
        """All of the configuration, as it is now."""
        ...

    @property
    def has_workers_output(self) -> bool:
        """Whether this program's standard error shows what tasks print, without our doing."""
        ...

    def check(self, master: TrainingMaster) -> None:
        """Raise UsageError for options that cannot work here."""

    def check_data(self, data: Any) -> None:
        """Raise UsageError for data that a fit, or an evaluation, cannot take here."""

    def need_rdds(self, what: str, instead: str) -> None:
        """Raise UsageError where there are none, for a feature that needs them."""

    def slots(self, seconds: float, say: Say) -> Slots:
        """What it has to run tasks on; waits for executors that are on their way."""
        ...

    def settled(self, master: SharedTrainingMaster, slots: Slots, say: Say) -> SharedTrainingMaster:
        """With ``controller`` found out, where it is "auto"."""
        ...

    def local_property(self, key: str) -> str | None:
        """Of this thread, as Spark has them."""
        ...

    def thread(self, run: Callable[[], None], name: str) -> threading.Thread:
        """One that may ask Spark, not begun."""
        ...

    def interrupts(self) -> AbstractContextManager[None]:
        """In the block Ctrl-C raises KeyboardInterrupt, and ends what Spark was asked to do."""
        ...

    def spread(self, data: Any, chosen: Chosen, workers: int, master: TrainingMaster) -> Spread:
        """The data over one partition per worker; ``training`` knows what that is made of."""
        ...

    def travelling(
        self, theta: Theta, workers: int, state: bytes
    ) -> AbstractContextManager[Handle]:
        """theta, and a state for all workers, at the executors' disposal in the block."""
        ...

    def own_states(
        self, states: Mapping[int, bytes]
    ) -> AbstractContextManager[dict[int, StateHandle]]:
        """The same of each worker's own state."""
        ...

    def training(self, job: TrainingJob, spread: Spread, need: Any) -> SparkJob:
        """The Spark job of a fit, not begun. ``need``: of executors' memory, for explanations."""
        ...

    def rounds(self, job: AveragingJob, spread: Spread, control: RoundsControl) -> SparkJob:
        """The same of a fit in rounds, which are Spark jobs one after another."""
        ...

    def watches(self, job: SparkJob, warn: Say) -> list[FitListener]:
        """Who looks after its executors while a fit runs."""
        ...

    def placing(
        self, training: TrainingJob, kept: CheckpointFiles, line: LineOrder, say: Say
    ) -> PlaceSearch:
        """For a controller in a task."""
        ...

    def door_address(self) -> tuple[str, str]:
        """Where a controller's task finds this program: to bind, and as executors call it."""
        ...

    def ship(self, value: Any) -> Any:
        """A handle whose ``value`` it is, on executors, too."""
        ...

    def evaluate(self, shipped: Any, wanted: Wanted, data: Any, chosen: Chosen) -> Evaluation:
        """The figures of all rows, merged."""
        ...

    def forget(self, network: str) -> None:
        """Remove what a network's workers kept on executors."""
