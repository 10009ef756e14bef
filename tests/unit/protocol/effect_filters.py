"""Select effects by type, and sent messages by type and way: over an edge or directly."""

from __future__ import annotations

from typing import Any

from sparkstrom.codec.messages import Message
from sparkstrom.protocol.common import events_and_effects as ev


def every(effects: list[ev.Effect], kind: type[Any]) -> list[Any]:
    """Return all effects of this type."""
    return [effect for effect in effects if isinstance(effect, kind)]


def only(effects: list[ev.Effect], kind: type[Any]) -> Any:
    """Return the only effect of this type; fail if there is another number of them."""
    found = every(effects, kind)
    assert len(found) == 1, effects
    return found[0]


def sent(effects: list[ev.Effect], kind: type[Message], to: int | None = None) -> list[Any]:
    """Return the messages of this type that were sent over an edge, to ``to`` or to anyone."""
    sends = [send for send in every(effects, ev.Send) if to in (None, send.to)]
    return [send.message for send in sends if isinstance(send.message, kind)]


def sent_directly(effects: list[ev.Effect], kind: type[Message]) -> list[Any]:
    """Return the messages of this type that a node sent directly to the master."""
    return every([tell.message for tell in every(effects, ev.SendDirect)], kind)


def sent_by_master(effects: list[ev.Effect], kind: type[Any] = object, host: str = "") -> list[Any]:
    """Return the master's direct messages of this type, to ``host`` or to any host."""
    told = [
        answer for answer in every(effects, ev.SendToProcess) if host in ("", answer.address.host)
    ]
    return [answer.message for answer in told if isinstance(answer.message, kind)]


def only_abort(effects: list[ev.Effect]) -> ev.Abort:
    """Return the only ``Abort`` effect."""
    found: ev.Abort = only(effects, ev.Abort)
    return found
