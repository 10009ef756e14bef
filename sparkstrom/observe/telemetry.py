"""Define the counters that workers report, as typed records and in their wire format.

All counters are cumulative. On the wire they are a flat map of names to floats that relays (workers
that forward messages) pass on unchanged; only this module encodes and decodes the map. An entry
that matches no field, or whose value its field cannot hold, is recorded as an unknown name and
reported in the summary.

A commit is an update that the controller has numbered. A residual contains the changes that a
worker has learned but not sent yet; entries that reach a threshold, tau, are sent.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

Record = TypeVar("Record")

WIRE_NAME = "told"  # metadata key: name on the wire; for a dict or record, a prefix of names
MERGE = "merge"  # metadata key: function that combines the values of all workers
# Metadata key: use only each partition's last worker, or the last whose named field is not 0.
ONCE_PER_PARTITION = "once_per_partition"
DECIMAL_KEY = re.compile("0|[1-9][0-9]{0,8}")  # a key of a dict with integer keys
SLOW_LINK_PREFIX = "narrow_"  # prefix of the fields of ``SlowLink`` on the wire


def sum_known(values: Sequence[float | None]) -> float:
    """Return the sum of the values that are not None; 0 if there are none."""
    return sum(value or 0.0 for value in values)


def mean_known(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are not None, or None if there are none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def sum_by_key(values: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Return the summed counts of each key."""
    total = Counter[str]()
    for counts in values:
        total.update(counts)
    return dict(total)


def counter(
    wire_name: str | None = None,
    *,
    default: Any = 0,
    merge: Callable[[Any], Any] = sum,
    once_per_partition: bool | str = False,
) -> Any:
    """Declare a field whose values are combined over all workers; see ``merge_records``.

    Args:
        wire_name: name on the wire; None: the field's name.
        default: value before the first report.
        merge: combines the values of all workers.
        once_per_partition: whether to combine only the last worker of each partition; the name of
            a field: the last one in which that field is not 0.
    """
    metadata: dict[str, Any] = {MERGE: merge, ONCE_PER_PARTITION: once_per_partition}
    if wire_name is not None:
        metadata[WIRE_NAME] = wire_name
    return field(metadata=metadata, default=default)


@dataclass(frozen=True, slots=True)
class EpochFigures:
    """Sums of a partition's latest epochs, each measured when the epoch ended."""

    finished: int  # number of the latest finished epoch, from 0 in this fit
    held_weight: float  # total weight of held-out rows; 0: none

    # epoch -> weighted sum of losses or correct predictions over the held-out rows
    held_sums: dict[int, float] = field(metadata={WIRE_NAME: "held@"}, default_factory=dict)
    # epoch -> weighted sum of losses over the trained rows, and the sum of the weights
    loss_sums: dict[int, float] = field(metadata={WIRE_NAME: "loss@"}, default_factory=dict)
    loss_weights: dict[int, float] = field(metadata={WIRE_NAME: "weight@"}, default_factory=dict)
    # epoch -> rows trained
    examples: dict[int, int] = field(metadata={WIRE_NAME: "examples@"}, default_factory=dict)


@dataclass(frozen=True, slots=True)
class ResidualFigures:
    """Statistics of the absolute values of a residual, in units of the parameters."""

    tau: float  # the threshold at that moment
    at_least_tau: float  # number of entries that reach the threshold
    mean: float  # of all entries
    max: float  # of all entries
    p50: float  # 50th percentile, the median; the fields below are the 95th to 99.99th
    p95: float
    p99: float
    p99_9: float = field(metadata={WIRE_NAME: "p99.9"})
    p99_99: float = field(metadata={WIRE_NAME: "p99.99"})

    def by_name(self) -> dict[str, float]:
        """Return the statistics by name, such as "p99.9"."""
        return _flatten(self, "")


@dataclass(frozen=True, slots=True)
class TrainingCounters:
    """Counters of a worker's trainer. A mass is a sum of absolute values, in parameter units."""

    partition: int = -1  # -1: not assigned yet
    attempt: int = 0  # number of Spark's task attempt
    epoch: int = 0  # the current epoch
    steps: int = counter()  # minibatches trained
    examples: int = counter()  # rows trained
    loss_sum: float = counter(default=0.0)  # weighted sum of the rows' losses
    loss_weight: float = counter(default=0.0)  # sum of these weights

    # loss_sum and loss_weight of the latest finished epoch alone. Once a worker that replaces
    # another one has finished an epoch, only its values count.
    last_loss_sum: float = counter(default=0.0, once_per_partition="last_loss_weight")
    last_loss_weight: float = counter(default=0.0, once_per_partition="last_loss_weight")

    # A worker that replaces another one reads the same rows.
    rows_held_out: int = counter(once_per_partition=True)
    spilled_bytes: int = counter(once_per_partition=True)  # rows on local disk
    fresh_updaters: int = counter()  # 1: joined late and received no optimizer state in time
    publications: int = counter()  # updates published
    hits: int = counter()  # parameter entries sent, over all updates
    mass_clipped: float = counter(default=0.0)  # removed from the residual by clipping
    mass_scaled_away: float = counter("mass_scaled", default=0.0)  # removed by scaling it down
    mass_left: float = counter(default=0.0)  # removed from the residual: sent, clipped or scaled
    mass_waited: float = counter(default=0.0)  # the residual's mass, summed over the worker's steps
    overflows: int = counter("breaches")  # parameters beyond the range of exact float32 additions

    # Squared Euclidean norm of the residual; None until training ends.
    residual_square: float | None = counter(default=None, merge=sum_known)
    # None: nothing published yet.
    tau: float | None = counter(default=None, merge=mean_known, once_per_partition="publications")

    # Activity, such as "stepping" or "waiting" -> seconds.
    seconds: dict[str, float] = field(metadata={WIRE_NAME: "s_"}, default_factory=dict)
    # None: no epoch has ended yet.
    epochs: EpochFigures | None = field(metadata={WIRE_NAME: ""}, default=None)
    # None: the option encoding_debug_mode is off.
    residual: ResidualFigures | None = field(metadata={WIRE_NAME: "r_"}, default=None)


@dataclass(frozen=True, slots=True)
class LinkBytes:
    """Bytes sent over network interfaces by media drivers, Aeron's processes for UDP."""

    # Name of a media driver -> all bytes that this driver has sent, for all its clients.
    drivers: dict[str, float] = field(metadata={WIRE_NAME: "wire_driver "})
    # Correction for this node: bytes of its datagrams' headers minus its bytes within the host.
    own: float = field(metadata={WIRE_NAME: "wire_own"})


NO_LINK_BYTES = LinkBytes({}, 0.0)


@dataclass(frozen=True, slots=True)
class SlowLink:
    """A link to a child in the tree of workers, too slow for training. Rates are in bytes/s."""

    node: int  # id of the child
    carries: float  # measured rate
    needed: float  # rate required to send every commit
    behind: int  # commits queued or in flight
    sums: bool  # whether some of these commits are sent merged into sums


@dataclass(frozen=True, slots=True)
class NodeCounters:
    """Counters of a worker's protocol node: traffic, messages and links."""

    update_bytes: int = counter()  # encrypted size of the worker's own updates
    wire_bytes: int = counter()  # all bytes passed to the transport
    by_kind: dict[str, int] = field(  # wire_bytes by kind of message
        metadata={WIRE_NAME: "kind_", MERGE: sum_by_key}, default_factory=dict
    )
    rejected: int = counter()  # frames that are damaged or not from this job
    round_s: float | None = None  # seconds from an update to its commit
    ignored: int = counter()  # messages that the protocol ignored

    # Bytes by media driver; None before the first report.
    links: LinkBytes | None = field(metadata={WIRE_NAME: ""}, default=None)
    # The latest slow link to a child; None: no link is slow.
    slow_link: SlowLink | None = field(metadata={WIRE_NAME: SLOW_LINK_PREFIX}, default=None)


@dataclass(frozen=True, slots=True)
class WorkerCounters:
    """All counters received from one worker."""

    training: TrainingCounters | None = None  # None: none received yet
    node: NodeCounters | None = None  # None: none received yet
    unknown: tuple[str, ...] = ()  # names on the wire that this version does not know


def to_wire(counters: WorkerCounters) -> dict[str, float]:
    """Return counters as a flat map of names to numbers, without those in ``counters.unknown``."""
    parts = (counters.training, counters.node)
    return {name: value for part in parts if part for name, value in _flatten(part, "").items()}


def from_wire(encoded: Mapping[str, float]) -> WorkerCounters:
    """Decode a map from ``to_wire``. Never raises: entries that do not fit become unknown names."""
    remaining = dict(encoded)
    training = _pop_record(TrainingCounters, remaining, "")
    node = _pop_record(NodeCounters, remaining, "")
    return WorkerCounters(training, node, tuple(sorted(remaining)))


def merge_records(kind: type[Record], records: Sequence[Record]) -> Record:
    """Combine the records of several workers into one, each field as declared by ``counter``.

    For fields with ``once_per_partition``, only one record of each partition counts; records
    without a partition do not count. Fields without a merge function keep their defaults. ``kind``
    is the records' class.
    """
    merged = {}
    for each in fields(cast(Any, kind)):
        if (merge := each.metadata.get(MERGE)) is not None:
            chosen = _choose_records(records, each.metadata.get(ONCE_PER_PARTITION, False))
            merged[each.name] = merge([getattr(record, each.name) for record in chosen])
    return kind(**merged)


def _choose_records(records: Sequence[Record], rule: bool | str) -> Sequence[Record]:
    """Return the records that count for a field with this value of ``once_per_partition``."""
    if rule is False:
        return records
    counted = [one for one in records if rule is True or getattr(one, rule)]
    last = {getattr(one, "partition", -1): one for one in counted}
    return [one for partition, one in last.items() if partition >= 0]


def sum_link_bytes(node_links: Iterable[LinkBytes]) -> int:
    """Return the bytes sent over network interfaces, summed over nodes and their media drivers.

    The workers of an executor share a media driver, and each of them reports that driver's total;
    the largest value is the most recent and counts once.
    """
    drivers: dict[str, float] = {}
    own = 0.0
    for links in node_links:
        own += links.own
        for name, count in links.drivers.items():
            drivers[name] = max(count, drivers.get(name, 0.0))
    return int(own + sum(drivers.values()))


@dataclass(frozen=True, slots=True)
class _WireField:
    """Describes how one field of a record is encoded."""

    name: str  # the field's name
    wire_name: str  # the field's name on the wire; for a dict or record, a prefix of names
    kind: Any  # type of the field's values: a number or a record
    keys: Any  # for a dict, the type of its keys; otherwise None
    is_required: bool  # whether the field has no default

    @property
    def is_record(self) -> bool:
        """Whether the value is itself a record."""
        return is_dataclass(self.kind)


@cache
def _wire_fields(record: Any) -> tuple[_WireField, ...]:
    """Return how each field of a record class is encoded."""
    hints = get_type_hints(record)
    return tuple(
        _WireField(
            one.name,
            one.metadata.get(WIRE_NAME, one.name),
            *_value_and_key_types(hints[one.name]),
            is_required=one.default is MISSING and one.default_factory is MISSING,
        )
        for one in fields(record)
    )


def _value_and_key_types(hint: Any) -> tuple[Any, Any]:
    """Return the type of a field's values, and for a dict the type of its keys (else None)."""
    if isinstance(hint, UnionType):
        hint = next(kind for kind in get_args(hint) if kind is not type(None))
    if get_origin(hint) is dict:
        keys, kind = get_args(hint)
        return kind, keys
    return hint, None


def _flatten(record: Any, prefix: str) -> dict[str, float]:
    """Return a record's fields as a flat map of numbers, with a prefix before each wire name."""
    encoded: dict[str, float] = {}
    kind: Any = type(record)
    for entry in _wire_fields(kind):
        value, name = getattr(record, entry.name), prefix + entry.wire_name
        if is_dataclass(value):
            encoded |= _flatten(value, name)
        elif entry.keys is not None:
            encoded |= {f"{name}{key}": item for key, item in value.items()}
        elif value is not None:
            encoded[name] = float(value) if isinstance(value, bool) else value
    return encoded


def _pop_record(record: type[Record], remaining: dict[str, float], prefix: str) -> Record | None:
    """Remove a record's entries from ``remaining``; return the decoded record.

    Return None and leave ``remaining`` unchanged if a required field is missing, or all fields are.
    """
    rest, decoded, kind = dict(remaining), dict[str, Any](), cast(Any, record)
    for entry in _wire_fields(kind):
        name = prefix + entry.wire_name
        value: Any
        if entry.is_record:
            value = _pop_record(entry.kind, rest, name)
        elif entry.keys is not None:
            value = _pop_mapping(entry, rest, name)
        else:
            value = _pop_number(entry.kind, rest, name)
        if value is not None:
            decoded[entry.name] = value
        elif entry.is_required:
            return None
    if not any(value != {} for value in decoded.values()):
        return None
    remaining.clear()
    remaining.update(rest)
    return record(**decoded)


def _pop_mapping(entry: _WireField, remaining: dict[str, float], prefix: str) -> dict[Any, Any]:
    """Remove the entries of a dict field from ``remaining``; return the decoded dict."""
    mapping: dict[Any, Any] = {}
    for name in [name for name in remaining if name.startswith(prefix)]:
        key = name.removeprefix(prefix)
        if entry.keys is int and not DECIMAL_KEY.fullmatch(key):
            continue
        value = _pop_number(entry.kind, remaining, name)
        if value is not None:
            mapping[entry.keys(key)] = value
    return mapping


def _pop_number(kind: Any, remaining: dict[str, float], name: str) -> Any:
    """Remove and return a number of type ``kind``; None if it is missing or of another type."""
    value = remaining.get(name)
    if value is None or (kind is not float and not (math.isfinite(value) and value == int(value))):
        return None
    return kind(remaining.pop(name))


@dataclass(frozen=True, slots=True)
class FitTotals:
    """The combined counters of all workers of a fit, including workers that have left."""

    training: TrainingCounters  # combined over all trainers
    node: NodeCounters  # combined over all nodes
    links: tuple[LinkBytes, ...]  # one for each node
    unknown: tuple[str, ...]  # names on the wire that this version does not know

    @classmethod
    def from_counters(cls, counters: Iterable[WorkerCounters]) -> FitTotals:
        """Combine the counters of all workers, each field as declared by ``counter``."""
        workers = list(counters)
        nodes = [worker.node for worker in workers if worker.node is not None]
        trainers = [worker.training for worker in workers if worker.training is not None]
        return cls(
            training=merge_records(TrainingCounters, trainers),
            node=merge_records(NodeCounters, nodes),
            links=tuple(node.links for node in nodes if node.links is not None),
            unknown=tuple(sorted({name for worker in workers for name in worker.unknown})),
        )

    def residual_wait_minibatches(self, workers: int, minibatches: int) -> float:
        """Return the mean delay of learned changes in residuals, in minibatches of the fit.

        By Little's law, a mass waits ``mass_waited / mass_left`` steps of its worker, and during
        each of them the fit trains ``workers`` minibatches. The result is at most ``minibatches``,
        the length of the fit.
        """
        waited, left = self.training.mass_waited, self.training.mass_left
        if not waited:
            return 0.0
        return min(workers * waited / left, float(minibatches)) if left else float(minibatches)
