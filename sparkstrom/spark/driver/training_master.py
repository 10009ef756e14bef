"""How workers train and share: DL4J's SharedTrainingMaster, as far as it acts.

The master is a value: it opens nothing and reads no environment. ``SparkNetwork`` takes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field

from sparkstrom.base.option_types import (
    COUNT_MAX,
    KEY,
    Refused,
    check_options,
    custom,
    flag,
    instance,
    one_of,
    seconds,
    whole,
)
from sparkstrom.encoding import dl4j_names
from sparkstrom.encoding.layers import MULTIPLIER_MAX
from sparkstrom.encoding.residuals import ResidualClipping
from sparkstrom.encoding.schedules import WarmUp
from sparkstrom.encoding.thresholds import AUTO, ThresholdAlgorithm
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
    WORKERS_MAX,
    WORKERS_PER_NODE,
    check_common,
)
from sparkstrom.spark.driver.discovery import VoidConfiguration
from sparkstrom.spark.driver.options import need, need_whole, options

TRAIN_ON = ("local", "replica")
HORIZONS = ("fit", "worker")
AGGREGATIONS = ("sum", "mean", "sqrt")
REPARTITIONS = ("always", "never")
ONE, ALL = UPDATERS = ("one", "all")

_NO_GC = "Python frees an array when its last user is done; there is no collector to call"

REFUSED: dict[str, str] = {
    **dl4j_names.REFUSED,
    "rdd_data_set_num_examples": ONE_ROW,
    "num_workers": "DL4J does not use it either; workers are workers_per_node x executors",
    "storage_level": KEPT_ROWS,
    "storage_level_streams": KEPT_ROWS,
    "transport": "there is one transport: Aeron, UDP between executors and IPC inside one",
    "transport_type": "there is one transport: Aeron, UDP between executors and IPC inside one",
    "repartition_strategy": BALANCED,
    "repartitioner": "there are as many partitions as workers; repartition='never' keeps yours",
    "worker_prefetch_num_batches": "a worker has its whole partition before its first step",
    "worker_toggle_periodic_gc": _NO_GC,
    "worker_periodic_gc_frequency": _NO_GC,
    "mesh_build_mode": "it belongs to VoidConfiguration(mesh_build_mode=...)",
    "unicast_port": "it belongs to VoidConfiguration(unicast_port=...)",
    "network_mask": "it belongs to VoidConfiguration(network_mask=...)",
    "controller_address": "it belongs to VoidConfiguration(controller_address=...)",
    "controller": "it belongs to VoidConfiguration(controller=...)",
}
ALIASES = {
    **dl4j_names.ALIASES,
    "void_configuration": "void",
    "repartition_data": "repartition",
}


_CLIPPING = "must be None or a post-processor, such as ResidualClipping(5.0, 5)"
_MULTIPLIERS = 'must be None or a dictionary by layer, such as {"layer 1": 2}'
_THRESHOLD = f"must be {AUTO!r} or a threshold algorithm, such as AdaptiveThreshold(1e-3)"


def _multipliers(value: object) -> dict[str, int] | None:
    if value is None:
        return None
    if not (isinstance(value, Mapping) and all(isinstance(layer, str) for layer in value)):
        raise Refused(_MULTIPLIERS)
    of_layer = whole(1, MULTIPLIER_MAX, unit="tau")[KEY]
    return {
        str(layer): of_layer.read(f"layer_multipliers[{layer!r}]", multiplier)
        for layer, multiplier in value.items()
    }


@options(refused=REFUSED, aliases=ALIASES)
@dataclass(frozen=True, slots=True)
class SharedTrainingMaster:
    """Asynchronous training with shared, thresholded updates (Strom 2015; DL4J's namesake).

    Raises UsageError for a value, name or combination that cannot work, and says what would.
    """

    void: VoidConfiguration = field(
        default_factory=VoidConfiguration,
        metadata=instance((VoidConfiguration,), "must be a VoidConfiguration"),
    )
    _: KW_ONLY
    # What a worker does
    # rows of one minibatch; the last of an epoch may be smaller
    batch_size_per_worker: int = field(default=32, metadata=BATCH_SIZE)
    # workers per executor; -1: as many as it has task slots
    workers_per_node: int = field(default=ALL_SLOTS, metadata=WORKERS_PER_NODE)
    # "local": theta + own residual; "replica": theta alone, as DL4J does
    train_on: str = field(default="local", metadata=one_of(TRAIN_ON))
    # what to send; "auto": AutoThreshold()
    threshold: ThresholdAlgorithm | str = field(
        default=AUTO, metadata=instance((ThresholdAlgorithm,), _THRESHOLD, words=(AUTO,))
    )
    # what happens to what was not sent; None: nothing
    residual_post_processor: ResidualClipping | None = field(
        default_factory=lambda: ResidualClipping(5.0, 5),
        metadata=instance((ResidualClipping,), _CLIPPING, words=(None,)),
    )
    # thresholds of layers, in multiples of tau: {"layer 2": 4, "layer 3 biases": 1}; else 1
    layer_multipliers: Mapping[str, int] | None = field(
        default=None, hash=False, metadata=custom(_multipliers, _MULTIPLIERS, "tau")
    )
    # send more in the first publications; None: as in all others
    warm_up: WarmUp | None = field(
        default=None,
        metadata=instance(
            (WarmUp,), "must be None or a warm-up, such as WarmUp(100)", words=(None,)
        ),
    )
    # publications from one with tau / 3 to the next; 0: none
    shake_frequency: int = field(
        default=0,
        metadata=whole(0, COUNT_MAX, unit="publications", remedy=" publications, as a rule 100"),
    )
    # steps between two; "auto": when the last one is committed
    publish_every: int | str = field(
        default=AUTO,
        metadata=whole(1, COUNT_MAX, unit="steps", remedy=", or 'auto'", words=(AUTO,)),
    )
    # weight s of an update: 1, 1/workers or 1/sqrt(workers)
    aggregation: str = field(default="sum", metadata=one_of(AGGREGATIONS))
    # whose minibatches momentum and schedules count; "worker": each its own
    horizon: str = field(default="fit", metadata=one_of(HORIZONS))
    # steps a worker may be ahead of the slowest; "auto": 1, or publish_every where it is a number;
    # None: any number
    max_lead: int | str | None = field(
        default=AUTO,
        metadata=whole(
            1,
            COUNT_MAX,
            unit="steps",
            remedy=", or 'auto', or None for any number",
            words=(AUTO, None),
        ),
    )
    # rounds that others' learning may be late; "auto": 24 / workers - 1; None: any number
    max_staleness: int | str | None = field(
        default=AUTO,
        metadata=whole(
            0,
            COUNT_MAX,
            unit="rounds",
            remedy=" rounds, or 'auto', or None for any number",
            words=(AUTO, None),
        ),
    )
    # How the data are spread
    # "always": random and balanced by seed; "never": rows stay put
    repartition: str = field(default="always", metadata=one_of(REPARTITIONS))
    # "export": rows as Parquet once, for all fits
    rdd_training_approach: str = field(default="direct", metadata=APPROACH)
    # a URL; None: the default filesystem's temporary directory
    export_directory: str | None = field(default=None, metadata=EXPORT_DIRECTORY)
    # a worker's rows in memory; more go to local disk
    batch_memory_bytes: int = field(default=512 << 20, metadata=BATCH_MEMORY)
    # placement of rows and their order in each epoch
    rng_seed: int = field(default=0, metadata=RNG_SEED)
    # Whom it waits for
    # workers that must have joined by start_timeout
    min_workers: int = field(default=1, metadata=whole(1, WORKERS_MAX, unit="workers"))
    # from the job's first running task
    start_timeout: float = field(default=60.0, metadata=START_TIMEOUT)
    # for one step or one read of the data
    step_timeout: float = field(default=600.0, metadata=seconds())
    # What is saved while it trains, for the same command run again: docs/checkpoints.md
    # a path, or a URL of what fsspec reaches; None: none
    checkpoint_directory: str | None = field(default=None, metadata=CHECKPOINT_DIRECTORY)
    # or "2 epochs", "500 updates"
    checkpoint_every: str = field(default="5 min", metadata=CHECKPOINT_EVERY)
    # of whose optimizer's state a checkpoint has a copy: "one" worker's, for all, or of "all"
    checkpoint_updaters: str = field(default=ONE, metadata=one_of(UPDATERS))
    keep_last: int = field(default=3, metadata=KEEP_LAST)
    # continue from the newest checkpoint; False: begin anew beside it
    resume: bool = field(default=True, metadata=RESUME)
    # What it shows
    # seconds of each worker by activity, in the summary
    collect_training_stats: bool = field(default=False, metadata=STATS)
    # log the residual's size and percentiles now and then
    encoding_debug_mode: bool = field(default=False, metadata=flag())
    # sleep in every step, to play a slow worker
    debug_longer_iterations: int = field(default=0, metadata=whole(0, COUNT_MAX, unit="ms"))
    given: frozenset[str] = field(init=False, repr=False, compare=False)  # fields the caller set

    def __post_init__(self) -> None:
        check_options(self)
        check_common(self)
        if isinstance(self.publish_every, int) and isinstance(self.max_lead, int):
            reason = ", the value of publish_every: workers tell how far they are when they publish"
            need_whole("max_lead", self.max_lead, self.publish_every, reason)
        need(
            self.debug_longer_iterations < 1000 * self.step_timeout,
            "debug_longer_iterations",
            self.debug_longer_iterations,
            f"ms; with step_timeout={self.step_timeout} s every step would be late",
        )
