"""The master's machine: numbering, feeding, positions, failures."""

from __future__ import annotations

from typing import Any

from sparkstrom.base.identity import Position
from sparkstrom.codec.messages import (
    Again,
    AskAfter,
    AskChunk,
    Behind,
    Closed,
    Committed,
    Failed,
    Message,
    Refused,
    Stats,
    Welcome,
)
from sparkstrom.protocol import events as ev


def told(effects: list[ev.Effect], node: int, kind: type[Message]) -> list[Any]:
    messages = [e.message for e in effects if isinstance(e, ev.Send) and e.to == node]
    return [message for message in messages if isinstance(message, kind)]


def every(effects: list[ev.Effect], kind: type[Any]) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]


def aborted(effects: list[ev.Effect]) -> ev.Abort:
    (abort,) = every(effects, ev.Abort)
    found: ev.Abort = abort
    return found


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


def test_counters_pass_through(master: Any) -> None:
    effects = master.running().hear(1, Stats({"loss": 1.0}))
    assert every(effects, ev.Observed)[0].values == {"loss": 1.0}


def test_messages_for_nodes_move_a_counter(master: Any) -> None:
    master.running().hear(1, Refused(token=1, count=1, reason="", fatal=True))
    assert master.fit.sequencer.dropped == {"not for a master": 1}
