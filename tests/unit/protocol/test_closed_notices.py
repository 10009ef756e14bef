"""Tests of notices of closed ids: to whom they are sent, for how long, and when again."""

from __future__ import annotations

from typing import Any

import pytest

from sparkstrom.codec.messages import Disown, IdClosed, State
from tests.unit.protocol.effect_filters import sent, sent_by_master
from tests.unit.protocol.meshes import expire_lease, host, keep_alive


def test_closed_id_and_former_parent_get_notices_for_two_leases(make_mesh: Any) -> None:
    """The closed id's process and its former parent get notices, repeated for two leases."""
    master = make_mesh(8)
    master.hear(1, master.make.update(7, 1))
    edge = master.member(7).order.edge
    effects = expire_lease(master, 3, 7)
    assert sent_by_master(effects, Disown, host(3))[0] == Disown(7, edge)
    closed = sent_by_master(effects, IdClosed, host(7))[0]
    assert (closed.node, closed.seq, closed.free) == (7, 1, True)
    (state, *_) = sent(keep_alive(master, 2.0), State, 1)
    assert state.closed == [7]
    later = keep_alive(master, 16.0)
    assert len(sent_by_master(later, IdClosed, host(7))) > 20
    assert sent_by_master(keep_alive(master, 4.0), IdClosed) != []
    assert sent_by_master(keep_alive(master, 10.0), IdClosed) == []
    assert master.machine.notices.by_node == {}


def close_node_until_notices_expire(mesh_of: Any) -> Any:
    """Close node 7 and let all notices expire, as if lost: its parent still has it."""
    master = mesh_of(8)
    expire_lease(master, 3, 7)
    keep_alive(master, 32.0)
    assert master.machine.notices.by_node == {}
    return master


@pytest.mark.parametrize("speaks", ["update", "report"])
def test_message_under_closed_id_restarts_notices(make_mesh: Any, speaks: str) -> None:
    """An update or status under a closed id starts the notices again."""
    master = close_node_until_notices_expire(make_mesh)
    says = {"update": master.make.update(7, 1), "report": master.make.report(master.make.status(7))}
    master.hear(1, says[speaks])
    effects = keep_alive(master, 2.0)
    assert sent_by_master(effects, IdClosed, host(7))[0].node == 7
    assert sent(effects, State, 1)[0].closed == [7]
    assert sent_by_master(keep_alive(master, 32.0), IdClosed)[-1].node == 7
    assert sent_by_master(keep_alive(master, 10.0), IdClosed) == []


def test_late_update_of_rejoined_process_starts_no_notices(make_mesh: Any) -> None:
    """A late update under the old id of a process that has rejoined starts no notices."""
    master = close_node_until_notices_expire(make_mesh)
    master.join(6, count=2, executor="e6")
    master.hear(1, master.make.update(7, 1))
    assert master.machine.notices.by_node == {}
