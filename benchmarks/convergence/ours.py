"""Fits of sparkstrom in virtual time, simulated by ``sparkstrom.rehearsal``.

The setting ``latency`` is the time from a publication until all workers have the update, in mean
step times; half of it is spent on each of two links. Even with a latency of 0, updates of other
workers are one round old, because k - 1 other steps end while a step runs.
"""

from __future__ import annotations

import math

import cloudpickle
import numpy as np

from benchmarks.convergence.settings import Settings
from benchmarks.convergence.trial import Flat, Outcome, Trial, outcome
from sparkstrom.encoding.grid import first_exponent
from sparkstrom.models.torch import TorchModel
from sparkstrom.planning.scaling import HOP_S
from sparkstrom.rehearsal.conditions import Conditions, StepTimes
from sparkstrom.rehearsal.fit import FitRecipe, FitSimulator, Measure

LINK_BITS_S = 1e10  # wide: latency alone delays messages


def make_model(trial: Trial, settings: Settings) -> TorchModel:
    """Return the task's module with its optimizer."""
    return TorchModel(
        trial.task.module(trial.seed),
        trial.task.loss(),
        trial.optimizer_of(settings.beta2_power(trial.workers)),
        scheduler=trial.task.scheduler(),
        clip_norm=settings.clip_norm,
    )


def simulator_of(trial: Trial, settings: Settings, measure: Measure | None = None) -> FitSimulator:
    """Return the simulator of a fit; it calls ``measure`` at each epoch's end."""
    model = make_model(trial, settings)
    initial = model.initial()
    recipe = FitRecipe(
        model,
        cloudpickle.dumps(model),
        initial,
        first_exponent(initial),
        settings.master(trial.seed),
        trial.epoch_count,
    )
    conditions = Conditions(
        LINK_BITS_S,
        max(0.0, settings.latency * settings.step_s / 2 - HOP_S),
        StepTimes(settings.step_s, settings.jitter),
        seed=trial.seed,
    )
    return FitSimulator(recipe, trial.batches(), conditions, measure, points=trial.epoch_count)


def load_result(model: TorchModel, parameters: Flat, buffers: bytes) -> None:
    """Load the parameters and buffers that a fit returns into a model."""
    model.bind(parameters.copy())
    if buffers:
        model.load_buffers_bytes(buffers)


def train(trial: Trial, settings: Settings) -> Outcome:
    """Train, and measure the result; training that diverges has no result, and infinite loss."""
    simulator = simulator_of(trial, settings)
    with np.errstate(all="ignore"):
        simulated = simulator.run()
    if simulated.error:
        nothing = {"loss": math.inf, "accuracy": math.nan}
        return Outcome(nothing, nothing)
    assert simulated.replicas_equal, "replicas differ"
    assert simulated.parameters is not None
    model = make_model(trial, settings)
    load_result(model, simulated.parameters, simulated.buffers)
    replicas = [worker.replica for worker in simulator.workers]
    counters = [replica.encoder.counters for replica in replicas]
    n_params, sent = model.n_params, sum(each.mass_sent for each in counters)
    steps_s = settings.step_s * simulated.minibatches / trial.workers
    return outcome(
        trial,
        model.module,
        bytes_sent=simulated.update_bytes,
        bytes_dense=4 * n_params * simulated.minibatches,
        figures={
            "summed_workers": simulated.summed_workers or trial.workers,
            "staleness_minibatches": simulated.staleness,
            "staleness_rounds": simulated.staleness / trial.workers,
            "sent_fraction": simulated.entries / n_params / max(1, simulated.publications),
            "mass_clipped": sum(each.mass_clipped for each in counters) / max(1e-30, sent),
            "residual_norm": float(np.mean([replica.residual_norm() for replica in replicas])),
            "publications": simulated.publications,
            "time": simulated.seconds / steps_s,
        },
    )
