"""Tests of small parts of the master: leases, partitions, residual files, members, sequencer."""

from __future__ import annotations

from typing import Any

import pytest

from sparkstrom.base.identity import Position
from sparkstrom.codec.messages import Activity, ResidualCheckpoint
from sparkstrom.protocol.common.children import Leases
from sparkstrom.protocol.common.events_and_effects import IgnoredMessages, IgnoreReason
from sparkstrom.protocol.master.commit_sequencer import Sequencer
from sparkstrom.protocol.master.members import Partition, Partitions, ResidualCheckpoints

LEASE_S = 10.0


# -- leases --------------------------------------------------------------------------------------


def tick_until_lease_expires(
    leases: Leases, until_s: float, from_s: float = 0.0
) -> list[tuple[int, float]]:
    """Check the leases every second until one expires; return (node, seconds of silence)."""
    lost: list[tuple[int, float]] = []
    now_s = from_s
    while now_s < until_s and not lost:
        now_s += 1.0
        lost = leases.expire(now_s)
    return lost


def test_node_silent_for_longer_than_lease_is_lost() -> None:
    """A node is lost once it has been silent for longer than a lease."""
    leases = Leases(LEASE_S, 0.0)
    leases.renew(1, 0.0)
    leases.renew(2, 5.0)
    assert tick_until_lease_expires(leases, 30.0) == [(1, 11.0)]
    leases.drop(1)
    assert tick_until_lease_expires(leases, 30.0, 11.0) == [(2, 11.0)]


@pytest.mark.parametrize("slept_s", [11.0, 60.0])
def test_process_pause_renews_all_leases(slept_s: float) -> None:
    """A process that did not run for longer than a lease renews all leases first."""
    leases = Leases(LEASE_S, 0.0)
    leases.renew(1, 0.0)
    assert leases.expire(slept_s) == []
    assert tick_until_lease_expires(leases, slept_s + 30.0, slept_s) == [(1, 11.0)]


# -- partitions ------------------------------------------------------------------------------------


def test_positions_only_grow() -> None:
    partition = Partition(0, 2)
    partition.advance(Position(1, 1))
    partition.advance(Position(0, 5))
    assert partition.position == Position(1, 1)


def test_minibatches_are_counted_through_all_epochs() -> None:
    partition = Partition(0, 2)
    assert partition.record_or_compare_rows(7, 5, 3)
    partition.advance(Position(1, 2))
    assert partition.minibatches == 5
    assert not partition.trained
    partition.advance(partition.end)
    assert (partition.minibatches, partition.trained) == (6, True)


def test_an_unread_partition_is_not_trained_and_an_empty_one_is() -> None:
    """A partition that nobody has read counts as not trained, and an empty one as trained."""
    partition = Partition(0, 2)
    assert not partition.trained
    assert partition.record_or_compare_rows(0, 0, 0)
    assert (partition.trained, partition.minibatches) == (True, 0)


def test_epoch_is_finished_once_every_partition_has_finished_it() -> None:
    """An epoch is finished once every partition with rows, or not yet read, has finished it."""
    first, second, empty = whole = Partitions(Partition(index, 3) for index in range(3))
    first.record_or_compare_rows(7, 5, 3)
    empty.record_or_compare_rows(0, 0, 0)
    first.advance(Position(2, 1))
    assert whole.epochs_finished == 0  # nobody has read the second
    second.record_or_compare_rows(7, 5, 3)
    second.advance(Position(1, 2))
    assert whole.epochs_finished == 1


@pytest.mark.parametrize("other", [(8, 5, 3), (7, 6, 3), (7, 5, 4)])
def test_changed_rows_or_checksum_are_detected(other: tuple[int, int, int]) -> None:
    """A different number of rows or minibatches, or another checksum, is detected."""
    partition = Partition(0, 2)
    assert partition.record_or_compare_rows(7, 5, 3)
    assert partition.record_or_compare_rows(7, 5, 3)
    assert not partition.record_or_compare_rows(*other)


# -- checkpoints -----------------------------------------------------------------------------------


def test_each_file_is_granted_once_on_its_own_executor() -> None:
    checkpoints = ResidualCheckpoints({"e": {"f1": 1.0, "f2": 2.0}, "other": {"g": 4.0}})
    for node in (1, 2, 3):
        checkpoints.grant("e", node)
    assert [checkpoints.grants_of(node) for node in (1, 2, 3)] == [("f1",), ("f2",), ()]
    assert checkpoints.granted_files == 2


def test_unused_residual_files_count_as_lost_mass_once() -> None:
    """Files that were not granted, or whose owner did not use them, count as lost mass, once."""
    checkpoints = ResidualCheckpoints({"e": {"f1": 1.0, "f2": 2.0}, "other": {"g": 4.0}})
    checkpoints.grant("e", 1)
    checkpoints.grant("e", 2)
    checkpoints.mark_grants_used(1)
    checkpoints.count_lost()
    assert checkpoints.lost_mass == 2.0 + 4.0
    checkpoints.count_lost()
    assert checkpoints.lost_mass == 2.0 + 4.0


def test_granted_file_follows_process_to_new_id() -> None:
    """A granted file follows its process to a new id."""
    checkpoints = ResidualCheckpoints({"e": {"f1": 1.0}})
    checkpoints.grant("e", 1)
    checkpoints.transfer_grant(1, 5)
    checkpoints.transfer_grant(2, 5)
    assert (checkpoints.grants_of(1), checkpoints.grants_of(5)) == ((), ("f1",))
    checkpoints.mark_grants_used(5)
    checkpoints.count_lost()
    assert checkpoints.lost_mass == 0.0


def test_residual_files_are_recorded_by_executor() -> None:
    """Files that workers left are recorded by executor; the newest record of a file counts."""
    checkpoints = ResidualCheckpoints({})
    checkpoints.record("e", 1, ResidualCheckpoint("p", 1.5))
    checkpoints.record(
        "e", 1, ResidualCheckpoint("p", 2.5)
    )  # reported again, or saved again at the audit
    checkpoints.record("e", 1, None)
    assert checkpoints.files == {"e": {"p": 2.5}}


def test_granted_file_is_not_lost_if_owner_saved_its_residual() -> None:
    """A granted file is not lost if its owner saved its residual, which contains the file."""
    checkpoints = ResidualCheckpoints({"e": {"f1": 1.0, "f2": 2.0}})
    checkpoints.grant("e", 1)
    checkpoints.grant("e", 2)
    checkpoints.record("e", 1, ResidualCheckpoint("p", 1.5))
    checkpoints.record("e", 2, None)
    checkpoints.count_lost()
    assert checkpoints.lost_mass == 2.0


# -- members ---------------------------------------------------------------------------------------


def test_slowest_counts_only_training_workers(master: Any) -> None:
    """``slowest`` counts only workers that train; without any, it keeps its value."""
    master.running()
    members = master.machine.members
    assert members.slowest == 0
    master.say(1, steps=4, activity=Activity.STEPPING)
    master.say(2, steps=2, activity=Activity.STEPPING)
    assert members.slowest == 2
    master.say(2, steps=3, activity=Activity.FINISHED)
    master.tick()
    assert members.slowest == 4
    master.say(1, steps=5, activity=Activity.FINISHED)
    master.tick()
    assert members.slowest == 5, "without a worker that trains it stays"


def test_slowest_rises_when_last_slowest_worker_advances(master: Any) -> None:
    """``slowest`` rises when the last of the slowest workers advances."""
    master.running()
    members = master.machine.members
    first, second = members.live.values()
    for steps, slowest in ((1, 0), (2, 0)):
        members.advance(first, steps)
        assert members.slowest == slowest
    members.advance(second, 1)
    assert members.slowest == 1
    members.advance(second, 3)
    assert members.slowest == 2


def test_finished_or_evicted_workers_do_not_count_as_training(master: Any) -> None:
    """Live workers that have a replica and are not finished count as training."""
    master.running()
    assert master.machine.members.count_training() == 2
    master.say(1, steps=4, activity=Activity.STEPPING)
    master.say(2, steps=3, activity=Activity.FINISHED)
    assert master.machine.members.count_training() == 1
    master.evict(1)
    assert master.machine.members.count_training() == 0


def test_overtaken_status_lowers_neither_steps_nor_activity(master: Any, make: Any) -> None:
    """An overtaken status lowers neither steps nor activity, and FINISHED is final."""
    master.running()
    old = make.status(1, count=1, steps=0, activity=Activity.CATCHING_UP)
    master.say(1, steps=4, activity=Activity.STEPPING)
    master.hear(1, make.report(old))
    member = master.member(1)
    assert (member.steps, member.activity) == (4, Activity.STEPPING)
    master.say(1, steps=6, activity=Activity.FINISHED)
    master.say(1, steps=5, activity=Activity.STEPPING)  # as a worker that has returned reports
    assert (member.steps, member.activity) == (6, Activity.FINISHED)


# -- the sequencer ---------------------------------------------------------------------------------


def test_updates_are_numbered_once_in_order_of_each_origin(make: Any) -> None:
    """Updates are numbered once, in each origin's order; all others are ignored."""
    sequencer = Sequencer(10**6, IgnoredMessages())
    sequencer.admit(1)
    sequencer.admit(2)
    order = [(1, 1), (2, 1), (1, 1), (1, 3), (1, 2), (1, 3), (3, 1)]
    commits = [sequencer.number(make.update(*key)) for key in order]
    assert [c and (c.commit, c.origin, c.seq) for c in commits] == [
        (1, 1, 1), (2, 2, 1), None, None, (3, 1, 2), (4, 1, 3), None,
    ]  # fmt: skip
    assert sequencer._ignored.counts == {
        ("Update", reason): 1
        for reason in (IgnoreReason.LATE, IgnoreReason.EARLY, IgnoreReason.CLOSED)
    }
    assert [c.commit for c in sequencer.history.log.entries_after(0)] == [1, 2, 3, 4]


def test_updates_of_closed_id_are_not_numbered(make: Any) -> None:
    """Updates of a closed id get no number, and the id cannot be admitted again."""
    sequencer = Sequencer(10**6, IgnoredMessages())
    sequencer.admit(1)
    sequencer.number(make.update(1, 1))
    assert sequencer.close(1) == 1
    assert sequencer.number(make.update(1, 2)) is None
    with pytest.raises(AssertionError, match="never reused"):
        sequencer.admit(1)


def test_updates_after_final_commit_are_not_numbered(make: Any) -> None:
    sequencer = Sequencer(10**6, IgnoredMessages())
    sequencer.admit(1)
    sequencer.frozen = True
    assert sequencer.number(make.update(1, 1)) is None
    assert sequencer._ignored.counts == {("Update", IgnoreReason.LATE): 1}


def test_staleness_counts_the_commits_of_others(make: Any) -> None:
    """An update's staleness is the number of other workers' commits that it had not seen."""
    sequencer = Sequencer(10**6, IgnoredMessages())
    sequencer.admit(1)
    sequencer.admit(2)
    for origin, seq, seen in ((1, 1, 0), (1, 2, 0), (2, 1, 0), (1, 3, 2)):
        sequencer.number(make.update(origin, seq, seen=seen))
    assert sequencer.staleness == {0: 2, 2: 1, 1: 1}
