"""Define ParameterAveragingTrainingMaster, the options of training by rounds of averaging.

Options are named as in DL4J. The class only stores and checks them; ``SparkNetwork`` acts on them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.option_types import (
    COUNT_MAX,
    Refused,
    call_parser,
    custom,
    flag,
    instance,
    one_of,
    whole,
)
from sparkstrom.models.base import Flat
from sparkstrom.models.updaters import UPDATERS as OUTER
from sparkstrom.models.updaters import Updater
from sparkstrom.options.common import (
    BALANCED_REASON,
    KEPT_ROWS_REASON,
    ONE_ROW_REASON,
    CommonOptions,
    option,
    option_class,
)
from sparkstrom.options.gradient_sharing import ALL, ONE, SharedTrainingMaster

PER_WORKER = "own"  # value of save_updater: each worker keeps its own optimizer state
IF_COUNT_DIFFERS = "num_partitions_workers_differs"  # value of repartition, as in DL4J
REPARTITION_CHOICES = ("always", "never", IF_COUNT_DIFFERS)
PREFETCH_MAX = 10_000  # number of minibatches, all of which are in memory
DEPTH_MAX = 64  # number of levels on which results are summed, enough for 2^64 workers
STORAGE_LEVELS = (
    *("DISK_ONLY", "DISK_ONLY_2", "DISK_ONLY_3", "MEMORY_AND_DISK", "MEMORY_AND_DISK_2"),
    *("MEMORY_ONLY", "MEMORY_ONLY_2", "OFF_HEAP"),
)

# Called with (before f32[n_params], after f32[workers, n_params], rows i64[workers]); returns the
# parameters f32[n_params] with which the next round starts. ``after`` is read-only and contains the
# parameters of the workers that trained in the round.
Accumulator = Callable[[Flat, Flat, NDArray[np.int64]], Flat]

_ACCUMULATOR = "must be None or a function (before, after, rows) -> parameters"


def _check_accumulator(value: object) -> object:
    """Return a function or None. Raise Refused for anything else."""
    if value is not None and (isinstance(value, type) or not callable(value)):
        raise Refused(_ACCUMULATOR)
    return value


# Types of options that ParallelWrapper also has.
ACCUMULATOR = custom(_check_accumulator, _ACCUMULATOR)
OUTER_OPTIMIZER = instance(
    tuple(OUTER.values()),
    "must be None or an updater, such as Nesterov(0.7, 0.9)",
    words=(None,),
    parse=call_parser({made.__name__: made for made in OUTER.values()}, "Nesterov(0.7, 0.9)"),
)

# Maps DL4J's names that have no meaning here to the reason.
REFUSED: dict[str, str] = {
    "rdd_data_set_num_examples": ONE_ROW_REASON,
    "num_workers": "workers are workers_per_node x executors",
    "storage_level_streams": KEPT_ROWS_REASON,
    "repartition_strategy": BALANCED_REASON,
    "training_hooks": "pass listeners to fit",
    "void": "nothing goes by UDP here, so there is nothing to configure",
    "threshold": "parameters are averaged as they are; thresholds are SharedTrainingMaster's",
}
# Maps DL4J's names to names of options.
ALIASES = {
    "repartition_data": "repartition",
    "prefetch_num_batches": "prefetch",
    "worker_prefetch_num_batches": "prefetch",
}


@option_class(refused=REFUSED, aliases=ALIASES)
@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterAveragingTrainingMaster(CommonOptions):
    """Options of round-based training: workers train alone for some steps, then average parameters.

    Each round is a Spark job, and neither UDP nor the Aeron library is needed. For DiLoCo, set
    ``outer=Nesterov(0.7, 0.9)``, ``save_updater="own"`` and an ``averaging_frequency`` of some
    hundreds. The constructor raises UsageError if a value, name or combination is invalid.
    """

    averaging_frequency: int = option(
        5,
        whole(1, COUNT_MAX, unit="minibatches", remedy=", as a rule 5 to 10"),
        "minibatches that each worker trains in a round",
        when="Raise ``averaging_frequency`` to send fewer bytes and run fewer Spark jobs; use"
        " hundreds if steps take milliseconds. Lower ``averaging_frequency`` if accuracy suffers,"
        " as with many workers or a large learning rate.",
    )
    save_updater: bool | str = option(
        True,
        flag(words=(PER_WORKER,)),
        "optimizer states between rounds: True averages the states, False starts each round with"
        ' new states, and "own" lets each worker keep its own state',
        when='Use "own" for DiLoCo; every worker\'s state then passes through the driver program in'
        " each round. Use False to send no optimizer states: with True, Adam sends three times as"
        " many bytes as SGD.",
    )
    outer: Updater | None = option(
        None,
        OUTER_OPTIMIZER,
        "outer optimizer, which steps from a round's initial parameters towards the mean of the"
        " workers' parameters; None: the next round starts from the mean itself, as in DL4J",
        when='For DiLoCo, use ``Nesterov(0.7, 0.9)`` with ``save_updater="own"``. DiLoCo suits long'
        " training whose rounds must be far apart.",
    )
    accumulator: Accumulator | None = option(
        None,
        ACCUMULATOR,
        "function (before, after, rows) -> parameters that combines the workers' parameters of a"
        " round; None: the mean of the workers' parameters",
        when="Pass a function to combine parameters by another rule, such as a median. With an"
        " accumulator, the driver program needs memory for the parameters of every worker.",
    )
    prefetch: int = option(
        2,
        whole(0, PREFETCH_MAX, unit="minibatches", remedy=" minibatches, as a rule 2"),
        "minibatches to read ahead while a worker trains; 0: none",
        when="Raise ``prefetch`` if steps wait for rows. Set ``prefetch=0`` to read rows without a"
        " separate thread.",
    )
    aggregation_depth: int = option(
        2,
        whole(1, DEPTH_MAX, unit="levels", remedy=", as a rule 2"),
        "number of levels at which the workers' results are summed. 1: in the driver program; 2: on"
        " executors, by slices of the parameters; 3 or more: in groups of workers first, as"
        " RDD.treeAggregate does",
        when="Use 3 or more levels for very many workers. Use 1 level only if the driver program"
        " can add up the results of all workers.",
    )
    repartition: str = option(
        "always",
        one_of(REPARTITION_CHOICES),
        '"always" distributes rows evenly and at random (seed: ``rng_seed``); "never" leaves rows'
        ' in their partitions; "num_partitions_workers_differs" is like "always", unless each'
        " worker already has one partition",
        when='Use "never" if the rows are already distributed evenly and at random. Use'
        ' "num_partitions_workers_differs" to shuffle only if the number of partitions differs from'
        " the number of workers. Spark Connect does not support this value.",
    )
    storage_level: str | None = option(
        "MEMORY_AND_DISK",
        one_of(STORAGE_LEVELS, words=(None,)),
        "Spark's storage level for the rows between epochs; None: the rows are read again",
        when='Use "DISK_ONLY" only if executors are short of memory. Use None to store no rows:'
        " Spark then computes or shuffles the rows again in each epoch.",
    )

    def __post_init__(self) -> None:
        self.check()

    @property
    def threshold(self) -> None:
        """The threshold algorithm: None, because round-based training does not encode updates."""

    @property
    def checkpoint_updaters(self) -> str:
        """Which optimizer states a checkpoint contains: those of ALL workers, or ONE for all."""
        return ALL if self.save_updater == PER_WORKER else ONE


TrainingMaster = SharedTrainingMaster | ParameterAveragingTrainingMaster


def needs_repartitioning(repartition: str, rdd: Any, workers: int) -> bool:
    """Return whether to redistribute rows before a fit.

    Args:
        repartition: The value of the option of this name.
        rdd: The RDD that the fit reads. Its partitions are counted. For a DataFrame, do not pass
            ``DataFrame.rdd``: it has all columns, so Spark might run the whole query to create it,
            and its number of partitions might differ.
        workers: Number of workers.
    """
    if repartition != IF_COUNT_DIFFERS:
        return repartition == "always"
    return bool(rdd.getNumPartitions() != workers)
