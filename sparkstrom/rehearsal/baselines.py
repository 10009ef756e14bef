"""Train the two baselines of a rehearsal: one process, and DistributedDataParallel (DDP).

The simulated fits of a rehearsal are compared with the baselines. A step of DDP with k ranks
averages the gradients of k minibatches. The average equals the gradient of one minibatch with all
their rows, so a single process can compute the step of any model. Its BatchNorm layers see the rows
of all ranks at once, as with SyncBatchNorm. The virtual time of a step is computed by the formula
for a ring all-reduce of the whole gradient (``planning.scaling``).
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sparkstrom.base.errors import format_reason
from sparkstrom.data.row_store import Batches
from sparkstrom.models.base import (
    Batch,
    Columns,
    EpochAware,
    FitLength,
    FitLengthAware,
    FlatModel,
    Paced,
    get_buffers,
    get_step_weight,
    load_buffers,
)
from sparkstrom.planning.scaling import ScalingInputs, predict_ring_allreduce
from sparkstrom.rehearsal.conditions import Conditions
from sparkstrom.rehearsal.fit import (
    POINTS,
    CurvePoint,
    FitRecipe,
    Measure,
    OnProgress,
    SimulatedFit,
    average_recent,
    make_environment,
)
from sparkstrom.runtime.optimizer_states import decode_optimizer_state
from sparkstrom.worker.task_environment import place_model

DENSITY = 1e-3  # a required input of the formula, but a dense all-reduce does not depend on it


def train_synchronously(
    recipe: FitRecipe,
    ranks: Sequence[Batches],
    conditions: Conditions,
    measure: Measure | None = None,
    on_progress: OnProgress = lambda fraction: None,
) -> SimulatedFit:
    """Train synchronously, and return the result; one rank is the baseline of one process.

    Each step trains on one minibatch of every rank. An exception of the model or a loss that is not
    finite ends training; the reason is then in the result's ``error``.

    Args:
        recipe: The fit.
        ranks: Each rank's minibatches.
        conditions: The cluster, for the time of a step.
        measure: Measures parameters for the curves; None: no curves.
        on_progress: Called with the completed fraction of the steps.
    """
    simulated = SimulatedFit(len(ranks), replicas_equal=True)
    model, parameters = _open_model(recipe)
    rounds = max(each.batches_per_epoch for each in ranks)
    total, step_s = rounds * recipe.epochs, synchronous_step_s(recipe, len(ranks), conditions)
    if isinstance(model, FitLengthAware):
        model.set_fit_length(
            FitLength(recipe.epochs, total, recipe.first_epoch, recipe.minibatches_before)
        )
    losses: list[tuple[float, float]] = []  # weight and mean loss of each step

    def record_point() -> None:
        """Measure the current parameters, and add a point to the curves, if any."""
        if measure is not None:
            measures = measure(parameters.copy(), get_buffers(model))
            simulated.points.append(CurvePoint(simulated.seconds, simulated.examples, measures))

    record_point()
    for done in range(total):
        epoch, index = divmod(done, rounds)
        batches = [each.get(epoch, index) for each in ranks if index < each.batches_per_epoch]
        if isinstance(model, Paced):
            steps = recipe.minibatches_before + done
            model.keep_pace(1, steps, steps)
        if isinstance(model, EpochAware):
            model.set_position(recipe.first_epoch + epoch, index, rounds)
        batch = join_batches(batches)
        try:
            loss = model.step(batch)
        except Exception as error:  # models raise errors of many kinds; a real fit would fail, too
            simulated.error = format_reason(error)
            break
        if not math.isfinite(loss):
            simulated.error = f"the loss is {loss}"
            break
        losses.append((get_step_weight(model, batch), loss))
        simulated.minibatches += len(batches)
        simulated.examples += batch.rows
        simulated.seconds += step_s
        on_progress((done + 1) / total)
        if done * POINTS // total < (done + 1) * POINTS // total:
            record_point()
    simulated.training_loss = average_recent(losses)
    simulated.update_bytes = 4 * model.n_params * simulated.minibatches if len(ranks) > 1 else 0
    simulated.parameters = parameters
    simulated.buffers = get_buffers(model)
    return simulated


def synchronous_step_s(recipe: FitRecipe, workers: int, conditions: Conditions) -> float:
    """Return the virtual seconds of a step of all ranks, which the slowest rank determines."""
    return predict_ring_allreduce(ring_inputs(recipe, workers, conditions), workers).step_s


def ring_bits_s(recipe: FitRecipe, workers: int, conditions: Conditions) -> float:
    """Return the mean bits per second that each rank sends in a ring all-reduce."""
    pace = predict_ring_allreduce(ring_inputs(recipe, workers, conditions), workers)
    return 8 * pace.worker_sent / pace.step_s


def ring_inputs(recipe: FitRecipe, workers: int, conditions: Conditions) -> ScalingInputs:
    """Return the inputs of the formula for a ring all-reduce, with the slowest rank's step time."""
    conditions = conditions.for_workers(workers)
    slowest = min(conditions.speed(rank, workers) for rank in range(workers))
    return ScalingInputs(
        n_params=recipe.model.n_params,
        step_s=conditions.times.step_s / slowest,
        density=DENSITY,
        link_bits_s=conditions.link_bits_s,
        latency_s=conditions.latency_s,
        spread=conditions.times.jitter,
    )


def _open_model(recipe: FitRecipe) -> tuple[FlatModel, np.ndarray]:
    """Return a new copy of the model, and the fit's initial parameters, to which it is bound."""
    model: FlatModel = pickle.loads(recipe.packed)
    place_model(replace(recipe.job(1), model=model), make_environment())
    parameters = recipe.initial()
    model.bind(parameters)
    load_buffers(model, get_buffers(recipe.model))
    if recipe.states.one:
        model.load_updater_state(decode_optimizer_state(recipe.states.one))
    return model, parameters


def join_batches(batches: Sequence[Batch]) -> Batch:
    """Return one minibatch with the rows of all ``batches``."""
    if len(batches) == 1:
        return batches[0]
    weights = [each.weights for each in batches if each.weights is not None]
    return Batch(
        _join_columns([each.features for each in batches]),
        _join_columns([each.labels for each in batches]),
        np.concatenate(weights) if weights else None,
    )


def _join_columns(parts: Sequence[Columns]) -> Columns:
    """Return the rows of all parts; a part is an array, or a dict or tuple of arrays."""
    first = parts[0]
    if isinstance(first, np.ndarray):
        return np.concatenate([part for part in parts if isinstance(part, np.ndarray)])
    if isinstance(first, dict):
        return {
            name: np.concatenate([part[name] for part in parts if isinstance(part, dict)])
            for name in first
        }
    return tuple(
        np.concatenate([part[i] for part in parts if isinstance(part, tuple)])
        for i in range(len(first))
    )
