"""Fit site: what a network trains, and where; and what a fit is to those who follow it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from sparkstrom.models.base import Flat, FlatModel
from sparkstrom.observe.epochs import EpochBook
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.runtime.lent_state import LentStates
from sparkstrom.runtime.master_control import MasterControl
from sparkstrom.spark.driver.averaging_master import TrainingMaster
from sparkstrom.spark.driver.epoch_watch import EpochWatch
from sparkstrom.spark.driver.fit_call import Showing
from sparkstrom.spark.driver.fit_listeners import FitEvents, FitListener

if TYPE_CHECKING:
    from sparkstrom.spark.driver.application import Application

Master = TypeVar("Master", bound=TrainingMaster, covariant=True)
Other = TypeVar("Other", bound=TrainingMaster)


@dataclass(frozen=True, slots=True)
class TrainingSite(Generic[Master]):
    """The same for all fits of a network."""

    application: Application
    model: FlatModel
    master: Master
    network: str  # names the files kept on executors for the next fit
    keep: bool

    def of(self, master: Other) -> TrainingSite[Other]:
        """The same with this master, whose kind is known."""
        return TrainingSite(self.application, self.model, master, self.network, self.keep)


class SiteToFollow(Protocol):
    """What is trained, and how; where is another matter."""

    @property
    def model(self) -> FlatModel:
        """In the calling process."""
        ...

    @property
    def master(self) -> TrainingMaster:
        """The options."""
        ...


class LearntParameters(Protocol):
    """Of a fit, on the driver."""

    @property
    def k(self) -> int:
        """The exponent of their grid, for fits that need one."""

    @property
    def buffers(self) -> bytes: ...
    def to_host(self) -> Flat:
        """A copy."""
        ...


class RunningFit(Protocol):
    """One fit that is about to begin, on Spark's executors or on this machine.

    ``theta`` is what it has learnt, then and afterwards.
    """

    spec: FitSpec
    book: EpochBook
    states: LentStates  # that workers begin with
    sends_updates: bool  # by thresholds, and without waiting for one another

    @property
    def master(self) -> MasterControl: ...
    @property
    def theta(self) -> LearntParameters: ...
    @property
    def epochs_complete(self) -> int: ...
    @property
    def states_after(self) -> LentStates: ...
    def run(self, showing: Showing, watch: EpochWatch, *others: FitListener) -> None: ...


class TellingRun:
    """A run that tells listeners of itself, by ``_events``, from when it has begun on."""

    _events: FitEvents | None = None

    @property
    def epochs_complete(self) -> int:
        """That all who train have come to the end of, so far."""
        return self._events.epochs_complete if self._events is not None else 0

    @property
    def states_after(self) -> LentStates:
        """What a next fit goes on with: it lies with the workers, or nowhere."""
        return LentStates()
