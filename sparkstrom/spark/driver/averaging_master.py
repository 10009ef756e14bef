"""How workers train in rounds: DL4J's ParameterAveragingTrainingMaster, and DiLoCo.

The master is a value: it opens nothing and reads no environment. ``SparkNetwork`` takes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sparkstrom.models.updaters import UPDATERS as OUTER
from sparkstrom.models.updaters import Updater
from sparkstrom.spark.driver.common_options import (
    ALL_SLOTS,
    BALANCED,
    KEPT_ROWS,
    ONE_ROW,
    check_common,
)
from sparkstrom.spark.driver.options import need, need_one_of, need_whole, options
from sparkstrom.spark.driver.training_master import ALL, ONE, SharedTrainingMaster

OWN = "own"  # each worker goes on with its own updater's state
IF_DIFFERENT = "num_partitions_workers_differs"  # DL4J's word
REPARTITIONING = ("always", "never", IF_DIFFERENT)
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
    batch_size_per_worker: int = 32  # rows of one minibatch; the last of an epoch may be smaller
    averaging_frequency: int = 5  # minibatches of each worker in a round
    workers_per_node: int = ALL_SLOTS  # workers per executor; -1: as many as it has task slots
    # optimizers' states: True: averaged, too; False: new in each round; "own": each goes on
    # with its own
    save_updater: bool | str = True
    # the step from where a round began towards the mean; None: to the mean, as DL4J
    outer: Updater | None = None
    prefetch: int = 2  # minibatches that are read while others are trained on; 0: none
    # How sums are made: 1: by the driver program; 2: on executors, by parts; 3 and more: of
    # groups of workers first, as by RDD.treeAggregate
    aggregation_depth: int = 2
    # How the data are spread
    repartition: str = "always"  # "never": rows stay put; or if there are not as many partitions
    rdd_training_approach: str = "direct"  # "export": rows as Parquet once, for all fits
    export_directory: str | None = None  # a URL; None: the default filesystem's temporary directory
    storage_level: str | None = "MEMORY_AND_DISK"  # of rows between epochs; None: read again
    batch_memory_bytes: int = 512 << 20  # a worker's rows in memory; more go to local disk
    rng_seed: int = 0  # placement of rows and their order in each epoch
    start_timeout: float = 60.0  # s, until executors have registered
    # What is saved while it trains, for the same command run again: docs/checkpoints.md
    checkpoint_directory: str | None = None  # a path, or a URL of what fsspec reaches; None: none
    checkpoint_every: str = "5 min"  # or "2 epochs", "500 updates", which are rounds here
    keep_last: int = 3  # checkpoints
    resume: bool = True  # go on from the newest checkpoint; False: begin anew beside it
    collect_training_stats: bool = False  # seconds of each worker by activity, in the summary
    given: frozenset[str] = field(init=False, repr=False, compare=False)  # fields the caller set

    def __post_init__(self) -> None:
        check_common(self)
        need_whole("averaging_frequency", self.averaging_frequency, 1, ", as a rule 5 to 10")
        fits = isinstance(self.save_updater, bool) or self.save_updater == OWN
        need(fits, "save_updater", self.save_updater, "must be True, False or 'own'")
        fits = self.outer is None or type(self.outer) in OUTER.values()
        hint = "must be None or an updater, such as Nesterov(0.7, 0.9)"
        need(fits, "outer", self.outer, hint)
        need_whole("prefetch", self.prefetch, 0, " minibatches, as a rule 2")
        need_whole("aggregation_depth", self.aggregation_depth, 1, ", as a rule 2")
        need_one_of("repartition", self.repartition, REPARTITIONING)
        hint = f"must be None or one of {', '.join(LEVELS)}"
        need(self.storage_level in (None, *LEVELS), "storage_level", self.storage_level, hint)

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
