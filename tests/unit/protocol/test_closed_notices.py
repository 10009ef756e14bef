"""Tests of notices of closed ids: to whom they are sent, for how long, and when again."""

from __future__ import annotations

from typing import Any

import pytest

from sparkstrom.codec.messages import Disown, IdClosed, State
from tests.unit.protocol.meshes import host, keep_alive, lose
from tests.unit.protocol.spoken import answers, sent


def test_the_closed_one_and_its_parent_are_told_for_two_leases(mesh_of: Any) -> None:
    """The closed id's process and its former parent get notices, repeated for two leases."""
    master = mesh_of(8)
    master.hear(1, master.make.update(7, 1))
    edge = master.member(7).order.edge
    effects = lose(master, 3, 7)
    assert answers(effects, Disown, host(3))[0] == Disown(7, edge)
    closed = answers(effects, IdClosed, host(7))[0]
    assert (closed.node, closed.seq, closed.free) == (7, 1, True)
    (state, *_) = sent(keep_alive(master, 2.0), State, 1)
    assert state.closed == [7]
    later = keep_alive(master, 16.0)
    assert len(answers(later, IdClosed, host(7))) > 20
    assert answers(keep_alive(master, 4.0), IdClosed) != []
    assert answers(keep_alive(master, 10.0), IdClosed) == []
    assert master.machine.notices.by_node == {}


def closed_in_vain(mesh_of: Any) -> Any:
    """Close node 7 and let all notices expire, as if lost: its parent still has it."""
    master = mesh_of(8)
    lose(master, 3, 7)
    keep_alive(master, 32.0)
    assert master.machine.notices.by_node == {}
    return master


@pytest.mark.parametrize("speaks", ["update", "report"])
def test_who_goes_on_under_a_closed_id_is_told_again(mesh_of: Any, speaks: str) -> None:
    """An update or status under a closed id starts the notices again."""
    master = closed_in_vain(mesh_of)
    says = {"update": master.make.update(7, 1), "report": master.make.report(master.make.status(7))}
    master.hear(1, says[speaks])
    effects = keep_alive(master, 2.0)
    assert answers(effects, IdClosed, host(7))[0].node == 7
    assert sent(effects, State, 1)[0].closed == [7]
    assert answers(keep_alive(master, 32.0), IdClosed)[-1].node == 7
    assert answers(keep_alive(master, 10.0), IdClosed) == []


def test_what_is_heard_late_of_one_that_is_back_is_no_news(mesh_of: Any) -> None:
    """A late update under the old id of a process that has rejoined starts no notices."""
    master = closed_in_vain(mesh_of)
    master.join(6, count=2, executor="e6")
    master.hear(1, master.make.update(7, 1))
    assert master.machine.notices.by_node == {}
