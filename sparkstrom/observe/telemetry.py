"""Telemetry: what a worker tells of itself, as typed values, all of them cumulative.

It travels as a flat map of names to floats, which relays hand on as it is. That map is made and
taken apart here and nowhere else. A name that no field has, or whose value no field takes, is kept
by name, so that whoever hears it can count and tell it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

Record = TypeVar("Record")

TOLD = "told"  # a field's name in the map; of a mapping or a record, what its names begin with
DECIMAL = re.compile("0|[1-9][0-9]{0,8}")
NARROW = "narrow_"  # before the figures of a link that is too slow


@dataclass(frozen=True, slots=True)
class EpochFigures:
    """What a partition has measured at its newest epochs' ends."""

    finished: int  # the newest, from 0 in this fit
    held_weight: float  # of the rows held out; 0: none are
    held_sums: dict[int, float] = field(metadata={TOLD: "held@"}, default_factory=dict)  # by epoch
    loss_sums: dict[int, float] = field(metadata={TOLD: "loss@"}, default_factory=dict)  # likewise
    examples: dict[int, int] = field(metadata={TOLD: "examples@"}, default_factory=dict)


@dataclass(frozen=True, slots=True)
class ResidualFigures:
    """Absolute values of a residual, in parameter units."""

    tau: float
    at_least_tau: float  # how many entries
    mean: float
    max: float
    p50: float
    p95: float
    p99: float
    p99_9: float = field(metadata={TOLD: "p99.9"})
    p99_99: float = field(metadata={TOLD: "p99.99"})

    def by_name(self) -> dict[str, float]:
        """As people read them."""
        return _flat(self, "")


@dataclass(frozen=True, slots=True)
class TrainingCounters:
    """What a worker's trainer did. Masses are sums of absolute values."""

    partition: int = -1
    attempt: int = 0  # of the task
    epoch: int = 0  # it is in
    steps: int = 0
    examples: int = 0
    loss_sum: float = 0.0  # examples x mean loss
    last_loss_sum: float = 0.0  # of the last finished epoch
    last_examples: int = 0
    rows_held_out: int = 0
    spilled_bytes: int = 0
    fresh_updaters: int = 0  # joined late, and nobody lent it an updater's state in time
    publications: int = 0
    hits: int = 0  # entries sent
    mass_clipped: float = 0.0
    mass_scaled_away: float = field(metadata={TOLD: "mass_scaled"}, default=0.0)
    mass_left: float = 0.0  # the residual, sent or not
    mass_waited: float = 0.0  # in the residual: mass x own steps
    overflows: int = field(metadata={TOLD: "breaches"}, default=0)  # beyond the exact range
    residual_square: float | None = None  # Euclidean norm squared; told at the end only
    tau: float | None = None  # once something was published
    seconds: dict[str, float] = field(metadata={TOLD: "s_"}, default_factory=dict)  # by activity
    epochs: EpochFigures | None = field(metadata={TOLD: ""}, default=None)  # once one is finished
    residual: ResidualFigures | None = field(
        metadata={TOLD: "r_"}, default=None
    )  # encoding_debug_mode


@dataclass(frozen=True, slots=True)
class LinkBytes:
    """What left the interfaces, over one media driver after another."""

    drivers: dict[str, float] = field(
        metadata={TOLD: "wire_driver "}
    )  # by name: all that each has sent
    own: float = field(metadata={TOLD: "wire_own"})  # what one node adds for its own frames


NO_BYTES = LinkBytes({}, 0.0)


@dataclass(frozen=True, slots=True)
class SlowLink:
    """A link that is too slow. Rates in bytes per second."""

    node: int  # at its lower end
    carries: float
    needed: float
    behind: int  # commits that wait, or are on their way
    sums: bool  # some of them go as sums


@dataclass(frozen=True, slots=True)
class NodeCounters:
    """What a worker's node did."""

    update_bytes: int = 0  # sealed updates of its own
    wire_bytes: int = 0  # handed over to be sent
    by_kind: dict[str, int] = field(metadata={TOLD: "kind_"}, default_factory=dict)  # of these
    rejected: int = 0  # frames of strangers, and damaged ones
    round_s: float | None = None  # an update's way to its commit
    ignored: int = 0  # messages that its machine did not act on
    links: LinkBytes | None = field(metadata={TOLD: ""}, default=None)
    slow_link: SlowLink | None = field(metadata={TOLD: NARROW}, default=None)  # the newest below it


@dataclass(frozen=True, slots=True)
class WorkerCounters:
    """What one worker has told."""

    training: TrainingCounters | None = None  # None: its trainer has said nothing yet
    node: NodeCounters | None = None
    unknown: tuple[str, ...] = ()  # names that nobody here knows


def to_wire(counters: WorkerCounters) -> dict[str, float]:
    """The flat map. What is unknown is not handed on: it was not said by this program."""
    parts = (counters.training, counters.node)
    return {name: value for part in parts if part for name, value in _flat(part, "").items()}


def from_wire(told: Mapping[str, float]) -> WorkerCounters:
    """What ``to_wire`` made of it; never fails, whatever comes in."""
    left = dict(told)
    training, node = _take(TrainingCounters, left, ""), _take(NodeCounters, left, "")
    return WorkerCounters(training, node, tuple(sorted(left)))


def bytes_on_links(told: Iterable[LinkBytes]) -> int:
    """All that left, of what all nodes told: each media driver once, what each node adds.

    All workers of an executor share a media driver, and each tells the counter of all: the largest
    is the newest.
    """
    drivers: dict[str, float] = {}
    own = 0.0
    for links in told:
        own += links.own
        for name, count in links.drivers.items():
            drivers[name] = max(count, drivers.get(name, 0.0))
    return int(own + sum(drivers.values()))


# -- fields and names ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a field stands in the map."""

    name: str  # of the field
    told: str
    kind: Any  # of its value: a number's type, or a record's
    keys: Any  # of a mapping's; None: it is none
    is_needed: bool

    @property
    def is_record(self) -> bool:
        return is_dataclass(self.kind)


@cache
def _entries(record: Any) -> tuple[_Entry, ...]:
    hints = get_type_hints(record)
    return tuple(
        _Entry(
            one.name,
            one.metadata.get(TOLD, one.name),
            *_kind_of(hints[one.name]),
            is_needed=one.default is MISSING and one.default_factory is MISSING,
        )
        for one in fields(record)
    )


def _kind_of(hint: Any) -> tuple[Any, Any]:
    """Type of the value, and of the keys where it is a mapping."""
    if isinstance(hint, UnionType):
        hint = next(kind for kind in get_args(hint) if kind is not type(None))
    if get_origin(hint) is dict:
        keys, kind = get_args(hint)
        return kind, keys
    return hint, None


def _flat(record: Any, begins: str) -> dict[str, float]:
    told: dict[str, float] = {}
    kind: Any = type(record)
    for entry in _entries(kind):
        value, name = getattr(record, entry.name), begins + entry.told
        if is_dataclass(value):
            told |= _flat(value, name)
        elif entry.keys is not None:
            told |= {f"{name}{key}": one for key, one in value.items()}
        elif value is not None:
            told[name] = float(value) if isinstance(value, bool) else value
    return told


def _take(record: type[Record], left: dict[str, float], begins: str) -> Record | None:
    """Move what belongs to a record out of ``left``; None, and nothing, where it is incomplete."""
    rest, found, kind = dict(left), dict[str, Any](), cast(Any, record)
    for entry in _entries(kind):
        name = begins + entry.told
        value: Any
        if entry.is_record:
            value = _take(entry.kind, rest, name)
        elif entry.keys is not None:
            value = _take_mapping(entry, rest, name)
        else:
            value = _take_number(entry.kind, rest, name)
        if value is not None:
            found[entry.name] = value
        elif entry.is_needed:
            return None
    if not any(value != {} for value in found.values()):
        return None
    left.clear()
    left.update(rest)
    return record(**found)


def _take_mapping(entry: _Entry, left: dict[str, float], begins: str) -> dict[Any, Any]:
    mapping: dict[Any, Any] = {}
    for name in [name for name in left if name.startswith(begins)]:
        key = name.removeprefix(begins)
        if entry.keys is int and not DECIMAL.fullmatch(key):
            continue
        value = _take_number(entry.kind, left, name)
        if value is not None:
            mapping[entry.keys(key)] = value
    return mapping


def _take_number(kind: Any, left: dict[str, float], name: str) -> Any:
    """None where there is none, or none that this field can hold, which then stays."""
    value = left.get(name)
    if value is None or (kind is not float and not (math.isfinite(value) and value == int(value))):
        return None
    return kind(left.pop(name))
