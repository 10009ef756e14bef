"""Rehearse a fit: simulate it with given numbers of workers, and compare it with two baselines.

The baselines are training in one process, and synchronous training with PyTorch's
DistributedDataParallel (DDP) on the same numbers of workers.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sparkstrom.base.child_processes import count_cores
from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import is_real, is_whole, shown
from sparkstrom.base.units import parse_duration, parse_rate
from sparkstrom.data.row_sample import RowSample
from sparkstrom.encoding.backends import warm_up
from sparkstrom.encoding.grid import first_exponent, next_exponent
from sparkstrom.fit.network_state import NetworkStateHolder
from sparkstrom.fit.trained_network import preserve_process_state
from sparkstrom.models.base import FlatModel
from sparkstrom.observe.early_stopping import LOSS
from sparkstrom.observe.progress import ProgressDisplay, RehearsalFigures
from sparkstrom.options.common import (
    require,
    require_flag,
    require_whole,
    unknown_option_message,
)
from sparkstrom.options.gradient_sharing import SCALINGS, SharedTrainingMaster
from sparkstrom.options.parameter_averaging import ParameterAveragingTrainingMaster, TrainingMaster
from sparkstrom.rehearsal.conditions import WORKERS_MAX, Conditions, StepTimes
from sparkstrom.rehearsal.data import SampledData
from sparkstrom.rehearsal.fit import FitRecipe, SimulatedFit, make_environment, use_threads
from sparkstrom.rehearsal.measurement import (
    ClusterMeasurement,
    count_rows_to_measure,
    estimate_times,
    measure_times,
)
from sparkstrom.rehearsal.result import SPARKSTROM, Rehearsal, make_run
from sparkstrom.rehearsal.runs import Run, RunScheduler, RunSimulator, plan_runs
from sparkstrom.rounds.averaging import AveragingOptions

DEFAULT_WORKERS = (1, 4, 16)
DEFAULT_LINK_BITS_S, DEFAULT_LATENCY_S = 1e9, 1e-3
DEFAULT_ROWS = 20_000
# The default target is one process's lowest loss plus this fraction of it or, if that is less, of
# the improvement: losses of noisy labels improve by a few percent.
TARGET_MARGIN = 0.05
MeasureCluster = Callable[[FitRecipe, RowSample], ClusterMeasurement]
STRAGGLERS = re.compile(r"(\d+)x(\d*\.?\d+)")  # NUMBERxSPEED


@dataclass(frozen=True, slots=True)
class RehearsalRequest:
    """The checked arguments of ``rehearse``, except those that a fit also has."""

    workers: tuple[int, ...] = DEFAULT_WORKERS  # numbers of workers, ascending
    link_bits_s: float | None = None  # rate of a host's link; None: measured, or 1 Gbit/s
    latency_s: float | None = None  # in one direction; None: measured, or 1 ms
    step_s: float | None = None  # mean time of a training step; None: measured
    jitter: float | None = None  # of step times; None: measured, or 0 if step_s is given
    encode_s: float | None = None  # None: measured, or estimated if step_s is given
    apply_s: float | None = None  # time to add another worker's update; None: as for encode_s
    stragglers: int = 0  # number of slow workers
    straggler_speed: float = 1.0  # speed of a slow worker, relative to the others
    kills: int = 0  # number of workers that die
    scaling: tuple[str, ...] = ()  # scaling rules to compare; (): the network's own options
    rows: int = DEFAULT_ROWS  # number of rows to sample
    seed: int = 0  # of all random choices
    to_loss: float | None = None  # loss whose time is compared; None: from one process's losses
    measure: bool = False  # whether to measure times and links on the cluster

    @classmethod
    def from_options(cls, **options: Any) -> RehearsalRequest:
        """Return the request for these arguments, like ``parse``.

        Raise UsageError for an argument that is invalid or has an unknown name.
        """
        known = list(inspect.signature(cls.parse).parameters)
        for name in options:
            if name not in known:
                raise UsageError(unknown_option_message("rehearse", name, known, {}, {}))
        return cls.parse(**options)

    @classmethod
    def parse(  # noqa: PLR0913 -- the options of a rehearsal, by keyword
        cls,
        *,
        workers: int | Iterable[int] = DEFAULT_WORKERS,
        link: str | float | None = None,
        latency: str | float | None = None,
        step: str | float | None = None,
        jitter: float | None = None,
        encode: str | float | None = None,
        apply: str | float | None = None,
        straggler: str | None = None,
        kill: int = 0,
        scaling: str | Sequence[str] = (),
        rows: int = DEFAULT_ROWS,
        seed: int = 0,
        to_loss: float | None = None,
        measure: bool = False,
    ) -> RehearsalRequest:
        """Return the request for the arguments of ``rehearse``, which docs/rehearse.md explains.

        Raise UsageError that names an invalid argument, its value, the reason and a remedy.
        """
        try:
            numbers: list[Any] = [workers] if is_whole(workers) else [*workers]  # type: ignore[misc]
        except TypeError:
            numbers = []
        are_given = bool(numbers) and not isinstance(workers, str)
        require(are_given, "workers", workers, "must be numbers of workers, such as (1, 4, 16)")
        for count in numbers:
            require_whole("workers", count, 1)
            reason = f"at most {WORKERS_MAX:,} replicas fit into one process"
            require(count <= WORKERS_MAX, "workers", count, reason)
        reason = "must be rules, such as ('sequential', 'ddp')"
        require(isinstance(scaling, str | list | tuple), "scaling", scaling, reason)
        rules = scaling.split(",") if isinstance(scaling, str) else scaling
        for rule in rules:
            reason = f"must be of {', '.join(SCALINGS)}, such as 'sequential,ddp'"
            require(rule in SCALINGS, "scaling", rule, reason)
        known = to_loss is None or (is_real(to_loss) and math.isfinite(to_loss))
        require(known, "to_loss", to_loss, "must be a finite number, or None")
        if jitter is not None:
            require(is_real(jitter), "jitter", jitter, "must be a number from 0 to below 1")
        stragglers, speed = _parse_straggler(straggler)
        request = cls(
            tuple(sorted({int(count) for count in numbers})),
            None if link is None else _parse("link", link, parse_rate),
            None if latency is None else _parse("latency", latency, parse_duration),
            None if step is None else _parse("step", step, parse_duration),
            jitter,
            None if encode is None else _parse("encode", encode, parse_duration),
            None if apply is None else _parse("apply", apply, parse_duration),
            stragglers,
            speed,
            require_whole("kill", kill, 0),
            tuple(dict.fromkeys(rules)),
            require_whole("rows", rows, 1),
            require_whole("seed", seed, 0),
            to_loss,
            require_flag("measure", measure),
        )
        request.conditions(request.times(StepTimes(1.0)))  # check all numbers before any work
        return request

    def check_recipe(self, recipe: FitRecipe) -> None:
        """Raise UsageError for arguments that have no meaning in this fit."""
        reason = "training in rounds has no scaling rules; leave scaling out"
        is_known = recipe.rounds is None or not self.scaling
        require(is_known, "scaling", ",".join(self.scaling), reason)

    def times(self, found: StepTimes) -> StepTimes:
        """Return the times that this request gives; those that it lacks come from ``found``."""
        return StepTimes(
            found.step_s if self.step_s is None else self.step_s,
            found.jitter if self.jitter is None else self.jitter,
            found.encode_s if self.encode_s is None else self.encode_s,
            found.apply_s if self.apply_s is None else self.apply_s,
        )

    def conditions(
        self, times: StepTimes, link_bits_s: float | None = None, latency_s: float | None = None
    ) -> Conditions:
        """Return the conditions of all runs. Raise UsageError for an impossible number.

        Args:
            times: The times of a worker's operations.
            link_bits_s: The measured rate, which is used if the request gives none. If it is None,
                the default is used.
            latency_s: The measured latency, used in the same way.
        """
        return Conditions(
            _first(self.link_bits_s, link_bits_s, DEFAULT_LINK_BITS_S),
            _first(self.latency_s, latency_s, DEFAULT_LATENCY_S),
            times,
            self.stragglers,
            self.straggler_speed,
            self.kills,
            seed=self.seed,
        )


def _first(*values: float | None) -> float:
    """Return the first of the values that is not None."""
    return next(value for value in values if value is not None)


def _parse(name: str, value: str | float, parse: Callable[[str], float]) -> float:
    """Return a rate or duration, given as a number or as text that ``parse`` accepts.

    Raise UsageError, with the argument's ``name``, for anything else.
    """
    if is_real(value):
        return float(value)
    try:
        return float(parse(str(value)))
    except ValueError as error:
        raise UsageError(f"{name}={shown(value)}: {error}") from None


def _parse_straggler(text: str | None) -> tuple[int, float]:
    """Return the number and speed of slow workers, given as "1x0.5"; (0, 1.0) for None.

    Raise UsageError for a text of another form.
    """
    if text is None:
        return 0, 1.0
    match = STRAGGLERS.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise UsageError(
            f"straggler={shown(text)}: write NUMBERxSPEED, such as '1x0.5' for one worker of half"
            " the others' speed"
        )
    return int(match[1]), float(match[2])


def rehearse(
    recipe: FitRecipe,
    sample: RowSample,
    request: RehearsalRequest,
    display: ProgressDisplay,
    measure_cluster: MeasureCluster | None = None,
    *,
    cpus: int = 1,
) -> Rehearsal:
    """Simulate the fit with each number of workers and scaling rule.

    Args:
        recipe: The fit.
        sample: Rows to train on.
        request: Numbers of workers, links, times and faults.
        display: Shows the progress.
        measure_cluster: Measures the conditions on a cluster if the request asks for that; None
            if there is no cluster.
        cpus: Number of a worker's CPUs. Steps that are timed in this process use as many threads.

    Returns:
        The results of sparkstrom, and of training in one process and with DDP for comparison.

    Raises:
        UsageError: A row does not suit the model, no row is left to train on, or there are more
            workers than rows.
        TrainingError: Step times could not be measured. Failures of runs are part of the result.
    """
    recipe = replace(
        recipe, master=replace(recipe.master, rng_seed=recipe.master.rng_seed + request.seed)
    )
    data = SampledData(recipe, sample)
    data.check()
    data.partitions(request.workers[-1])  # raises for too many workers before any work
    warm_up(say=display.say)
    with preserve_process_state(), use_threads(1):
        conditions = _find_conditions(recipe, data, request, display, measure_cluster, cpus)
        simulator = RunSimulator(recipe, data, conditions, compares_rules=bool(request.scaling))
        runs = plan_runs(request.workers, request.scaling, recipe.master.scaling)
        results = RunScheduler(simulator, runs, recipe.model.n_params, display).simulate_all()
        display.show(RehearsalFigures("rehearsed", 1.0), force=True)
    return _make_rehearsal(simulator, runs, results, request)


def _find_conditions(
    recipe: FitRecipe,
    data: SampledData,
    request: RehearsalRequest,
    display: ProgressDisplay,
    measure_cluster: MeasureCluster | None,
    cpus: int,
) -> Conditions:
    """Return the conditions of all runs, such as the time of a step and the rate of links.

    Values given in the request are used as they are. Other times, and the links, are measured on
    the cluster if the request asks for it and there is a cluster. If not, the links get default
    values; the times are measured in this process with at most ``cpus`` threads, or estimated if
    the request gives the time of a step.
    """
    if request.measure and measure_cluster is not None:
        display.say("measuring steps, encoding and links on the cluster")
        found = measure_cluster(recipe, data.sample.head(count_rows_to_measure(recipe)))
        display.say(found.text)
        return request.conditions(request.times(found.times), found.link_bits_s, found.latency_s)
    if request.step_s is None:
        display.say("measuring a step, and the encoding of its update")
        cpus = min(cpus, count_cores())
        with use_threads(cpus):
            environment = replace(make_environment(), cpus=cpus)
            times = measure_times(recipe, data.partitions(1)[0], environment)
    else:
        is_dense = recipe.rounds is not None
        times = estimate_times(recipe.model.n_params, request.step_s, 0.0, is_dense=is_dense)
    return request.conditions(request.times(times))


def _make_rehearsal(
    simulator: RunSimulator,
    runs: Sequence[Run],
    results: Sequence[SimulatedFit],
    request: RehearsalRequest,
) -> Rehearsal:
    """Return the result of a rehearsal; ``results`` belong to ``runs``, one process first.

    If the request names no target loss, it is derived from the lowest loss of one process; there is
    none if that is the initial one.
    """
    recipe, data, conditions = simulator.recipe, simulator.data, simulator.conditions
    one, to_loss, n_params = results[0], request.to_loss, recipe.model.n_params
    if to_loss is None and one.points and not one.error:
        lowest = min(point.measures[LOSS] for point in one.points)
        improvement = one.points[0].measures[LOSS] - lowest
        if improvement > 0:
            to_loss = lowest + TARGET_MARGIN * min(abs(lowest), improvement)
    ours = [fit for run, fit in zip(runs, results, strict=True) if run.system == SPARKSTROM]
    density = sum(fit.entries for fit in ours) / max(1, sum(fit.publications for fit in ours))
    return Rehearsal(
        tuple(
            make_run(
                run.system,
                run.rule,
                fit,
                one,
                to_loss=to_loss,
                n_params=n_params,
                link_bits_s=conditions.link_bits_s,
            )
            for run, fit in zip(runs, results, strict=True)
        ),
        conditions,
        n_params,
        density / n_params if recipe.rounds is None else None,
        data.sample.rows,
        data.sample.total,
        recipe.epochs,
        recipe.master.batch_size_per_worker,
        simulator.is_held_out,
        to_loss,
        None if recipe.rounds is None else recipe.rounds.averaging_frequency,
    )


def make_recipe(
    model: FlatModel,
    state: NetworkStateHolder,
    master: TrainingMaster,
    packed: bytes,
    epochs: int,
    fraction: float,
    rounds: AveragingOptions | None = None,
) -> FitRecipe:
    """Return a description of the fit that a network would run next.

    Args:
        model: The network's model.
        state: The network's parameters and optimizer state, which are not changed.
        master: Options of training.
        packed: The pickled model.
        epochs: Number of epochs to train.
        fraction: Fraction of the rows to hold out.
        rounds: Options of ParallelWrapper's training in rounds; None for all other fits.
    """
    if isinstance(master, ParameterAveragingTrainingMaster):
        rounds, names = master, ("batch_size_per_worker", "batch_memory_bytes", "rng_seed")
        master = SharedTrainingMaster(**{name: getattr(rounds, name) for name in names})
    value = state.value
    first = value.k is None
    k = first_exponent(value.parameters) if first else next_exponent(value.parameters, value.k or 0)
    return FitRecipe(
        model,
        packed,
        value.parameters,
        k,
        master,
        epochs,
        fraction,
        value.epochs,
        state.minibatches_before,
        value.states,
        value.states_workers,
        rounds,
    )
