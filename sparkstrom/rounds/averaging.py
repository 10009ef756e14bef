"""Combine the workers' results of one round into the state from which the next round starts.

All workers start a round with the same parameters and train independently for some steps. The next
round starts from the weighted mean of their parameters, or from the parameters that a user-defined
accumulator or an outer optimizer computes. A worker's weight is the sum of the weights of its rows
and their labels, so one step of SGD per round equals one step of one machine on all rows.

Sums are float64 and depend on the order of their terms. Callers pass the workers in order of
partition, so that a repeated round gives bit-identical results.
"""

from __future__ import annotations

import copy
import hashlib
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import TrainingError
from sparkstrom.codec.optimizer_state_codec import decode_state_untrusted, encode_state
from sparkstrom.models.base import Buffered, Flat, FlatModel, State, WeighedBuffers, get_buffers
from sparkstrom.models.updaters import Updater
from sparkstrom.options.parameter_averaging import (
    PER_WORKER,
    Accumulator,
    ParameterAveragingTrainingMaster,
)
from sparkstrom.rounds.worker_round import RoundReport
from sparkstrom.runtime.optimizer_states import (
    OPTIMIZER_PREFIX,
    PARTITION_KEY,
    SCHEDULE_STEPS_KEY,
    OptimizerStates,
    decode_optimizer_state,
    decode_schedule_steps,
)

CHECKED_AT_ONCE = 1 << 20  # parameters; limits the size of the temporary boolean array
OUTER_PREFIX = "outer/"  # prefix of the outer optimizer's names in a stored state
NO_PARTITION = -1  # stored as the partition of a state that all workers share
NOT_FINITE_AFTER = (
    "{} is {} after round {}: training diverges or the data hold such values; lower the learning"
    " rate, that of an outer step, too, clip gradients, or look at the features' scale"
)
ACCUMULATOR_RAISED = (
    "accumulator raised {!r}: it is called with (before, after, rows) after each round, in the"
    " calling process; its trace is below"
)

Sum = NDArray[np.float64]
Scalar = float | int


@dataclass(frozen=True, slots=True)
class RoundOptions:
    """Options of training in rounds: the length of a round, and how parameters are combined."""

    averaging_frequency: int  # number of minibatches that each worker trains in one round
    # True: average the optimizer states; PER_WORKER: each worker keeps its own state; False: each
    # round starts with new states.
    save_updater: bool | str
    outer: Updater | None = None  # outer optimizer, applied to the combined parameters
    accumulator: Accumulator | None = None  # combines the workers' parameters; None: their mean


# A ParameterAveragingTrainingMaster has the same four options.
AveragingOptions = RoundOptions | ParameterAveragingTrainingMaster


class StoredState(Protocol):
    """An optimizer state that is stored outside this process's memory, such as in a file."""

    def load(self) -> State:
        """Read the state and return it."""
        ...


@dataclass(slots=True)
class RoundResults:
    """The results of one round, as a backend returns them."""

    reports: Sequence[RoundReport]  # of the workers that had minibatches, in order of partition
    # The weighted mean, f32[n_params]; for an accumulator f32[workers, n_params], of the workers
    # whose rows have a weight; None if a model failed or no row has a weight.
    parameters: Flat | None = None
    updater: State | None = None  # the averaged optimizer state, with save_updater=True
    # With save_updater=PER_WORKER: each worker's optimizer state, by partition.
    own: Mapping[int, State | StoredState] = field(default_factory=dict)
    traffic: Counter[str] = field(default_factory=Counter)  # bytes over the network, by kind

    @classmethod
    def combine(
        cls,
        options: AveragingOptions,
        reports: Sequence[RoundReport],
        parameters: Sequence[Flat],
        states: Mapping[int, State | StoredState],
    ) -> RoundResults:
        """Return the results of a round in this process, in which no model failed.

        Args:
            options: How parameters and optimizer states are combined.
            reports: As in the field of this name.
            parameters: Of each worker whose rows have a weight, f32[n_params].
            states: Optimizer states of these workers after the round, by partition; with
                ``save_updater=False``, they are not used.
        """
        trained = [report for report in reports if report.weight]
        if not trained:
            return cls(reports)
        weights = [report.weight for report in trained]
        is_mean = options.accumulator is None
        combined = weighted_mean(parameters, weights) if is_mean else np.array(parameters)
        results = cls(reports, combined)
        if options.save_updater == PER_WORKER:
            results.own = states
        elif options.save_updater:
            loaded = [load_state(states[report.partition]) for report in trained]
            results.updater = average_states(loaded, weights, [one.steps for one in trained])
        return results


class RoundState:
    """The state between two rounds: parameters f32[n_params], buffers and optimizer states.

    A round replaces arrays and never modifies them in place, except for the outer optimizer's
    arrays. Snapshots can therefore share the arrays.
    """

    def __init__(
        self,
        model: FlatModel,
        options: AveragingOptions,
        parameters: Flat,
        states: OptimizerStates,
        steps: int,
    ) -> None:
        """Create the state from which the first round of a fit starts.

        Args:
            model: The model that is trained.
            options: How results are combined.
            parameters: f32[n_params].
            states: Optimizer states of an earlier fit, from which to continue.
            steps: Number of earlier steps of each worker, unless ``states`` contain that number.
        """
        self._model, self._save = model, options.save_updater
        self._accumulator = options.accumulator
        self.parameters = parameters
        self.buffers = get_buffers(model)
        self.fresh = fresh_state(copy.deepcopy(model), parameters)  # before the first step
        self.updater = self.fresh  # for workers that have no state in ``own``
        self.own: dict[int, State | StoredState] = {}  # workers' own states, by partition
        self.outer, self.steps, self.rounds = OuterStep(options.outer), steps, 0
        if states.one:
            self._resume_from(states)

    def _resume_from(self, states: OptimizerStates) -> None:
        """Load an earlier fit's number of steps, and its states as far as the options use them."""
        stored = decode_state_untrusted(states.one)
        self.steps = decode_schedule_steps(states.one, self.steps)
        outer = {
            name.removeprefix(OUTER_PREFIX): value
            for name, value in stored.items()
            if name.startswith(OUTER_PREFIX)
        }
        if self.outer.updater is not None and set(outer) == set(self.outer.updater.init(0)):
            self.outer.state = outer
        if self._save:
            self.updater = decode_optimizer_state(states.one)
        if self._save == PER_WORKER:
            # Files of older versions contain a state without a partition.
            self.own = {
                index: decode_optimizer_state(state)
                for index, state in states.own.items()
                if index != NO_PARTITION
            }

    def advance(self, results: RoundResults) -> None:
        """Combine the results of a round, and replace the state with the outcome.

        Raise TrainingError if a parameter is not finite, or the user's accumulator fails.
        """
        trained = [report for report in results.reports if report.weight]
        combined = results.parameters
        assert combined is not None, "a round without results changes nothing"
        if self._accumulator is not None:
            rows = [report.examples for report in trained]
            combined = apply_accumulator(self._accumulator, self.parameters, combined, rows)
        parameters = self.outer.step(self.parameters, combined)
        check_finite(self._model, parameters, self.rounds + 1)
        self.parameters = parameters
        if any(report.buffers for report in trained) and isinstance(self._model, Buffered):
            buffers = [report.buffers for report in trained]
            self.buffers = average_buffers(self._model, buffers, [r.weight for r in trained])
        if results.updater is not None:
            self.updater = results.updater
        self.own.update(results.own)
        self.count_steps(results.reports)
        self.rounds += 1

    def count_steps(self, reports: Sequence[RoundReport]) -> None:
        """Count a round's steps, from which schedules continue, also if none has a weight."""
        self.steps += max((report.steps for report in reports), default=0)

    def copy_states(self) -> OptimizerSnapshot:
        """Return a snapshot of the optimizer states, which later rounds do not change."""
        outer = copy.deepcopy(self.outer.state)
        return OptimizerSnapshot(self.updater, dict(self.own), outer, self.steps)

    def digest(self) -> str:
        """Return the SHA-256 of the parameters and buffers, in hexadecimal."""
        return hashlib.sha256(self.parameters.tobytes() + self.buffers).hexdigest()


@dataclass(frozen=True, slots=True)
class OptimizerSnapshot:
    """The optimizer states after one round."""

    updater: State  # for all workers that have no state in ``own``
    own: Mapping[int, State | StoredState]  # workers' own states, by partition
    outer: State  # the outer optimizer's state; empty without one
    steps: int  # number of steps of each worker so far

    def encoded(self, *, everybody: bool = True) -> tuple[bytes, ...]:
        """Return the encoded states for a checkpoint or a later fit.

        The first one also contains the outer optimizer's state and the number of steps; the others
        are those of further workers in ``own``. With ``everybody=False``, return only the first.
        """
        more: State = {OUTER_PREFIX + name: value for name, value in self.outer.items()}
        more[SCHEDULE_STEPS_KEY] = self.steps
        if not self.own:
            return (_encode(self.updater, NO_PARTITION, more),)
        first, *others = sorted(self.own)
        one = _encode(load_state(self.own[first]), first, more)
        rest = others if everybody else []
        return (one, *(_encode(load_state(self.own[index]), index, {}) for index in rest))


class AveragedParameters:
    """The parameters of a round-based fit, with the interface ``fit.network_state.FitParameters``.

    ``k``: exponent of the grid (``encoding.grid``) that a gradient-sharing fit would use.
    """

    def __init__(self, state: RoundState, k: int) -> None:
        self._state, self.k = state, k

    @property
    def buffers(self) -> bytes:
        """The model's buffers after the newest round."""
        return self._state.buffers

    def to_host(self) -> Flat:
        """Return a copy of the parameters, f32[n_params]."""
        return np.array(self._state.parameters)


@dataclass(slots=True)
class OuterStep:
    """Computes the next round's parameters from a round's initial and combined parameters.

    Without an ``updater``, the result is the combined parameters. With one, its gradient is the
    difference between initial and combined parameters: ``Nesterov(0.7, 0.9)`` is DiLoCo's outer
    optimizer (Douillard et al. 2023).
    """

    updater: Updater | None = None  # the outer optimizer
    state: State = field(default_factory=dict)  # the updater's state; empty before its first step

    def step(self, before: Flat, combined: Flat) -> Flat:
        """Return the parameters of the next round, f32[n_params]; may overwrite ``combined``.

        ``before``: the parameters with which the round started.
        """
        if self.updater is None:
            return combined
        if not self.state:
            self.state = self.updater.init(before.size)
        gradient = np.subtract(before, combined, out=combined)
        moved = self.updater.update(gradient, self.state)
        return np.add(moved, before, out=moved)


class WeightedSum:
    """Accumulates a weighted mean: the sum of weight x values, f64[n], and the sum of weights."""

    def __init__(self, size: int) -> None:
        self.total: Sum = np.zeros(size, np.float64)
        self.weight = 0.0

    def add(self, values: NDArray[Any], weight: float) -> None:
        """Add one worker's values with its weight."""
        self.total += values.astype(np.float64).ravel() * weight
        self.weight += weight

    def add_sum(self, total: Sum, weight: float) -> None:
        """Add a partial sum: ``total`` sums weight x values, and ``weight`` sums the weights."""
        self.total += total
        self.weight += weight

    def mean(self, dtype: Any = np.float32) -> NDArray[Any]:
        """Return the mean, rounded to ``dtype``. The sum of weights must not be 0."""
        assert self.weight > 0, "the sum has no weight, so it has no mean"
        return (self.total / self.weight).astype(dtype)


def is_averaged(value: Any) -> bool:
    """Return whether a value in an optimizer's state can be averaged: it is a float array."""
    return isinstance(value, np.ndarray) and value.dtype.kind == "f"


def weighted_mean(vectors: Sequence[NDArray[Any]], weights: Sequence[float]) -> NDArray[Any]:
    """Return the weighted mean of equally shaped arrays, in the shape and dtype of the first."""
    total = WeightedSum(vectors[0].size)
    for values, weight in zip(vectors, weights, strict=True):
        total.add(values, weight)
    return total.mean(vectors[0].dtype).reshape(vectors[0].shape)


def average_states(
    states: Sequence[State], weights: Sequence[float], steps: Sequence[int]
) -> State:
    """Return the weighted mean of the workers' optimizer states.

    Float arrays are averaged; ``merge_scalars`` merges all other values. A value that only some
    states contain is computed from these. ``steps``: each worker's number of steps in the round.
    """
    arrays = [{k: v for k, v in state.items() if is_averaged(v)} for state in states]
    scalars = [{k: v for k, v in state.items() if not is_averaged(v)} for state in states]
    merged = merge_scalars(scalars, weights, steps)
    for name in _all_names(arrays):
        having = [(s[name], w) for s, w in zip(arrays, weights, strict=True) if name in s]
        merged[name] = weighted_mean(*zip(*having, strict=True))
    return merged


def merge_scalars(
    scalars: Sequence[State], weights: Sequence[float], steps: Sequence[int]
) -> State:
    """Merge the learning rates, counts and flags of the workers' optimizer states into one state.

    Numbers are taken only from the workers that took the most steps in the round (``steps``). Many
    torch schedules compute a rate from the previous one, so a mean of rates after different numbers
    of steps would make all later rates wrong. If the numbers taken differ, ``_merge_numbers``
    merges them. Arrays, which have no floats, are merged by their elementwise maximum.
    """
    merged: State = {}
    for name in _all_names(scalars):
        having = [each for each in zip(scalars, weights, steps, strict=True) if name in each[0]]
        most = max(taken for _, _, taken in having)
        ahead = [(state[name], weight) for state, weight, taken in having if taken == most]
        if isinstance(ahead[0][0], np.ndarray):
            arrays: list[Any] = [state[name] for state, _, _ in having]
            merged[name] = np.maximum.reduce(arrays)
        else:
            merged[name] = _merge_numbers(*zip(*ahead, strict=True))
    return merged


def _all_names(states: Sequence[State]) -> list[str]:
    """Return every name that occurs in any of the states, once each, in order of occurrence."""
    return list(dict.fromkeys(name for state in states for name in state))


def _merge_numbers(values: Sequence[Scalar], weights: Sequence[float]) -> Scalar:
    """Return the numbers' common value; if they differ, their maximum or their weighted mean.

    The maximum is returned if all of them are whole.
    """
    first = values[0]
    if all(value == first for value in values):
        return first
    if all(float(value).is_integer() for value in values):
        return max(values)
    total = sum(float(v) * w for v, w in zip(values, weights, strict=True))
    return total / sum(weights)


def average_buffers(model: Buffered, buffers: list[bytes], weights: Sequence[float]) -> bytes:
    """Return the average of the workers' buffers, weighted if the model supports weights."""
    if isinstance(model, WeighedBuffers):
        return model.weighed_buffers(buffers, weights)
    return model.average_buffers(buffers)


def apply_accumulator(
    accumulator: Accumulator, before: Flat, after: Flat, rows: Sequence[int]
) -> Flat:
    """Call a user's accumulator; return the parameters of the next round, f32[n_params].

    ``before``: f32[n_params], at the start of the round; ``after``: f32[workers, n_params], which
    becomes read-only; ``rows``: number of rows that each worker trained. Raise TrainingError if the
    accumulator raises, or returns another shape or values that are not finite.
    """
    after.flags.writeable = False
    try:
        # Copies, because a user's function may change its argument or keep its result.
        made = np.array(accumulator(before.copy(), after, np.array(rows, np.int64)), np.float32)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's function may raise anything, even SystemExit
        trace = traceback.format_exc()
        raise TrainingError(ACCUMULATOR_RAISED.format(error), trace=trace) from error
    if made.shape != after.shape[1:] or not np.isfinite(made).all():
        raise TrainingError(
            f"accumulator returned {made.dtype.name}{list(made.shape)}, or values that are not"
            f" finite: it must return f32[{after.shape[1]}], the parameters of the next round"
        )
    return made


def check_finite(model: FlatModel, parameters: Flat, rounds: int) -> None:
    """Raise TrainingError if a parameter is infinite or NaN after ``rounds`` rounds.

    A finite loss does not rule this out, because a step computes its loss before it changes
    the parameters.
    """
    for first in range(0, parameters.size, CHECKED_AT_ONCE):
        finite = np.isfinite(parameters[first : first + CHECKED_AT_ONCE])
        if not finite.all():
            index = first + int(finite.argmin())
            layer, value = model.layer_of(index), parameters[index]
            raise TrainingError(NOT_FINITE_AFTER.format(layer, value, rounds))


def tree_levels(workers: int, depth: int) -> list[int]:
    """Return the number of groups on each level of a tree that sums the workers' results.

    ``depth`` is the option ``aggregation_depth``. The last level, a single group, is left out, so
    the list is empty for a depth of at most 2. The sizes of groups are as in ``RDD.treeAggregate``.
    """
    if depth < 3:
        return []
    scale = max(2, int(np.ceil(workers ** (1 / (depth - 1)))))
    levels, groups = [], workers
    for _ in range(depth - 2):
        groups = -(-groups // scale)
        if groups <= 1:
            break
        levels.append(groups)
    return levels


def _encode(updater: State, partition: int, more: State) -> bytes:
    """Encode one worker's optimizer state, with its partition and the values in ``more``."""
    named = {OPTIMIZER_PREFIX + name: value for name, value in updater.items()}
    return encode_state(named | more | {PARTITION_KEY: partition})


def load_state(state: State | StoredState) -> State:
    """Return an optimizer state; load it first if it is a StoredState."""
    return state if isinstance(state, dict) else state.load()


def fresh_state(model: FlatModel, parameters: Flat) -> State:
    """Return a copy of the optimizer state that the model has before its first step.

    ``model`` must be a copy, because this function binds it to other parameters.
    """
    model.bind(parameters.copy())
    state = model.updater_state()
    return {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in state.items()}
