"""Tests of commits with model buffers, which are averages, and of notes about lagging nodes."""

from __future__ import annotations

from typing import Any

from sparkstrom.codec.messages import BUFFERS, Commit, Payload
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.master.statuses import LAG_LEAST
from tests.unit.protocol.effect_filters import every, only, sent
from tests.unit.protocol.parents import ONE


def test_buffer_average_is_applied_before_own_commit_counts(node: Any, make: Any) -> None:
    """The average is applied before the commit counts: a chunk may be read between the two."""
    node.training()
    node.step(ev.UpdatePublished(Payload(BUFFERS, 0, 0, b"mine"), 0, 0, 1, 1))
    average = make.committed(1, 1, b"ours", form=BUFFERS)
    assert node.hear(average)[:2] == [ev.ApplyCommit(average), ev.OwnCommitted(1)]


def test_master_commits_average_of_newest_buffers_of_partitions(master: Any, make: Any) -> None:
    """The master commits the average of the newest buffers of all partitions."""
    master.running()
    master.machine.order._average = b"+".join
    commits = [
        every(master.hear(node, make.update(node, seq, payload, form=BUFFERS)), ev.ApplyCommit)[0]
        for node, seq, payload in ((2, 1, b"b"), (1, 1, b"a"), (2, 2, b"c"))
    ]
    assert [deliver.update.payload.data for deliver in commits] == [b"b", b"a+b", b"a+c"]


def test_sum_of_commits_ends_before_commit_with_buffers(parent_with: Any, make: Any) -> None:
    """A sum ends before a commit with buffers: inside a sum, the buffers would be lost."""
    parent = parent_with(window_bytes=ONE)
    average = make.committed(4, form=BUFFERS)
    parent.attach()
    parent.commit()
    parent.commit(2)
    parent.append(average)
    parent.commit(3)
    merged = only(parent.report(1), ev.SendMerged)
    assert (merged.after, merged.commit) == (1, 3)
    assert sent(parent.report(3), Commit) == [average]


def notes(master: Any, node: int, lag: int) -> list[str]:
    """Return the notes that follow from a status of ``node`` with this lag."""
    return [note.text for note in every(master.say(node, lag=lag), ev.Note)]


def test_lagging_node_is_noted_again_when_lag_is_fourfold(master: Any) -> None:
    """A node that lags by LAG_LEAST commits is noted, and again when the lag is fourfold."""
    master.running()
    assert notes(master, 1, LAG_LEAST // 2) == []
    assert [text.split(": ")[0] for text in notes(master, 1, LAG_LEAST)] == [
        "node 1 (partition 0 on h) is slow"
    ]
    assert notes(master, 1, 2 * LAG_LEAST) == []
    assert len(notes(master, 1, 4 * LAG_LEAST)) == 1
