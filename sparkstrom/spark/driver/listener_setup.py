"""Listener setup: the users' listeners of one fit, the log of it among them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from sparkstrom.models.base import Batch, Buffered, FlatModel
from sparkstrom.observe.listening.fit_events import FitBegin
from sparkstrom.observe.listening.given import WorkerLog
from sparkstrom.observe.progress import ProgressLine
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.runtime.fit_state import Snapshot
from sparkstrom.spark.driver.averaging_master import TrainingMaster
from sparkstrom.spark.driver.evaluation import Evaluation, evaluate_batch, merged, wanted_for
from sparkstrom.spark.driver.fit_call import FitCall
from sparkstrom.spark.driver.listener_thread import ListenerThread
from sparkstrom.spark.driver.run_log import run_log_of


@dataclass(frozen=True, slots=True)
class Judging:
    """Evaluates arrays under the parameters of the moment, in whatever thread asks."""

    model: FlatModel
    snapshot: Callable[[], Snapshot]

    def __call__(self, features: Any, labels: Any, metrics: Any) -> Evaluation:
        """As ``SparkNetwork.evaluate`` does; the fit's own model is not touched."""
        model, now = copy.deepcopy(self.model), self.snapshot()
        model.bind(now.parameters)
        if isinstance(model, Buffered) and now.buffers:
            model.load_buffers_bytes(now.buffers)
        model.check(features, labels)
        wanted = wanted_for(model, metrics, 1)
        return merged([evaluate_batch(model, wanted, Batch(features, labels))])


def listener_thread(
    call: FitCall,
    spec: FitSpec,
    model: FlatModel,
    master: TrainingMaster,
    snapshot: Callable[[], Snapshot],
    progress: ProgressLine,
) -> ListenerThread:
    """Tells the call's listeners, and writes its run log."""
    written = run_log_of(call.run_log, spec)
    return ListenerThread(
        [*call.listeners, WorkerLog(progress.say), *([written] if written else [])],
        FitBegin(
            model=type(model).__name__,
            n_params=spec.n_params,
            workers=spec.workers,
            epochs=spec.epochs,
            first_epoch=spec.first_epoch,
            options={each.name: in_words(getattr(master, each.name)) for each in fields(master)},
            resumed_from=call.goes_on.path if call.goes_on else None,
        ),
        spec,
        copy=snapshot,
        judge=Judging(model, snapshot),
        say=progress.say,
    )


def in_words(option: Any) -> Any:
    """An option as JSON has it: plain scalars as they are, others as Python writes them."""
    return (
        option if option is None or isinstance(option, bool | int | float | str) else repr(option)
    )
