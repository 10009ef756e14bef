"""Tests of telemetry: the names on the wire, round trips, and unknown names and values."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkstrom.observe.telemetry import (
    EpochFigures,
    LinkBytes,
    NodeCounters,
    ResidualFigures,
    SlowLink,
    TrainingCounters,
    WorkerCounters,
    from_wire,
    sum_link_bytes,
    to_wire,
)

TRAINING = TrainingCounters(
    partition=3,
    attempt=17,
    epoch=2,
    steps=6,
    examples=20,
    loss_sum=1.5,
    loss_weight=3.5,
    last_loss_sum=0.5,
    last_loss_weight=10.0,
    rows_held_out=4,
    spilled_bytes=5,
    fresh_updaters=1,
    publications=7,
    hits=8,
    mass_clipped=0.25,
    mass_scaled_away=0.125,
    mass_left=9.0,
    mass_waited=10.0,
    overflows=11,
    residual_square=16.0,
    tau=0.5,
    seconds={"stepping": 1.25, "waiting": 2.5},
    epochs=EpochFigures(1, 4.0, {0: 2.0, 1: 1.0}),
    residual=ResidualFigures(0.5, 12.0, 0.1, 1.0, 0.2, 0.3, 0.4, 0.6, 0.7),
)
NODE = NodeCounters(
    update_bytes=1000,
    wire_bytes=2000,
    rejected=2,
    round_s=0.75,
    ignored=4,
    links=LinkBytes({"10.0.0.1:7/42": 1500.0, "10.0.0.1:7/43": 30.0}, 20.0),
    slow_link=SlowLink(5, 1.2e6, 9.4e6, 41, True),
)
WHOLE = WorkerCounters(TRAINING, NODE)
NAMES = {
    "partition": 3,
    "attempt": 17,
    "epoch": 2,
    "steps": 6,
    "examples": 20,
    "loss_sum": 1.5,
    "loss_weight": 3.5,
    "last_loss_sum": 0.5,
    "last_loss_weight": 10.0,
    "rows_held_out": 4,
    "spilled_bytes": 5,
    "fresh_updaters": 1,
    "publications": 7,
    "hits": 8,
    "mass_clipped": 0.25,
    "mass_scaled": 0.125,
    "mass_left": 9.0,
    "mass_waited": 10.0,
    "breaches": 11,
    "residual_square": 16.0,
    "tau": 0.5,
    "s_stepping": 1.25,
    "s_waiting": 2.5,
    "finished": 1,
    "held_weight": 4.0,
    "held@0": 2.0,
    "held@1": 1.0,
    "r_tau": 0.5,
    "r_at_least_tau": 12.0,
    "r_mean": 0.1,
    "r_max": 1.0,
    "r_p50": 0.2,
    "r_p95": 0.3,
    "r_p99": 0.4,
    "r_p99.9": 0.6,
    "r_p99.99": 0.7,
    "update_bytes": 1000,
    "wire_bytes": 2000,
    "rejected": 2,
    "round_s": 0.75,
    "ignored": 4,
    "wire_driver 10.0.0.1:7/42": 1500.0,
    "wire_driver 10.0.0.1:7/43": 30.0,
    "wire_own": 20.0,
    "narrow_node": 5,
    "narrow_carries": 1.2e6,
    "narrow_needed": 9.4e6,
    "narrow_behind": 41,
    "narrow_sums": 1.0,
}


def test_counter_names_on_wire_are_fixed() -> None:
    """The names are a protocol between nodes and the driver: a renamed counter would be lost."""
    assert to_wire(WHOLE) == NAMES


def round_trip(counters: WorkerCounters) -> WorkerCounters:
    """Return the counters after a round trip through MessagePack."""
    frame = msgspec.msgpack.encode(to_wire(counters))
    return from_wire(msgspec.msgpack.decode(frame, type=dict[str, float]))


def test_round_trip_keeps_values_and_types() -> None:
    """After a round trip, all counters have the same values and types."""
    back = round_trip(WHOLE)
    assert back == WHOLE
    for made, told in ((back.training, TRAINING), (back.node, NODE)):
        assert made is not None
        for one in fields(told):
            assert type(getattr(made, one.name)) is type(getattr(told, one.name)), one.name


@pytest.mark.parametrize(
    "counters",
    [
        WorkerCounters(),
        WorkerCounters(TrainingCounters(partition=0)),
        WorkerCounters(None, NodeCounters(links=LinkBytes({}, 0.0))),
        WorkerCounters(TRAINING),
        WorkerCounters(TrainingCounters(epochs=EpochFigures(3, 0.0, {})), NODE),
    ],
)
def test_round_trip_adds_no_missing_counters(counters: WorkerCounters) -> None:
    """Counters that a worker did not report are absent after a round trip."""
    assert round_trip(counters) == counters


def test_wire_names_lack_partition_without_training_counters() -> None:
    """The wire names contain no partition if the trainer reported no counters."""
    assert "partition" not in to_wire(WorkerCounters(None, NODE))


def test_unknown_counter_names_are_listed_as_unknown() -> None:
    """Names that no field has are listed in ``unknown`` and not sent again."""
    told = from_wire({**NAMES, "of_tomorrow": 1.0, "held@x": 2.0})
    assert told == WorkerCounters(TRAINING, NODE, ("held@x", "of_tomorrow"))
    assert to_wire(told) == NAMES


@pytest.mark.parametrize(
    ("changes", "unknown"),
    [
        ({"steps": math.nan}, ("steps",)),
        ({"steps": math.inf}, ("steps",)),
        ({"steps": 0.5}, ("steps",)),
        ({"held@" + "9" * 5000: 1.0}, ("held@" + "9" * 5000,)),
        ({"held@-1": 1.0}, ("held@-1",)),
    ],
)
def test_invalid_counter_values_are_listed_as_unknown(changes: Any, unknown: Any) -> None:
    """A name whose value no field can hold is listed in ``unknown``."""
    told = from_wire({**NAMES, **changes})
    assert told.unknown == unknown
    assert told.training is not None
    assert told.training.examples == TRAINING.examples


def test_incomplete_record_is_none_and_listed_as_unknown() -> None:
    """If a name of a record is missing, the record is None and its other names are ``unknown``."""
    names = {name: value for name, value in NAMES.items() if name != "narrow_needed"}
    told = from_wire(names)
    assert told.node is not None
    assert told.node.slow_link is None
    assert told.unknown == ("narrow_behind", "narrow_carries", "narrow_node", "narrow_sums")


@given(
    st.dictionaries(
        st.one_of(st.text(), st.sampled_from(sorted(NAMES)), st.just("held@01")), st.floats()
    )
)
def test_each_received_name_is_read_or_listed_as_unknown(told: dict[str, float]) -> None:
    """Each name of an arbitrary dictionary is either read into a field or listed in ``unknown``."""
    made = from_wire(told)
    known = to_wire(made)
    assert set(made.unknown) <= told.keys()
    for name in told.keys() - set(made.unknown):
        read = bool(told[name]) if name == "narrow_sums" else told[name]
        assert known[name] == pytest.approx(read, nan_ok=True)


def test_bytes_of_shared_media_driver_count_once() -> None:
    """The bytes of a media driver, which several workers report, count once (the maximum)."""
    here, beside = LinkBytes({"a": 1000.0}, 10.0), LinkBytes({"a": 1500.0}, 20.0)
    elsewhere = LinkBytes({"b": 300.0}, 5.0)
    assert sum_link_bytes([here, beside, elsewhere]) == 1500 + 300 + 10 + 20 + 5
    assert sum_link_bytes([]) == 0
