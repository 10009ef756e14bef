"""The master's machine: numbering, feeding, phases, evictions and the end of a fit."""

from __future__ import annotations

from typing import Any

import pytest

from sparkstrom.base.identity import Position
from sparkstrom.codec.messages import (
    Activity,
    Again,
    AskAfter,
    AskChunk,
    AuditAnswer,
    Behind,
    Closed,
    Committed,
    Failed,
    Final,
    Kept,
    Leaving,
    Message,
    Phase,
    Refused,
    Release,
    State,
    Stats,
    Welcome,
)
from sparkstrom.protocol import events as ev


def told(effects: list[ev.Effect], node: int, kind: type[Message]) -> list[Any]:
    messages = [e.message for e in effects if isinstance(e, ev.Send) and e.to == node]
    return [message for message in messages if isinstance(message, kind)]


def every(effects: list[ev.Effect], kind: type[Any]) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]


def answers(effects: list[ev.Effect]) -> list[Any]:
    return [effect.message for effect in every(effects, ev.Answer)]


# -- updates -----------------------------------------------------------------------------------


def test_an_update_goes_to_all_and_its_origin_gets_the_number(master: Any, make: Any) -> None:
    master.running()
    effects = master.hear(1, make.update(1, 1))
    assert every(effects, ev.Deliver)[0].update.commit == 1
    (mine,) = told(effects, 1, Committed)
    (others,) = told(effects, 2, Committed)
    assert (mine.commit, mine.origin, mine.seq, mine.payload) == (1, 1, 1, b"")
    assert others.payload == b"abcd"


def test_after_a_gap_the_origin_is_asked_once_for_a_while(master: Any, make: Any) -> None:
    master.running()
    assert told(master.hear(1, make.update(1, 2)), 1, Again) == [Again(0)]
    assert told(master.hear(1, make.update(1, 3)), 1, Again) == []
    master.hear(1, make.update(1, 1))
    assert told(master.hear(1, make.update(1, 3), 0.1), 1, Again) == [Again(1)]


def test_a_repeat_is_neither_numbered_nor_asked_for(master: Any, make: Any) -> None:
    master.running()
    master.hear(1, make.update(1, 1))
    assert master.hear(1, make.update(1, 1)) == []
    assert master.fit.sequencer.head == 1


def test_nobody_sends_for_another(master: Any, make: Any) -> None:
    master.running()
    assert master.hear(2, make.update(1, 1)) == []
    assert master.fit.sequencer.dropped == {"not its own": 1}


def test_a_stranger_moves_a_counter(master: Any, make: Any) -> None:
    master.running()
    assert master.hear(77, make.report()) == []
    assert master.fit.sequencer.dropped == {"stranger": 1}


def test_whoever_asks_is_sent_what_follows(master: Any, make: Any) -> None:
    master.running()
    for seq in (1, 2):
        master.hear(1, make.update(1, seq))
    commits = told(master.hear(2, AskAfter(0)), 2, Committed)
    assert [committed.commit for committed in commits] == [1, 2]
    assert master.hear(2, AskAfter(9)) == []  # nobody can have that


def test_what_the_log_no_longer_holds_takes_a_snapshot(master_with: Any, make: Any) -> None:
    master = master_with(log_bytes=1).running()
    for seq in (1, 2, 3):
        master.hear(1, make.update(1, seq))
    assert told(master.hear(1, AskAfter(0)), 1, Behind) == [Behind(3, 1, [(1, 3)])]
    assert every(master.hear(1, AskChunk(0)), ev.SendChunk) == [ev.SendChunk(1, 0)]
    assert every(master.hear(1, AskChunk(1)), ev.SendChunk) == []
    following = told(master.hear(2, make.update(2, 1)), 1, Committed)
    assert [committed.commit for committed in following] == [4]


def test_what_is_not_acknowledged_is_sent_again(master: Any, make: Any) -> None:
    master.running()
    master.hear(1, make.update(1, 1))
    assert told(master.tick(0.1), 2, Committed) == []
    assert [c.commit for c in told(master.tick(0.2), 2, Committed)] == [1]
    master.hear(2, make.report(received=1))
    assert told(master.tick(1.0), 2, Committed) == []


# -- positions ---------------------------------------------------------------------------------


def position(master: Any, partition: int = 0) -> Position:
    found: Position = master.fit.partitions[partition].position
    return found


def test_a_position_counts_with_the_update_that_it_came_with(master: Any, make: Any) -> None:
    master.running()
    master.hear(1, make.update(1, 1, batch=2))
    assert position(master) == (0, 2)


def test_a_reported_position_waits_for_its_update(master: Any, make: Any) -> None:
    master.running()
    master.hear(1, make.report(after_seq=1, batch=2))
    assert position(master) == (0, 0)
    master.hear(1, make.update(1, 1, batch=1))
    assert position(master) == (0, 2)


def test_an_older_report_takes_no_newer_position_away(master: Any, make: Any) -> None:
    master.running()
    master.hear(1, make.report(after_seq=2, batch=2))
    master.hear(1, make.report(after_seq=1, batch=1))
    master.hear(1, make.update(1, 1, batch=1))
    assert position(master) == (0, 1)
    master.hear(1, make.update(1, 2, batch=2))
    assert position(master) == (0, 2)


def test_a_pending_position_is_dropped_with_its_id(master: Any, make: Any) -> None:
    master.running()
    master.hear(1, make.report(after_seq=1, batch=2))
    master.evict(1)
    welcome = told(master.join(0, attempt=50, token=7), 3, Welcome)[0]
    assert (welcome.epoch, welcome.batch) == (0, 0)
    assert position(master) == (0, 0)


def test_a_report_of_an_older_edge_is_dropped(master: Any, make: Any) -> None:
    master.running()
    master.join(0, edge=2)
    master.hear(1, make.report(edge=1, batch=2))
    assert position(master) == (0, 0)


# -- losing and returning ----------------------------------------------------------------------


def test_a_silent_node_is_evicted_and_noted(master: Any) -> None:
    effects = master.running().evict(1)
    assert every(effects, ev.CloseEdge) == [ev.CloseEdge(1)]
    assert every(effects, ev.Note)[0].text.startswith("node 1 (partition 0 on h) left: silent for")
    assert master.fit.members.departures[0].node == 1


def test_an_evicted_process_is_told_and_comes_back_under_another_id(master: Any, make: Any) -> None:
    master.running()
    master.hear(1, make.update(1, 1))
    master.evict(1)
    (closed,) = answers(master.join(0))
    assert (closed.node, closed.seq, closed.free) == (1, 1, True)
    (welcome,) = told(master.join(0, count=2, edge=2, have=1, has_replica=True), 3, Welcome)
    assert (welcome.snapshot, welcome.base) == (False, 1)
    assert welcome.closed == [(1, 1)]
    assert welcome.last == [(1, 1), (3, 0)]
    assert master.hear(1, make.update(1, 2)) == []  # nothing of the old id is numbered


def test_a_returner_gets_the_numbers_of_its_old_ids(master: Any, make: Any) -> None:
    master.running()
    master.hear(1, make.update(1, 1))
    master.evict(1)
    effects = master.join(0, count=2, edge=2, have=0, has_replica=True)
    effects += master.tick()
    assert [(c.origin, c.payload) for c in told(effects, 3, Committed)] == [(1, b"")]


def test_a_process_whose_partition_was_taken_over_fails(master: Any) -> None:
    master.running().evict(1)
    assert told(master.join(0, attempt=50, token=7), 3, Welcome)
    (refused,) = answers(master.join(0, count=2, edge=2, have=0, has_replica=True))
    assert (refused.fatal, refused.reason[:15]) == (True, "another attempt")


def test_a_higher_attempt_closes_a_live_owner(master: Any) -> None:
    effects = master.running().join(0, attempt=50, token=7)
    assert every(effects, ev.CloseEdge) == [ev.CloseEdge(1)]
    assert told(effects, 3, Welcome)
    (refused,) = answers(master.join(0))
    assert refused.fatal


def test_a_join_from_before_a_return_is_ignored(master: Any) -> None:
    master.running().evict(1)
    master.join(0, count=2, edge=2)
    assert master.join(0) == []
    assert 3 in master.fit.members.live


def test_the_same_join_gets_the_same_answer(master: Any) -> None:
    first = told(master.join(0), 1, Welcome)
    again = master.join(0)
    assert told(again, 1, Welcome) == first
    assert every(again, ev.OpenEdge) == []


def test_another_edge_of_a_live_node_keeps_what_is_known_of_it(master: Any, make: Any) -> None:
    master.running()
    master.hear(1, make.report(steps=5, after_seq=1, batch=2, activity=Activity.STEPPING))
    effects = master.join(0, edge=2, have=0, has_replica=True)
    assert every(effects, ev.OpenEdge)[0].edge == 2
    member = master.fit.members.live[1]
    assert (member.steps, member.activity) == (5, Activity.STEPPING)
    assert member.pending == (1, (0, 2))
    assert master.join(0, edge=1) == []  # an older one


def test_a_moved_master_forgets_edges_and_takes_them_again(master: Any) -> None:
    master.running()
    effects = master.step(ev.Moved("master", 2))
    assert every(effects, ev.CloseEdge) == [ev.CloseEdge(1), ev.CloseEdge(2)]
    (welcome,) = told(master.join(0), 1, Welcome)
    assert welcome.up.port == 2


# -- refusals ----------------------------------------------------------------------------------


def aborted(effects: list[ev.Effect]) -> ev.Abort:
    (abort,) = every(effects, ev.Abort)
    found: ev.Abort = abort
    return found


def test_another_version_ends_the_fit(master: Any) -> None:
    abort = aborted(master.join(0, version="w"))
    assert (abort.kind, abort.partition) == ("setup", 0)
    assert "v on the driver and w on the executor" in abort.reason


def test_other_rows_in_a_second_attempt_end_the_fit(master: Any) -> None:
    master.running().evict(1)
    abort = aborted(master.join(0, attempt=50, token=7, rows=8))
    assert (abort.kind, abort.host, abort.partition) == ("usage", "h", 0)
    assert "partition 0 had 7 rows" in abort.reason


def test_there_is_no_such_partition(master: Any) -> None:
    (refused,) = answers(master.join(9))
    assert (refused.fatal, refused.reason) == (True, "there is no partition 9")


def test_a_retry_of_a_trained_partition_ends_well(master: Any, make: Any) -> None:
    master.running()
    master.hear(1, make.update(1, 1, epoch=2, batch=0))
    master.evict(1)
    (refused,) = answers(master.join(0, attempt=50, token=7))
    assert not refused.fatal


# -- phases ------------------------------------------------------------------------------------


def test_training_begins_when_all_hold_a_replica(master: Any, make: Any) -> None:
    master.join(0)
    master.join(1)
    master.hear(1, make.report())
    assert master.phase is Phase.GATHERING
    master.hear(2, make.report())
    assert master.phase is Phase.RUNNING
    assert [s.phase for s in told(master.tick(), 1, State)] == [Phase.RUNNING]


def test_it_begins_with_those_who_came_in_time(master: Any, make: Any) -> None:
    master.join(0)
    for _ in range(8):
        master.hear(1, make.report())
        master.tick(8.0)
    assert master.phase is Phase.RUNNING


def test_too_few_workers_end_the_fit(master_with: Any, make: Any) -> None:
    master = master_with(workers_min=2)
    master.join(0)
    effects: list[ev.Effect] = []
    for _ in range(8):
        master.hear(1, make.report())
        effects += master.tick(8.0)
    abort = aborted(effects)
    assert abort.kind == "setup"
    assert "1 workers joined within 64 s, min_workers is 2 (of 2 partitions)" in abort.reason


def finished(master: Any, make: Any) -> Any:
    """Both partitions are trained."""
    master.running()
    for node in (1, 2):
        master.hear(node, make.update(node, 1, epoch=2, batch=0))
    assert master.phase is Phase.DRAINING
    return master


def test_a_fit_drains_audits_and_is_done(master: Any, make: Any) -> None:
    finished(master, make)
    master.hear(1, Final(1))
    effects = master.hear(2, Final(1))
    assert every(effects, ev.Hash) == [ev.Hash(2)]
    assert master.phase is Phase.AUDIT
    assert [(s.phase, s.final) for s in told(master.tick(), 1, State)] == [(Phase.AUDIT, 2)]
    master.step(ev.Hashed(2, "d", None))
    master.hear(1, AuditAnswer(2, "d", Kept("p", 1.0)))
    effects = master.hear(2, AuditAnswer(2, "other", None))
    assert every(effects, ev.Complete) == [ev.Complete()]
    assert master.fit.phases.digests == {1: "d", 2: "other"}
    assert master.fit.keeping.made == {"e": {"p": 1.0}}
    assert [s.phase for s in told(master.tick(), 2, State)] == [Phase.DONE]
    master.hear(1, Leaving("done", None))
    assert 1 not in master.fit.members.live


def test_the_final_commit_waits_for_every_last_update(master: Any, make: Any) -> None:
    finished(master, make)
    master.hear(1, Final(1))
    master.hear(2, Final(2))
    assert master.phase is Phase.DRAINING
    master.hear(2, make.update(2, 2, epoch=2, batch=0))
    assert (master.phase, master.fit.phases.final) == (Phase.AUDIT, 3)
    assert master.hear(1, make.update(1, 2, epoch=2, batch=0)) == []
    assert master.fit.sequencer.dropped == {"late": 1}


def test_who_dies_before_the_end_holds_nothing_up(master: Any, make: Any) -> None:
    finished(master, make)
    master.hear(1, Final(1))
    master.evict(2)
    assert master.phase is Phase.AUDIT
    master.step(ev.Hashed(2, "d", None))
    assert every(master.hear(1, AuditAnswer(2, "d", None)), ev.Complete)


@pytest.mark.parametrize("what", ["last update", "hash"])
def test_the_end_has_a_deadline(master_with: Any, make: Any, what: str) -> None:
    master = finished(master_with(end_s=5.0), make)
    master.hear(1, Final(1))
    if what == "hash":
        master.hear(2, Final(1))
        master.hear(1, AuditAnswer(2, "d", None))
        master.step(ev.Hashed(2, "d", None))
    effects: list[ev.Effect] = []
    for _ in range(6):
        for node in list(master.fit.members.live):
            master.hear(node, make.report(received=2))
        effects += master.tick(1.0)
    texts = [note.text for note in every(effects, ev.Note)]
    assert texts == [f"node 2 (partition 1 on h) left: its {what} did not come within 5 s"]


def test_a_stop_drains_what_there_is(master: Any, make: Any) -> None:
    master.running()
    master.hear(1, make.update(1, 1, batch=1))
    master.step(ev.StopRequested("enough"))
    master.step(ev.StopRequested("again"))
    assert (master.phase, master.fit.phases.stop_reason) == (Phase.DRAINING, "enough")
    master.evict(2)
    (refused,) = answers(master.join(1, count=2, edge=2, has_replica=True))
    assert not refused.fatal
    master.hear(1, Final(1))
    assert master.phase is Phase.AUDIT
    assert position(master, 1) == (0, 0)


def test_empty_partitions_are_trained_from_the_start(master_with: Any, make: Any) -> None:
    master = master_with(partitions=2)
    master.join(0, rows=0, batches=0)
    master.join(1)
    for node in (1, 2):
        master.hear(node, make.report())
    master.hear(2, make.update(2, 1, epoch=2, batch=0))
    assert master.phase is Phase.DRAINING


def test_without_any_rows_there_is_nothing_to_train(master_with: Any) -> None:
    abort = aborted(master_with(partitions=1).join(0, rows=0, batches=0))
    assert (abort.kind, abort.reason[:27]) == ("usage", "all 1 partitions are empty:")


# -- slots -------------------------------------------------------------------------------------


def one_waits(master: Any, make: Any) -> Any:
    """Partition 1 has lost its worker, partition 0 is trained."""
    master.running()
    master.hear(1, make.update(1, 1, epoch=2, batch=0))
    master.hear(1, make.report(after_seq=1, epoch=2, activity=Activity.FINISHED))
    master.evict(2)
    return master


def tick_alive(master: Any, make: Any, seconds: float) -> list[ev.Effect]:
    effects: list[ev.Effect] = []
    for _ in range(int(seconds)):
        for node in list(master.fit.members.live):
            master.hear(node, make.report(after_seq=1, epoch=2, activity=Activity.FINISHED))
        effects += master.tick(1.0)
    return effects


def test_a_finished_worker_is_asked_to_give_up_its_slot(master: Any, make: Any) -> None:
    one_waits(master, make)
    assert told(tick_alive(master, make, 8), 1, Release) == []
    assert told(tick_alive(master, make, 4), 1, Release)[0].reason == (
        "partition 1 needs a task slot"
    )
    effects = master.hear(1, Leaving("released", Kept("p", 2.0)))
    assert isinstance(answers(effects)[0], Closed)
    assert master.fit.keeping.made == {"e": {"p": 2.0}}
    assert master.phase is Phase.RUNNING


def test_slots_are_given_up_one_at_a_time(master_with: Any, make: Any) -> None:
    master = master_with(partitions=3).running()
    for node in (1, 2):
        master.hear(node, make.update(node, 1, epoch=2, batch=0))
    master.evict(3)
    effects = tick_alive(master, make, 12)
    assert [bool(told(effects, node, Release)) for node in (1, 2)] == [True, False]
    master.hear(1, Leaving("released", None))
    assert not told(tick_alive(master, make, 8), 2, Release)
    assert told(tick_alive(master, make, 5), 2, Release)


def test_a_partition_without_a_worker_has_a_deadline(master_with: Any, make: Any) -> None:
    master = one_waits(master_with(rejoin_s=30.0, release_s=1e9), make)
    abort = aborted(tick_alive(master, make, 31))
    assert (abort.kind, abort.partition) == ("setup", 1)
    assert abort.reason.startswith("partition 1 has been without a worker for 3")


# -- failures ----------------------------------------------------------------------------------


def test_a_failure_ends_the_fit_with_host_partition_and_trace(master: Any) -> None:
    effects = master.running().hear(2, Failed(reason="NaN", trace="t"))
    abort = aborted(effects)
    assert (abort.reason, abort.trace, abort.host, abort.partition) == ("NaN", "t", "h", 1)
    assert [bool(told(effects, node, Closed)) for node in (1, 2)] == [True, True]


def test_after_a_failure_whoever_still_speaks_is_told(master: Any, make: Any) -> None:
    master.running().hear(2, Failed(reason="NaN", trace="t"))
    assert told(master.hear(1, make.report()), 1, Closed)
    assert master.hear(1, make.update(1, 1)) != []
    assert master.fit.sequencer.head == 0
    assert master.tick(100.0) == []


def test_a_failure_after_the_end_does_not_count(master: Any, make: Any) -> None:
    finished(master, make)
    for node in (1, 2):
        master.hear(node, Final(1))
    master.step(ev.Hashed(2, "d", None))
    for node in (1, 2):
        master.hear(node, AuditAnswer(2, "d", None))
    effects = master.hear(1, Failed(reason="late", trace=""))
    assert every(effects, ev.Abort) == []
    assert told(effects, 1, Closed)


def test_counters_pass_through(master: Any) -> None:
    effects = master.running().hear(1, Stats({"loss": 1.0}))
    assert every(effects, ev.Observed)[0].values == {"loss": 1.0}


def test_messages_for_nodes_move_a_counter(master: Any) -> None:
    master.running().hear(1, Refused(token=1, count=1, reason="", fatal=True))
    assert master.fit.sequencer.dropped == {"not for a master": 1}


# -- between fits ------------------------------------------------------------------------------


def test_a_process_keeps_its_grant_when_it_comes_back_without_a_replica(
    master_with: Any, make: Any
) -> None:
    master = master_with(kept={"e": {"f1": 1.0, "f2": 2.0, "f3": 4.0}}).running()
    master.evict(1)
    (welcome,) = told(master.join(0, count=2, edge=2), 3, Welcome)
    assert welcome.grants == ["f1"]
    (other,) = told(master.join(0, attempt=50, token=7), 4, Welcome)
    assert other.grants == ["f3"]


def test_the_pace_of_a_newcomer_is_that_of_the_slowest(master: Any, make: Any) -> None:
    master.running()
    for node, steps in ((1, 8), (2, 5)):
        master.hear(node, make.report(steps=steps, activity=Activity.STEPPING))
    states = told(master.tick(0.1), 1, State)
    assert [state.slowest for state in states] == [5]
    master.evict(1)
    assert told(master.join(0, attempt=50, token=7), 3, Welcome)[0].steps == 5
