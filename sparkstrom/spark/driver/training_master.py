"""How workers train and share: DL4J's SharedTrainingMaster, as far as it acts.

The master is a value: it opens nothing and reads no environment. ``SparkNetwork`` takes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field

from sparkstrom.encoding import dl4j_names
from sparkstrom.encoding.layers import MULTIPLIER_MAX
from sparkstrom.encoding.residuals import ResidualClipping
from sparkstrom.encoding.schedules import WarmUp
from sparkstrom.encoding.thresholds import AUTO, ThresholdAlgorithm
from sparkstrom.spark.driver.common_options import (
    ALL_SLOTS,
    BALANCED,
    KEPT_ROWS,
    ONE_ROW,
    check_common,
)
from sparkstrom.spark.driver.discovery import VoidConfiguration
from sparkstrom.spark.driver.options import (
    need,
    need_flag,
    need_one_of,
    need_seconds,
    need_whole,
    options,
)

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


@options(refused=REFUSED, aliases=ALIASES)
@dataclass(frozen=True, slots=True)
class SharedTrainingMaster:
    """Asynchronous training with shared, thresholded updates (Strom 2015; DL4J's namesake).

    Raises UsageError for a value, name or combination that cannot work, and says what would.
    """

    void: VoidConfiguration = field(default_factory=VoidConfiguration)
    _: KW_ONLY
    # What a worker does
    batch_size_per_worker: int = 32  # rows of one minibatch; the last of an epoch may be smaller
    workers_per_node: int = ALL_SLOTS  # workers per executor; -1: as many as it has task slots
    train_on: str = "local"  # "local": theta + own residual; "replica": theta alone, as DL4J does
    threshold: ThresholdAlgorithm | str = AUTO  # what to send; "auto": AutoThreshold()
    residual_post_processor: ResidualClipping | None = field(
        default_factory=lambda: ResidualClipping(5.0, 5)
    )  # what happens to what was not sent; None: nothing
    # thresholds of layers, in multiples of tau: {"layer 2": 4, "layer 3 biases": 1}; else 1
    layer_multipliers: Mapping[str, int] | None = field(default=None, hash=False)
    warm_up: WarmUp | None = None  # send more in the first publications; None: as in all others
    shake_frequency: int = 0  # publications from one with tau / 3 to the next; 0: none
    publish_every: int | str = AUTO  # steps between two; "auto": when the last one is committed
    aggregation: str = "sum"  # weight s of an update: 1, 1/workers or 1/sqrt(workers)
    horizon: str = "fit"  # whose minibatches momentum and schedules count; "worker": each its own
    # steps a worker may be ahead of the slowest; "auto": 1, or publish_every where it is a number;
    # None: any number
    max_lead: int | str | None = AUTO
    # rounds that others' learning may be late; "auto": 24 / workers - 1; None: any number
    max_staleness: int | str | None = AUTO
    # How the data are spread
    repartition: str = "always"  # "always": random and balanced by seed; "never": rows stay put
    rdd_training_approach: str = "direct"  # "export": rows as Parquet once, for all fits
    export_directory: str | None = None  # a URL; None: the default filesystem's temporary directory
    batch_memory_bytes: int = 512 << 20  # a worker's rows in memory; more go to local disk
    rng_seed: int = 0  # placement of rows and their order in each epoch
    # Whom it waits for
    min_workers: int = 1  # workers that must have joined by start_timeout
    start_timeout: float = 60.0  # s, from the job's first running task
    step_timeout: float = 600.0  # s, for one step or one read of the data
    # What is saved while it trains, for the same command run again: docs/checkpoints.md
    checkpoint_directory: str | None = None  # a path, or a URL of what fsspec reaches; None: none
    checkpoint_every: str = "5 min"  # or "2 epochs", "500 updates"
    # of whose optimizer's state a checkpoint has a copy: "one" worker's, for all, or of "all"
    checkpoint_updaters: str = ONE
    keep_last: int = 3  # checkpoints
    resume: bool = True  # go on from the newest checkpoint; False: begin anew beside it
    # What it shows
    collect_training_stats: bool = False  # seconds of each worker by activity, in the summary
    encoding_debug_mode: bool = False  # log the residual's size and percentiles now and then
    debug_longer_iterations: int = 0  # ms of sleep in every step, to play a slow worker
    given: frozenset[str] = field(init=False, repr=False, compare=False)  # fields the caller set

    def __post_init__(self) -> None:
        self._check_parts()
        self._check_training()
        self._check_waiting()
        need_one_of("checkpoint_updaters", self.checkpoint_updaters, UPDATERS)

    def _check_parts(self) -> None:
        void, threshold, clipping = self.void, self.threshold, self.residual_post_processor
        need(isinstance(void, VoidConfiguration), "void", void, "must be a VoidConfiguration")
        hint = f"must be {AUTO!r} or a threshold algorithm, such as AdaptiveThreshold(1e-3)"
        fits = threshold == AUTO or isinstance(threshold, ThresholdAlgorithm)
        need(fits, "threshold", threshold, hint)
        hint = "must be None or a post-processor, such as ResidualClipping(5.0, 5)"
        fits = clipping is None or isinstance(clipping, ResidualClipping)
        need(fits, "residual_post_processor", clipping, hint)
        fits = self.warm_up is None or isinstance(self.warm_up, WarmUp)
        need(fits, "warm_up", self.warm_up, "must be None or a warm-up, such as WarmUp(100)")
        multipliers = self.layer_multipliers
        hint = 'must be None or a dictionary by layer, such as {"layer 1": 2}'
        fits = multipliers is None or isinstance(multipliers, Mapping)
        need(fits, "layer_multipliers", multipliers, hint)
        for layer, multiplier in (multipliers or {}).items():
            need(isinstance(layer, str), "layer_multipliers", multipliers, hint)
            need_whole(f"layer_multipliers[{layer!r}]", multiplier, 1)
            fits, most = multiplier <= MULTIPLIER_MAX, f"must be at most {MULTIPLIER_MAX}"
            need(fits, f"layer_multipliers[{layer!r}]", multiplier, most)

    def _check_training(self) -> None:
        check_common(self)
        need_one_of("train_on", self.train_on, TRAIN_ON)
        need_one_of("horizon", self.horizon, HORIZONS)
        need_one_of("aggregation", self.aggregation, AGGREGATIONS)
        need_one_of("repartition", self.repartition, REPARTITIONS)
        need_whole("shake_frequency", self.shake_frequency, 0, " publications, as a rule 100")
        if self.publish_every != AUTO:
            need_whole("publish_every", self.publish_every, 1, ", or 'auto'")
        if self.max_lead not in (AUTO, None):
            least, remedy = 1, ", or 'auto', or None for any number"
            if isinstance(self.publish_every, int):
                least = self.publish_every
                remedy = (
                    ", the value of publish_every: workers tell how far they are when they publish"
                )
            need_whole("max_lead", self.max_lead, least, remedy)
        if self.max_staleness not in (AUTO, None):
            remedy = " rounds, or 'auto', or None for any number"
            need_whole("max_staleness", self.max_staleness, 0, remedy)
        need_flag("encoding_debug_mode", self.encoding_debug_mode)

    def _check_waiting(self) -> None:
        need_whole("min_workers", self.min_workers, 1)
        need_seconds("step_timeout", self.step_timeout)
        need_whole("debug_longer_iterations", self.debug_longer_iterations, 0)
        need(
            self.debug_longer_iterations < 1000 * self.step_timeout,
            "debug_longer_iterations",
            self.debug_longer_iterations,
            f"ms; with step_timeout={self.step_timeout} s every step would be late",
        )
