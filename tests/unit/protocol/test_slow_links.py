"""Tests of slow links, which carry less than training produces: when and how they are reported."""

from __future__ import annotations

from typing import Any

from sparkstrom.observe.telemetry import NodeCounters, SlowLink, WorkerCounters, from_wire, to_wire
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.flow_control import NARROW_S, Backlog, describe_slow_link
from sparkstrom.protocol.common.stages import REPLICATE, SNAPSHOT
from tests.unit.protocol.effect_filters import every
from tests.unit.protocol.parents import ONE

WIDE = 1e9  # bytes per second


def reported_rates(backlog: Backlog, waits: list[bool], carries: float = 0.0) -> list[float]:
    """Observe a backlog each second while training makes 100 bytes/s; return reported rates."""
    looks = [
        backlog.observe(wait, 100 * second, carries, float(second))
        for second, wait in enumerate(waits)
    ]
    return [needed for needed in looks if needed is not None]


def test_link_behind_for_longer_than_narrow_s_is_reported_once() -> None:
    """A link is reported once, after data have waited for it for longer than NARROW_S."""
    assert reported_rates(Backlog(), [True] * int(NARROW_S)) == []
    assert reported_rates(Backlog(), [True] * 60) == [100.0]


def test_link_that_catches_up_is_not_reported() -> None:
    """A link that catches up every few seconds is not reported."""
    assert reported_rates(Backlog(), [True, True, True, False] * 20) == []


def test_link_that_carries_enough_is_not_reported() -> None:
    """A link that carries enough is not reported as slow: the cause is its other end."""
    assert reported_rates(Backlog(), [True] * 60, carries=WIDE) == []


def test_slow_link_text_names_node_rates_and_staleness() -> None:
    """The sentence about a slow link names node, host, both rates and the staleness."""
    narrow = SlowLink(3, 1.2e6, 9.4e6, 41, True)
    assert describe_slow_link(narrow, "host7") == (
        "the link to node 3 (host7) carries 1.2 MB/s, training would fill 9.4: "
        "updates are summed, staleness 41"
    )
    assert "carries 0.041 MB/s, training would fill 12" in describe_slow_link(
        SlowLink(3, 41_200, 12.3e6, 4, True), "h"
    )
    assert "updates are delayed" in describe_slow_link(
        SlowLink(3, 1.2e6, 9.4e6, 41, False), "host7"
    )


def test_slow_link_survives_encoding_of_counters() -> None:
    """A slow link survives the encoding and decoding of a worker's counters."""
    narrow = SlowLink(3, 1.2e6, 9.4e6, 41, True)
    assert (
        from_wire({"steps": 1.0} | to_wire(make_slow_link_counters(narrow))).node
        == make_slow_link_counters(narrow).node
    )


def find_slow_links_of_slow_child(parent: Any, **said: Any) -> list[SlowLink]:
    """Let a child take one commit per second while five are made; return the slow links."""
    for second in range(2 * int(NARROW_S)):
        parent.now_s, head = float(second), parent.history.log.head
        parent.append(*(parent.make.committed(head + i, count=1000) for i in range(1, 6)))
        parent.report(second, bytes_received=ONE * second, **said)
        parent.children.tick(parent.make.state(), parent.now_s)
    found: list[SlowLink] = parent.children.slow_links
    return found


def test_parent_records_slow_link_of_slow_child(parent_with: Any) -> None:
    """A parent records the slow link of a child that takes less than training makes."""
    parent = parent_with(window_bytes=ONE)
    parent.attach()
    (narrow,) = find_slow_links_of_slow_child(parent)
    assert narrow.node == 5
    assert 0 < narrow.carries < narrow.needed
    assert narrow.behind > 5 * NARROW_S / 2


def test_child_that_fetches_snapshot_has_no_slow_link(parent_with: Any) -> None:
    """A child's link does not count as slow while the child fetches a snapshot."""
    parent = parent_with(window_bytes=ONE)
    parent.attach(whole=False, catching=True)
    assert parent.child().stage is SNAPSHOT
    assert find_slow_links_of_slow_child(parent, catching=True) == []
    assert len(find_slow_links_of_slow_child(parent)) == 1
    assert parent.child().stage is REPLICATE


def make_slow_link_counters(slow: SlowLink) -> WorkerCounters:
    """Return counters that contain this slow link."""
    return WorkerCounters(node=NodeCounters(slow_link=slow))


def test_master_notes_slow_link_once_instead_of_lagging_worker(master: Any) -> None:
    """The master notes each slow link once, and then does not also note its worker as lagging."""
    master.running()
    narrow = to_wire(make_slow_link_counters(SlowLink(1, 1.2e6, 9.4e6, 41, True)))
    (note,) = every(master.say(1, stats=narrow, lag=64), ev.Note)
    assert note.text.startswith("the link to node 1 (h) carries 1.2 MB/s")
    assert every(master.say(1, stats={**narrow, "loss": 1.0}, lag=4096), ev.Note) == []


def test_relay_reports_newest_slow_link_in_its_counters(node: Any) -> None:
    """A relay reports its newest slow link as part of its counters."""
    node.training()
    node.me.children.slow_links.append(SlowLink(3, 1.0, 2.0, 4, False))
    node.machine.set_counters(WorkerCounters(node=NodeCounters(wire_bytes=7)))
    assert from_wire(node.me.trainer.stats).node == NodeCounters(
        wire_bytes=7, round_s=0.0, slow_link=SlowLink(3, 1.0, 2.0, 4, False)
    )
