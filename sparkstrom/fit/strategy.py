"""Training strategies: the differences between gradient sharing and round-based training.

A fit calls its strategy and never checks the class of the user's options. ``Strategy`` describes
round-based training, which needs no controller (a process that numbers updates) and sends no
thresholded updates. ``GradientSharing`` overrides the differences.
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
from sparkstrom.runtime.master_control import FitOutcome

Master = TypeVar("Master", bound=CommonOptions, covariant=True)


class Strategy(Generic[Master]):
    """The strategy of round-based training, and the base class of other strategies."""

    def __init__(self, master: Master) -> None:
        self.master = master  # the user's options

    @property
    def controller(self) -> str:
        """Where a controller runs, as in the option ``controller``; here in the driver program."""
        return DRIVER

    @property
    def has_controller_task(self) -> bool:
        """Whether the controller runs in a Spark task, which takes a task slot and can be lost."""
        return parse_controller(self.controller).is_in_task

    @property
    def controller_restarts(self) -> int:
        """Number of controllers that a fit may lose and still continue; here 0."""
        return 0

    @property
    def layer_multipliers(self) -> Mapping[str, int]:
        """Thresholds of layers in multiples of the threshold tau, by layer name; here {}."""
        return {}

    def check_workers(self, workers: int) -> None:
        """Raise UsageError if ``workers`` are too few to start a fit; here any number suffices."""

    def scaled_hyperparameters(
        self, model: FlatModel, outcome: FitOutcome
    ) -> HyperparameterChanges:
        """Return how momentum and schedules were rescaled for several workers; here {}.

        The result maps "workers" to their number, and names of hyperparameters to their changes.
        """
        return {}

    def accuracy_warnings(
        self, model: FlatModel, outcome: FitOutcome, minibatches_before: int
    ) -> list[str]:
        """Return and log warnings about likely reasons for a loss of accuracy; here none.

        ``minibatches_before``: minibatches trained in the earlier fits that this fit continued.
        """
        return []


class GradientSharing(Strategy[SharedTrainingMaster]):
    """Asynchronous training that sends thresholded updates, which a controller numbers."""

    @property
    def controller(self) -> str:
        """Where the controller, which numbers updates, runs: the option ``controller``."""
        return self.master.void.controller

    @property
    def controller_restarts(self) -> int:
        """Number of lost controllers that a fit survives: the option ``controller_restarts``."""
        return self.master.void.controller_restarts

    @property
    def layer_multipliers(self) -> Mapping[str, int]:
        """Thresholds of layers in multiples of tau, by layer name, from the user's options."""
        return self.master.layer_multipliers or {}

    def check_workers(self, workers: int) -> None:
        """Raise UsageError if fewer than ``min_workers`` workers can join."""
        if self.master.min_workers > workers:
            raise UsageError(
                f"min_workers={self.master.min_workers}: the fit has {workers} workers, one for"
                " each partition, and more cannot join: lower min_workers, or give more task slots"
                " or partitions"
            )

    def scaled_hyperparameters(
        self, model: FlatModel, outcome: FitOutcome
    ) -> HyperparameterChanges:
        """Return how momentum and schedules were rescaled because several workers train."""
        return scaled_hyperparameters(
            self.master, model, outcome.rows, summed=outcome.summed_workers
        )

    def accuracy_warnings(
        self, model: FlatModel, outcome: FitOutcome, minibatches_before: int
    ) -> list[str]:
        """Return and log warnings about likely reasons for a loss of accuracy, with remedies."""
        return accuracy_warnings(self.master, model, outcome, minibatches_before)
