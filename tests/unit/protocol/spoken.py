"""What a machine wanted, by kind: over its edges, directly, and beside messages."""

from __future__ import annotations

from typing import Any

from sparkstrom.codec.messages import Message
from sparkstrom.protocol.common import events_and_effects as ev


def every(effects: list[ev.Effect], kind: type[Any]) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]


def only(effects: list[ev.Effect], kind: type[Any]) -> Any:
    found = every(effects, kind)
    assert len(found) == 1, effects
    return found[0]


def sent(effects: list[ev.Effect], kind: type[Message], to: int | None = None) -> list[Any]:
    """Over an edge, to this neighbour or to any."""
    sends = [send for send in every(effects, ev.Send) if to in (None, send.to)]
    return [send.message for send in sends if isinstance(send.message, kind)]


def said(effects: list[ev.Effect], kind: type[Message]) -> list[Any]:
    """By a node to the master itself."""
    return every([tell.message for tell in every(effects, ev.SendDirect)], kind)


def answers(effects: list[ev.Effect], kind: type[Any] = object, host: str = "") -> list[Any]:
    """By the master to nodes directly, to whoever is at ``host`` or to anybody."""
    told = [
        answer for answer in every(effects, ev.SendToProcess) if host in ("", answer.address.host)
    ]
    return [answer.message for answer in told if isinstance(answer.message, kind)]


def aborted(effects: list[ev.Effect]) -> ev.Abort:
    found: ev.Abort = only(effects, ev.Abort)
    return found
