"""Common options: checks of what all training masters take: rows, how they are spread, saving."""

from __future__ import annotations

from typing import Protocol

from sparkstrom.base.option_types import (
    BYTES_MAX,
    COUNT_MAX,
    Refused,
    custom,
    flag,
    is_whole,
    one_of,
    path,
    seconds,
    whole,
)
from sparkstrom.checkpoint.cadence import parse_every
from sparkstrom.runtime.row_store import MEMORY_MIN_BYTES
from sparkstrom.spark.driver.options import need

ALL_SLOTS = -1  # DL4J's number for "as many as fit"
WORKERS_MAX = 2**16  # of one executor or host; more processes than Linux starts
ROWS_MAX = 2**31 - 1  # of one minibatch
APPROACHES = ("direct", "export")

ONE_ROW = "an element of the data is one (features, label) row"
BALANCED = "placement is always balanced, and random by rng_seed"
KEPT_ROWS = "a worker keeps its own rows for all epochs: see batch_memory_bytes"


_WORKERS_PER_NODE = "must be a whole number of at least 1, or -1 for all task slots"


def _workers_per_node(value: object) -> int:
    if not (is_whole(value) and (int(value) == ALL_SLOTS or 1 <= int(value) <= WORKERS_MAX)):
        raise Refused(_WORKERS_PER_NODE)
    return int(value)


def _every(value: object) -> str:
    parse_every(value)
    return str(value)


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


# What both masters declare of these options.
BATCH_SIZE = whole(1, ROWS_MAX, unit="rows", remedy=", as a rule 32")
WORKERS_PER_NODE = custom(_workers_per_node, _WORKERS_PER_NODE, "workers")
APPROACH = one_of(APPROACHES)
EXPORT_DIRECTORY = path("must be None or a URL")
BATCH_MEMORY = whole(
    MEMORY_MIN_BYTES, BYTES_MAX, unit="bytes", remedy=" bytes, as a rule 512 MiB (536870912)"
)
RNG_SEED = whole(0)
START_TIMEOUT = seconds()
STATS = flag()
CHECKPOINT_DIRECTORY = path()
CHECKPOINT_EVERY = custom(_every, "such as '5 min', '2 epochs' or '500 updates'")
KEEP_LAST = whole(1, COUNT_MAX, unit="checkpoints", remedy=", as a rule 3")
RESUME = flag()


def check_common(options: CommonOptions) -> None:
    """Raise UsageError naming the options that do not go together."""
    directory = options.export_directory
    exports = directory is None or options.rdd_training_approach == "export"
    hint = "nothing is exported unless rdd_training_approach='export'"
    need(exports, "export_directory", directory, hint)
