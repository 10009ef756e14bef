"""How workers train in rounds: DL4J's ParameterAveragingTrainingMaster, and DiLoCo.

The master is a value: it opens nothing and reads no environment. ``SparkNetwork`` takes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sparkstrom.base.option_types import COUNT_MAX, check_options, flag, instance, one_of, whole
from sparkstrom.models.updaters import UPDATERS as OUTER
from sparkstrom.models.updaters import Updater
from sparkstrom.spark.driver.common_options import (
    ALL_SLOTS,
    APPROACH,
    BALANCED,
    BATCH_MEMORY,
    BATCH_SIZE,
    CHECKPOINT_DIRECTORY,
    CHECKPOINT_EVERY,
    EXPORT_DIRECTORY,
    KEEP_LAST,
    KEPT_ROWS,
    ONE_ROW,
    RESUME,
    RNG_SEED,
    START_TIMEOUT,
    STATS,
    WORKERS_PER_NODE,
    check_common,
)
from sparkstrom.spark.driver.options import options
from sparkstrom.spark.driver.training_master import ALL, ONE, SharedTrainingMaster

OWN = "own"  # each worker goes on with its own updater's state
IF_DIFFERENT = "num_partitions_workers_differs"  # DL4J's word
REPARTITIONING = ("always", "never", IF_DIFFERENT)
PREFETCH_MAX = 10_000  # minibatches; all of them lie in memory
DEPTH_MAX = 64  # levels of sums; 2^64 workers
LEVELS = (
    *("DISK_ONLY", "DISK_ONLY_2", "DISK_ONLY_3", "MEMORY_AND_DISK", "MEMORY_AND_DISK_2"),
    *("MEMORY_ONLY", "MEMORY_ONLY_2", "OFF_HEAP"),
)

REFUSED: dict[str, str] = {
    "rdd_data_set_num_examples": ONE_ROW,
    "num_workers": "workers are workers_per_node x executors",
    "storage_level_streams": KEPT_ROWS,
    "repartition_strategy": BALANCED,
    "training_hooks": "pass listeners to fit",
    "void": "nothing goes by UDP here, so there is nothing to configure",
    "threshold": "parameters are averaged as they are; thresholds are SharedTrainingMaster's",
}
ALIASES = {
    "repartition_data": "repartition",
    "prefetch_num_batches": "prefetch",
    "worker_prefetch_num_batches": "prefetch",
}


@options(refused=REFUSED, aliases=ALIASES)
@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterAveragingTrainingMaster:
    """Synchronous training in rounds: some steps alone, then the mean of all parameters.

    Each round is a Spark job: no UDP, no Aeron library. ``outer=Nesterov(0.7, 0.9)`` with
    ``save_updater="own"`` and an ``averaging_frequency`` of some hundreds is DiLoCo. Raises
    UsageError for a value, name or combination that cannot work, and says what would.
    """

    # What a worker does
    # rows of one minibatch; the last of an epoch may be smaller
    batch_size_per_worker: int = field(default=32, metadata=BATCH_SIZE)
    # minibatches of each worker in a round
    averaging_frequency: int = field(
        default=5,
        metadata=whole(1, COUNT_MAX, unit="minibatches", remedy=", as a rule 5 to 10"),
    )
    # workers per executor; -1: as many as it has task slots
    workers_per_node: int = field(default=ALL_SLOTS, metadata=WORKERS_PER_NODE)
    # optimizers' states: True: averaged, too; False: new in each round; "own": each continues
    # with its own
    save_updater: bool | str = field(default=True, metadata=flag(words=(OWN,)))
    # the step from where a round began towards the mean; None: to the mean, as DL4J
    outer: Updater | None = field(
        default=None,
        metadata=instance(
            tuple(OUTER.values()),
            "must be None or an updater, such as Nesterov(0.7, 0.9)",
            words=(None,),
        ),
    )
    # minibatches that are read while others are trained on; 0: none
    prefetch: int = field(
        default=2,
        metadata=whole(0, PREFETCH_MAX, unit="minibatches", remedy=" minibatches, as a rule 2"),
    )
    # How sums are made: 1: by the driver program; 2: on executors, by parts; 3 and more: of
    # groups of workers first, as by RDD.treeAggregate
    aggregation_depth: int = field(
        default=2, metadata=whole(1, DEPTH_MAX, unit="levels", remedy=", as a rule 2")
    )
    # How the data are spread
    # "never": rows stay put; or if there are not as many partitions
    repartition: str = field(default="always", metadata=one_of(REPARTITIONING))
    # "export": rows as Parquet once, for all fits
    rdd_training_approach: str = field(default="direct", metadata=APPROACH)
    # a URL; None: the default filesystem's temporary directory
    export_directory: str | None = field(default=None, metadata=EXPORT_DIRECTORY)
    # of rows between epochs; None: read again
    storage_level: str | None = field(
        default="MEMORY_AND_DISK", metadata=one_of(LEVELS, words=(None,))
    )
    # a worker's rows in memory; more go to local disk
    batch_memory_bytes: int = field(default=512 << 20, metadata=BATCH_MEMORY)
    # placement of rows and their order in each epoch
    rng_seed: int = field(default=0, metadata=RNG_SEED)
    # until executors have registered
    start_timeout: float = field(default=60.0, metadata=START_TIMEOUT)
    # What is saved while it trains, for the same command run again: docs/checkpoints.md
    # a path, or a URL of what fsspec reaches; None: none
    checkpoint_directory: str | None = field(default=None, metadata=CHECKPOINT_DIRECTORY)
    # or "2 epochs", "500 updates", which are rounds here
    checkpoint_every: str = field(default="5 min", metadata=CHECKPOINT_EVERY)
    keep_last: int = field(default=3, metadata=KEEP_LAST)
    # continue from the newest checkpoint; False: begin anew beside it
    resume: bool = field(default=True, metadata=RESUME)
    # seconds of each worker by activity, in the summary
    collect_training_stats: bool = field(default=False, metadata=STATS)
    given: frozenset[str] = field(init=False, repr=False, compare=False)  # fields the caller set

    def __post_init__(self) -> None:
        check_options(self)
        check_common(self)

    @property
    def threshold(self) -> None:
        """There is none: encoders of other fits have nothing to go on with here."""

    @property
    def checkpoint_updaters(self) -> str:
        """Of whose optimizer's state a checkpoint has a copy."""
        return ALL if self.save_updater == OWN else ONE


TrainingMaster = SharedTrainingMaster | ParameterAveragingTrainingMaster


def moves(repartition: str, data: Any, workers: int) -> bool:
    """Are rows dealt out anew? ``data`` is an RDD or a DataFrame."""
    if repartition != IF_DIFFERENT:
        return repartition == "always"
    rdd = data.rdd if hasattr(data, "rdd") else data
    return bool(rdd.getNumPartitions() != workers)
