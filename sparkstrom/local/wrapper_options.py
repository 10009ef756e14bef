"""Wrapper options: what ``ParallelWrapper`` takes, and what of Spark's options means nothing."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import COUNT_MAX, KEY, flag, whole
from sparkstrom.local.accumulators import Accumulator
from sparkstrom.spark.driver.discovery import REFUSED as VOID_REFUSED
from sparkstrom.spark.driver.discovery import VoidConfiguration
from sparkstrom.spark.driver.options import need, unknown
from sparkstrom.spark.driver.settings import resolve
from sparkstrom.spark.driver.training_master import ALIASES, ALL, ONE, SharedTrainingMaster
from sparkstrom.spark.driver.training_master import REFUSED as MASTER_REFUSED

WORKERS = whole(1, 4096, unit="processes", remedy=", as a rule one for each core")
PREFETCH = whole(0, 65536, unit="blocks of rows", remedy=" blocks, as a rule 2")
FREQUENCY = whole(
    1, COUNT_MAX, unit="minibatches", remedy=" minibatches of a worker, as a rule 1 to 10"
)


class TrainingMode(enum.Enum):
    """How workers share what they learn; DL4J's words."""

    SHARED_GRADIENTS = "SHARED_GRADIENTS"  # thresholded updates, asynchronously
    AVERAGING = "AVERAGING"  # parameters, every averaging_frequency minibatches, synchronously
    CUSTOM = "CUSTOM"  # the same rounds, but an accumulator of the user's makes one of all


_NO_RDD = "there is no RDD: rows are read once per fit and dealt to the workers, at random"
REFUSED: dict[str, str] = {
    **MASTER_REFUSED,
    "workers_per_node": "workers=N says how many processes there are",
    "repartition": _NO_RDD,
    "rdd_training_approach": _NO_RDD,
    "export_directory": _NO_RDD,
    "num_workers": "write workers=N",
    "void": "there is no network; lease_s, log_bytes, window_bytes and max_chunk_size stand here",
    "network_mask": "everything stays on this machine, in shared memory",
    "unicast_port": "the system picks one, on the loopback interface",
    "controller": "the calling process has it",
    "gradients_accumulator": "with training_mode='CUSTOM', accumulator= is a function of "
    "parameters; otherwise threshold=, residual_post_processor=, shake_frequency= and warm_up= "
    "say how updates are made",
    "report_score_after_averaging": "progress, listeners and summary.history tell the loss",
    "workspace_mode": "memory is NumPy's, torch's or JAX's own matter",
    "trainer_factory": "training_mode='CUSTOM' with accumulator= is the way to rounds of your own",
    "model_params_supplier": "assign wrapper.parameters before fit",
    "updater_params_supplier": "an optimizer's state comes from a checkpoint: restore(path)",
}
OWN = (  # that ``ParallelWrapper`` names itself
    *("training_mode", "prefetch_buffer", "averaging_frequency", "average_updaters"),
    *("accumulator", "workers", "progress"),
)
HERE = ("lease_s", "log_bytes", "max_chunk_size", "window_bytes")  # of VoidConfiguration
_SPARKS = ("void", "workers_per_node", "repartition", "rdd_training_approach", "export_directory")
_SHARED_ONLY = (  # how updates are made, how far workers may be apart, who may come later
    "aggregation",
    "checkpoint_updaters",
    "encoding_debug_mode",
    "horizon",
    "layer_multipliers",
    "log_bytes",
    "max_chunk_size",
    "max_lead",
    "max_staleness",
    "min_workers",
    "publish_every",
    "residual_post_processor",
    "shake_frequency",
    "start_timeout",
    "threshold",
    "train_on",
    "warm_up",
    "window_bytes",
)


@dataclass(frozen=True, slots=True)
class RoundRule:
    """How often workers meet, and what becomes of what each brings."""

    frequency: int
    averages_state: bool
    accumulator: Accumulator | None  # None: the mean


def options_of(
    given: Mapping[str, Any], mode: TrainingMode, rule: RoundRule | None, env: Mapping[str, str]
) -> SharedTrainingMaster:
    """The options of a fit; what was not given may come from the environment.

    Raise UsageError for a name that there is not, or that means nothing here or in this mode.
    """
    names = [each.name for each in fields(SharedTrainingMaster) if each.init]
    names = sorted({*names, *HERE} - {*_SPARKS})
    for name in given:
        if ALIASES.get(name, name) not in names:
            refused = {**VOID_REFUSED, **REFUSED}
            raise UsageError(unknown("ParallelWrapper", name, [*names, *OWN], refused, ALIASES))
        if mode is not TrainingMode.SHARED_GRADIENTS and ALIASES.get(name, name) in _SHARED_ONLY:
            raise UsageError(
                f"training_mode={mode.value} sends no updates, all workers meet every"
                f" averaging_frequency minibatches: leave out {name}={given[name]!r}, or take"
                " training_mode='SHARED_GRADIENTS'"
            )
    void = {name: value for name, value in given.items() if name in HERE}
    rest = {name: value for name, value in given.items() if name not in HERE}
    if rule is not None:
        rest["horizon"] = "worker"  # a worker's steps are the rounds'
        rest["checkpoint_updaters"] = ONE if rule.averages_state else ALL
    return resolve(SharedTrainingMaster(VoidConfiguration(**void), **rest), {}, env)


def mode_of(value: object) -> TrainingMode:
    """The mode itself, or its name."""
    names = [mode.value for mode in TrainingMode]
    text = value.value if isinstance(value, TrainingMode) else value
    need(
        isinstance(text, str) and text in names,
        "training_mode",
        value,
        f"must be one of {', '.join(names)}",
    )
    return TrainingMode(text)


def rule_of(
    mode: TrainingMode,
    frequency: int | None,
    average_updaters: bool | None,
    accumulator: Accumulator | None,
) -> RoundRule | None:
    """None: they do not meet. Raise UsageError for what means nothing in this mode."""
    given = {
        "averaging_frequency": frequency,
        "average_updaters": average_updaters,
        "accumulator": accumulator,
    }
    if mode is TrainingMode.SHARED_GRADIENTS:
        for name, value in given.items():
            takes = "CUSTOM" if name == "accumulator" else "AVERAGING"
            reason = (
                f"workers do not meet with training_mode=SHARED_GRADIENTS; take {takes}, or leave"
                " it out (publish_every says how often updates are sent)"
            )
            need(value is None, name, value, reason)
        return None
    frequency = 1 if frequency is None else frequency
    frequency = FREQUENCY[KEY].read("averaging_frequency", frequency)
    averages = True if average_updaters is None else average_updaters
    averages = flag()[KEY].read("average_updaters", averages)
    is_custom = mode is TrainingMode.CUSTOM
    reason = "training_mode=CUSTOM needs one: a function (before, after, rows) -> parameters"
    need(not is_custom or callable(accumulator), "accumulator", accumulator, reason)
    reason = "training_mode=AVERAGING takes the mean; one of yours is for training_mode='CUSTOM'"
    need(is_custom or accumulator is None, "accumulator", accumulator, reason)
    return RoundRule(frequency or 1, bool(averages), accumulator)
