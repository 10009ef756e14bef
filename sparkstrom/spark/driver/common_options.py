"""Common options: checks of what all training masters take: rows, how they are spread, saving."""

from __future__ import annotations

from typing import Protocol

from sparkstrom.checkpoint.cadence import parse_every
from sparkstrom.runtime.row_store import MEMORY_MIN_BYTES
from sparkstrom.spark.driver.options import need, need_flag, need_one_of, need_seconds, need_whole

ALL_SLOTS = -1  # DL4J's number for "as many as fit"
APPROACHES = ("direct", "export")

ONE_ROW = "an element of the data is one (features, label) row"
BALANCED = "placement is always balanced, and random by rng_seed"
KEPT_ROWS = "a worker keeps its own rows for all epochs: see batch_memory_bytes"


class CommonOptions(Protocol):
    """Of every master."""

    @property
    def batch_size_per_worker(self) -> int: ...
    @property
    def workers_per_node(self) -> int: ...
    @property
    def rdd_training_approach(self) -> str: ...
    @property
    def export_directory(self) -> str | None: ...
    @property
    def batch_memory_bytes(self) -> int: ...
    @property
    def rng_seed(self) -> int: ...
    @property
    def start_timeout(self) -> float: ...
    @property
    def checkpoint_directory(self) -> str | None: ...
    @property
    def checkpoint_every(self) -> str: ...
    @property
    def keep_last(self) -> int: ...
    @property
    def resume(self) -> bool: ...
    @property
    def collect_training_stats(self) -> bool: ...


def check_common(options: CommonOptions) -> None:
    """Raise UsageError naming the option that cannot work."""
    need_whole("batch_size_per_worker", options.batch_size_per_worker, 1, ", as a rule 32")
    if options.workers_per_node != ALL_SLOTS:
        need_whole("workers_per_node", options.workers_per_node, 1, ", or -1 for all task slots")
    need_one_of("rdd_training_approach", options.rdd_training_approach, APPROACHES)
    directory = options.export_directory
    fits, hint = directory is None or isinstance(directory, str), "must be None or a URL"
    need(fits and directory != "", "export_directory", directory, hint)
    exports = directory is None or options.rdd_training_approach == "export"
    hint = "nothing is exported unless rdd_training_approach='export'"
    need(exports, "export_directory", directory, hint)
    least, remedy = MEMORY_MIN_BYTES, " bytes, as a rule 512 MiB (536870912)"
    need_whole("batch_memory_bytes", options.batch_memory_bytes, least, remedy)
    need_whole("rng_seed", options.rng_seed, 0)
    need_seconds("start_timeout", options.start_timeout)
    need_flag("collect_training_stats", options.collect_training_stats)
    _check_saving(options)


def _check_saving(options: CommonOptions) -> None:
    directory = options.checkpoint_directory
    fits = directory is None or (isinstance(directory, str) and bool(directory))
    need(fits, "checkpoint_directory", directory, "must be None, a path or a URL")
    parse_every(options.checkpoint_every)
    need_whole("keep_last", options.keep_last, 1, ", as a rule 3")
    need_flag("resume", options.resume)
