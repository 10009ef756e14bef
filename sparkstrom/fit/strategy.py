"""Training strategies: the differences between gradient sharing and round-based training.

A fit calls its strategy and never checks the class of the user's options. ``Strategy`` describes
round-based training, without a network controller or thresholded updates. ``GradientSharing``
overrides the differences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

from sparkstrom.base.errors import UsageError
from sparkstrom.fit.accuracy_warnings import accuracy_warnings, scaled_hyperparameters
from sparkstrom.fit.summary import HyperparameterChanges
from sparkstrom.models.base import FlatModel
from sparkstrom.options.common import CommonOptions
from sparkstrom.options.gradient_sharing import SharedTrainingMaster
from sparkstrom.options.network import DRIVER, parse_controller
from sparkstrom.runtime.fit_state import Outcome

Master = TypeVar("Master", bound=CommonOptions, covariant=True)


class Strategy(Generic[Master]):
    """The strategy of round-based training, and the base class of other strategies."""

    def __init__(self, master: Master) -> None:
        self._master = master

    @property
    def master(self) -> Master:
        """The user's options."""
        return self._master

    @property
    def controller(self) -> str:
        """Where the process that numbers updates runs, as in the option ``controller``."""
        return DRIVER

    @property
    def has_controller_task(self) -> bool:
        """Whether the controller runs in a Spark task, which takes a task slot and can be lost."""
        return parse_controller(self.controller).is_in_task

    @property
    def controller_restarts(self) -> int:
        """Number of controllers that a fit may lose and still continue."""
        return 0

    @property
    def layer_multipliers(self) -> Mapping[str, int]:
        """Thresholds of layers in multiples of tau, by layer name."""
        return {}

    def check_workers(self, workers: int) -> None:
        """Raise UsageError if a fit with ``workers`` workers could not start."""

    def scaled_hyperparameters(self, model: FlatModel, outcome: Outcome) -> HyperparameterChanges:
        """Return how momentum and schedules were rescaled at the end of the fit."""
        return {}

    def accuracy_warnings(
        self, model: FlatModel, outcome: Outcome, minibatches_before: int
    ) -> list[str]:
        """Return and log warnings about likely reasons for a loss of accuracy."""
        return []


class GradientSharing(Strategy[SharedTrainingMaster]):
    """Asynchronous training that sends thresholded updates, which a controller numbers."""

    @property
    def controller(self) -> str:
        """The option ``controller``."""
        return self.master.void.controller

    @property
    def controller_restarts(self) -> int:
        """The option ``controller_restarts``."""
        return self.master.void.controller_restarts

    @property
    def layer_multipliers(self) -> Mapping[str, int]:
        """The option ``layer_multipliers``; {} if the option is None."""
        return self.master.layer_multipliers or {}

    def check_workers(self, workers: int) -> None:
        """Raise UsageError if fewer than ``min_workers`` workers can join."""
        if self.master.min_workers > workers:
            raise UsageError(
                f"min_workers={self.master.min_workers}: the fit has {workers} workers, one for"
                " each partition, and more cannot join: lower min_workers, or give more task slots"
                " or partitions"
            )

    def scaled_hyperparameters(self, model: FlatModel, outcome: Outcome) -> HyperparameterChanges:
        """Return how momentum and schedules were rescaled because several workers train."""
        return scaled_hyperparameters(
            self.master, model, outcome.rows, summed=outcome.summed_workers
        )

    def accuracy_warnings(
        self, model: FlatModel, outcome: Outcome, minibatches_before: int
    ) -> list[str]:
        """Return and log the warnings of ``fit.accuracy_warnings.accuracy_warnings``."""
        return accuracy_warnings(self.master, model, outcome, minibatches_before)
