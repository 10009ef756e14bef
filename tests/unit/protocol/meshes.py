"""Helpers for tests of meshes: a master with two children per node, passing time, lost nodes."""

from __future__ import annotations

from typing import Any

from sparkstrom.codec.messages import ChildSilent, Probe, ProbeReply
from sparkstrom.protocol.common import events_and_effects as ev
from tests.unit.protocol.effect_filters import sent_by_master

MESH = {"fan_out": 2, "depth": 4}


def host(node: int) -> str:
    return f"w{node - 1}"


def keep_alive(master: Any, seconds: float, *silent: int) -> list[ev.Effect]:
    """Let time pass while all nodes but ``silent`` answer; return the effects."""
    effects: list[ev.Effect] = []
    for _ in range(int(seconds * 4)):
        now = master.tick(0.25)
        for probe in sent_by_master(now, Probe):
            if probe.node not in silent:
                master.direct(ProbeReply(probe.node))
        for child in list(master.machine.children.by_node):
            if child not in silent:
                master.hear(child, master.make.report())
        effects += now
    return effects


def report_silent_child(master: Any, parent: int, child: int) -> list[ev.Effect]:
    """Let a parent report a silent child to the master."""
    effects: list[ev.Effect] = master.direct(
        ChildSilent(parent, child, master.member(child).order.edge)
    )
    return effects


def expire_lease(master: Any, parent: int, node: int) -> list[ev.Effect]:
    """Report ``node`` as silent and keep it silent until its lease expires; others stay alive."""
    report_silent_child(master, parent, node)
    effects = keep_alive(master, 11.0, node)
    assert node not in master.machine.members.live
    return effects
