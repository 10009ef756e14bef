"""The driver program of sparkstrom's systems, on host 0; each host has one worker.

    python -m benchmarks.slow_link.ours RECORD CONF TRIAL...

CONF is Spark's configuration as JSON, and trials are JSON. All trials run in one session. Fits are
called as by a user, but the benchmark also reads private state of the master's thread: when all
workers were ready, the number of committed minibatches, and copies of the driver's replica.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.averaging.rounds_here import DILOCO, Recipe
from benchmarks.slow_link import data
from benchmarks.slow_link.systems import OURS
from benchmarks.slow_link.trial import BATCH_ROWS, Record, Trial
from sparkstrom import ParameterAveragingTrainingMaster, SharedTrainingMaster, SparkNetwork
from sparkstrom.base.errors import SparkstromError
from sparkstrom.codec.messages import Phase
from sparkstrom.fit.summary import TrainingSummary
from sparkstrom.models.torch import TorchModel
from sparkstrom.rounds.control import RoundsControl

LOOK_S = 0.02
END_S = 30.0  # limit for a fit to stop, in which it drains and compares its replicas
START_S = 420.0  # limit for the start, with the initial parameters on a slow link


class Watched(SparkNetwork):
    """A network that keeps a reference to the master thread of its newest fit."""

    master: Any = None

    def _train(self, *args: Any) -> Any:
        strategy: Any = self._strategy
        make_runner = type(strategy).make_runner

        def make_and_keep(*runner_args: Any) -> Any:
            runner = make_runner(strategy, *runner_args)
            self.master = runner.master
            return runner

        strategy.make_runner = make_and_keep
        return super()._train(*args)


class Fit:
    """A fit in a daemon thread, so that the program can end even if the fit hangs."""

    def __init__(self, network: Watched, rows: Any, trial: Trial) -> None:
        self.network, self.trial = network, trial
        self.summary: TrainingSummary | None = None
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(rows,), daemon=True)
        self.thread.start()

    def _run(self, rows: Any) -> None:
        try:
            self.summary = self.network.fit(rows, epochs=self.trial.epochs)
        except BaseException as error:
            self.error = error

    @property
    def running(self) -> bool:
        """Whether the fit's thread is alive."""
        return self.thread.is_alive()

    def ready_s(self) -> float | None:
        """Return when all workers were ready; None if they are not yet."""
        master = self.network.master
        if master is None:
            return None
        if isinstance(master, RoundsControl):
            return master.began_s.get(Phase.RUNNING)
        at_s: float | None = master._machine.phases.began_s.get(Phase.RUNNING)
        return at_s


def watch(fit: Fit, record: Record, called_s: float) -> None:
    """Copy parameters until the fit ends; stop it at the limit, and return if it does not stop."""
    stop_s: float | None = None
    while fit.running:
        time.sleep(LOOK_S)
        if record.began_s is None:
            if (ready_s := fit.ready_s()) is not None:
                record.began(fit.network._model.n_params, ready_s)
            elif time.monotonic() > called_s + START_S:
                return
        elif record.over and stop_s is None:
            stop_s = time.monotonic()
            fit.network.master.request_stop("the trial's time is over")
        elif stop_s is not None and time.monotonic() > stop_s + END_S:
            return
        elif record.due:
            try:
                copy = fit.network.master.snapshot()
            except SparkstromError:  # the fit has just failed, with its own error
                continue
            record.put_aside(copy.parameters, fit.network.master.progress.minibatches)


def make_master(trial: Trial) -> SharedTrainingMaster | ParameterAveragingTrainingMaster:
    """Return the options of a fit: the defaults, or rounds as in ``benchmarks.averaging``."""
    if trial.system == OURS:
        return SharedTrainingMaster(batch_size_per_worker=BATCH_ROWS, rng_seed=trial.seed)
    recipe = Recipe.parse(trial.system)
    return ParameterAveragingTrainingMaster(
        batch_size_per_worker=BATCH_ROWS,
        rng_seed=trial.seed,
        averaging_frequency=recipe.each,
        outer=DILOCO if recipe.is_diloco else None,
        save_updater="own" if recipe.is_diloco else True,
    )


def run_trial(session: Any, trial: Trial, path: Path) -> bool:
    """Run one trial: train and evaluate; return whether the fit still runs because it hangs."""
    record = Record(path, trial)
    module = data.make_module(trial.widths, trial.seed)
    optimizer = data.make_optimizer_factory(trial.optimizer, trial.rate)
    import torch

    model = TorchModel(module, torch.nn.CrossEntropyLoss(), optimizer)
    network = Watched(session, model, make_master(trial), progress=False, keep=False)
    numbers = session.sparkContext.parallelize(range(trial.workers), trial.workers)
    rows = numbers.mapPartitions(partial(data.make_spark_rows, trial.train_part, trial.workers))
    called_s = time.monotonic()
    record.event("called", called_s)
    fit = Fit(network, rows, trial)
    watch(fit, record, called_s)
    record_end(fit, record)
    record.evaluate()
    if not trial.choosing and fit.summary is not None:
        record_next_start(fit, rows, record)
    record.event("done")
    return fit.running


def record_next_start(fit: Fit, rows: Any, record: Record) -> None:
    """Record how long the application's next fit takes to begin, with all imports done."""
    fit.network.master = None
    called_s = time.monotonic()
    following = Fit(fit.network, rows, fit.trial)
    while following.running and (ready_s := following.ready_s()) is None:
        time.sleep(LOOK_S)
    if not following.running:
        raise RuntimeError("the next fit did not begin") from following.error
    record.event("again", ready_s, startup_s=ready_s - called_s)
    following.network.master.request_stop("only its start is measured")
    following.thread.join(END_S)


def record_end(fit: Fit, record: Record) -> None:
    """Record the result of the fit; its end is that of training, before replicas are compared."""
    master = fit.network.master
    if fit.summary is not None and record.began_s is not None:
        outcome = master.outcome()
        ended_s = outcome.phase_began_s[Phase.AUDIT]
        record.put_aside(fit.network.parameters, outcome.minibatches, ended_s)
        selected = select_figures(fit.summary)
        record.event("ended", ended_s, minibatches=outcome.minibatches, **selected)
        return
    error = "it did not end" if fit.running else f"{type(fit.error).__name__}: {fit.error}"
    minibatches = 0 if master is None else master.progress.minibatches
    record.event("ended", minibatches=minibatches, error=error.splitlines()[0])


def select_figures(summary: TrainingSummary) -> dict[str, Any]:
    """Return the part of the summary that the benchmark reports."""
    return {
        "summary": {
            "replicas_equal": summary.replicas_equal,
            "bytes_sent": summary.bytes_sent,
            "bytes_wire": summary.bytes_wire,
            "updates": summary.updates,
            "sent_fraction": summary.sent_fraction,
            "tau": summary.tau if math.isfinite(summary.tau) else None,
            "staleness_mean": round(summary.staleness_mean, 2),
            "staleness_max": summary.staleness_max,
            "phase_seconds": {k: round(v, 3) for k, v in summary.phase_seconds.items()},
            "warnings": summary.warnings,
        }
    }


def main() -> int:
    """Run all trials, one after the other."""
    from pyspark.sql import SparkSession

    path, conf, *trials = sys.argv[1:]
    builder = SparkSession.builder.appName("sparkstrom slow link")
    for key, value in json.loads(conf).items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.parallelize([0], 1).count()  # waits for all executors
    for text in trials:
        if run_trial(session, Trial.parse(text), Path(path)):
            os._exit(0)  # the session could not stop while a fit hangs
    session.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
