"""Tests of the optimizer copies for a fit's last checkpoint, for which the end of the fit waits."""

from __future__ import annotations

from typing import Any

import pytest

from sparkstrom.base.identity import MASTER
from sparkstrom.codec.messages import (
    Activity,
    AuditAnswer,
    OptimizerChunk,
    OptimizerCopy,
    OptimizerRequest,
    Phase,
    hash_optimizer_copy,
)
from sparkstrom.protocol.common import events_and_effects as ev
from tests.unit.protocol.spoken import answers, only, sent

ONE, ALL = ev.OptimizerCopyRequest(), ev.OptimizerCopyRequest(everybody=True)


def chunk(content: bytes) -> OptimizerChunk:
    """Return the only chunk of a copy with this content."""
    return OptimizerCopy.from_content(content, 1).chunk(
        OptimizerRequest(MASTER, hash_optimizer_copy(content), 0)
    )


def audited(master: Any, *, lends: bool = True) -> list[ev.Effect]:
    """Stop and drain the fit, and let all report equal hashes; return the effects."""
    effects = master.step(ev.StopRequested("enough"))
    for node in (1, 2):
        effects += master.say(node, final=0, lends=lends)
    effects += master.tick(0.1)
    assert master.phase is Phase.AUDIT
    effects += master.step(ev.ReplicaHashed(0, "same", None))
    for node in (1, 2):
        effects += master.say(node, audit=AuditAnswer(0, "same", None), lends=lends)
    return effects + master.tick(0.1)


def both_lending(master: Any) -> Any:
    """Start training with both workers as sources; node 2 has taken more steps."""
    master.running()
    for node, steps in ((1, 5), (2, 7)):
        master.say(node, steps=steps, activity=Activity.STEPPING, lends=True)
    return master


def test_the_end_waits_until_all_are_there(master_with: Any) -> None:
    """A fit with a last checkpoint is done only after all optimizer states were copied."""
    master = both_lending(master_with(last_copies=ALL))
    asked = answers(audited(master), OptimizerRequest)
    assert len(asked) == 1
    assert master.phase is Phase.AUDIT
    assert answers(master.hear(2, chunk(b"b")), OptimizerRequest, "w0")
    assert master.phase is Phase.AUDIT
    effects = master.hear(1, chunk(b"a"))
    assert only(effects, ev.OptimizerCopied).payloads == (b"b", b"a")
    assert master.phase is Phase.DONE
    assert master.machine.copies.copied == (b"b", b"a")


def test_without_a_checkpoint_nobody_is_asked(master_with: Any) -> None:
    """Without a last checkpoint, no optimizer state is requested."""
    master = both_lending(master_with())
    assert answers(audited(master), OptimizerRequest) == []
    assert master.phase is Phase.DONE


def test_who_can_lend_only_now_is_asked_now(master_with: Any) -> None:
    """A worker that becomes a source while the fit drains is asked then."""
    master = master_with(last_copies=ONE).running()
    master.step(ev.StopRequested("enough"))
    assert answers(master.tick(0.1), OptimizerRequest) == []
    master.say(1, steps=3, lends=True)
    assert answers(master.tick(0.1), OptimizerRequest, "w0")


def test_where_nobody_can_lend_the_end_does_not_wait(master_with: Any) -> None:
    """Without any source, the fit ends without copies."""
    master = master_with(last_copies=ALL).running()
    audited(master, lends=False)
    assert master.phase is Phase.DONE


@pytest.mark.parametrize("wish", [ONE, ALL])
def test_who_does_not_answer_holds_the_end_up_for_so_long(master_with: Any, wish: Any) -> None:
    """Each source that does not answer delays the end by a lease, and stays a member."""
    master = both_lending(master_with(last_copies=wish))
    audited(master)
    waited_s = 0.0
    while master.phase is not Phase.DONE and waited_s < 100.0:
        for node in (1, 2):
            master.say(node, lends=True)
        master.tick(1.0)
        waited_s += 1.0
    silent = 2 if wish.everybody else 1
    lease_s = master.machine.limits.lease_s
    assert silent * lease_s <= waited_s <= silent * (lease_s + 1.0)
    assert master.machine.members.departures == []


def test_what_is_on_its_way_ends_first_and_the_last_ones_are_new(master_with: Any) -> None:
    """A copy that is under way is finished first; the last copies are fetched after it."""
    master = both_lending(master_with(last_copies=ALL))
    master.step(ONE)
    master.tick()
    audited(master)
    effects = master.hear(2, chunk(b"x"))
    assert only(effects, ev.OptimizerCopied).payloads == (b"x",)
    assert answers(effects, OptimizerRequest)
    assert master.phase is Phase.AUDIT
    master.hear(2, chunk(b"b"))
    master.hear(1, chunk(b"a"))
    assert master.phase is Phase.DONE
    assert master.machine.copies.copied == (b"b", b"a")


def test_a_wish_that_comes_late_gets_the_last_ones(master_with: Any) -> None:
    """A request after the last copies returns those: the driver polls only now and then."""
    master = both_lending(master_with(last_copies=ONE))
    master.step(ev.StopRequested("enough"))
    master.tick(0.1)
    master.hear(2, chunk(b"b"))
    assert only(master.step(ONE), ev.OptimizerCopied).payloads == (b"b",)
    assert sent(master.tick(0.1), OptimizerRequest) == []


def test_a_chunk_that_is_coming_over_a_slow_link_is_not_asked_for_again(master_with: Any) -> None:
    """A chunk is not requested again while parts of it keep arriving."""
    master = both_lending(master_with())
    master.step(ONE)
    assert len(answers(master.tick(), OptimizerRequest)) == 1
    for _ in range(5):
        master.step(ev.DataArriving(2, 1000), 1.0)
        master.say(1, lends=True)
        assert answers(master.tick(), OptimizerRequest) == []
    assert answers(master.tick(2.5), OptimizerRequest)
