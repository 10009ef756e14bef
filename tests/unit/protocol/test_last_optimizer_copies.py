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
from tests.unit.protocol.effect_filters import only, sent, sent_by_master

ONE, ALL = ev.OptimizerCopyRequest(), ev.OptimizerCopyRequest(everybody=True)


def chunk(content: bytes) -> OptimizerChunk:
    """Return the only chunk of a copy with this content."""
    return OptimizerCopy.from_content(content, 1).chunk(
        OptimizerRequest(MASTER, hash_optimizer_copy(content), 0)
    )


def drain_and_audit(master: Any, *, lends: bool = True) -> list[ev.Effect]:
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


def train_with_two_sources(master: Any) -> Any:
    """Start training with both workers as sources; node 2 has taken more steps."""
    master.running()
    for node, steps in ((1, 5), (2, 7)):
        master.say(node, steps=steps, activity=Activity.STEPPING, lends=True)
    return master


def test_end_of_fit_waits_for_all_optimizer_copies(master_with: Any) -> None:
    """A fit with a last checkpoint is done only after all optimizer states were copied."""
    master = train_with_two_sources(master_with(last_copies=ALL))
    asked = sent_by_master(drain_and_audit(master), OptimizerRequest)
    assert len(asked) == 1
    assert master.phase is Phase.AUDIT
    assert sent_by_master(master.hear(2, chunk(b"b")), OptimizerRequest, "w0")
    assert master.phase is Phase.AUDIT
    effects = master.hear(1, chunk(b"a"))
    assert only(effects, ev.OptimizerCopied).payloads == (b"b", b"a")
    assert master.phase is Phase.DONE
    assert master.machine.copies.copied == (b"b", b"a")


def test_fit_without_last_checkpoint_requests_no_optimizer_state(master_with: Any) -> None:
    """Without a last checkpoint, no optimizer state is requested."""
    master = train_with_two_sources(master_with())
    assert sent_by_master(drain_and_audit(master), OptimizerRequest) == []
    assert master.phase is Phase.DONE


def test_source_that_appears_while_draining_is_used(master_with: Any) -> None:
    """A worker that becomes a source while the fit drains is asked then."""
    master = master_with(last_copies=ONE).running()
    master.step(ev.StopRequested("enough"))
    assert sent_by_master(master.tick(0.1), OptimizerRequest) == []
    master.say(1, steps=3, lends=True)
    assert sent_by_master(master.tick(0.1), OptimizerRequest, "w0")


def test_fit_without_sources_ends_without_copies(master_with: Any) -> None:
    """Without any source, the fit ends without copies."""
    master = master_with(last_copies=ALL).running()
    drain_and_audit(master, lends=False)
    assert master.phase is Phase.DONE


@pytest.mark.parametrize("wish", [ONE, ALL])
def test_silent_source_does_not_block_end_of_fit(master_with: Any, wish: Any) -> None:
    """Each source that does not answer delays the end by a lease, and stays a member."""
    master = train_with_two_sources(master_with(last_copies=wish))
    drain_and_audit(master)
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


def test_copy_under_way_finishes_before_last_copies(master_with: Any) -> None:
    """A copy that is under way is finished first; the last copies are fetched after it."""
    master = train_with_two_sources(master_with(last_copies=ALL))
    master.step(ONE)
    master.tick()
    drain_and_audit(master)
    effects = master.hear(2, chunk(b"x"))
    assert only(effects, ev.OptimizerCopied).payloads == (b"x",)
    assert sent_by_master(effects, OptimizerRequest)
    assert master.phase is Phase.AUDIT
    master.hear(2, chunk(b"b"))
    master.hear(1, chunk(b"a"))
    assert master.phase is Phase.DONE
    assert master.machine.copies.copied == (b"b", b"a")


def test_late_copy_request_gets_last_copies(master_with: Any) -> None:
    """A request after the last copies returns those: the driver polls only now and then."""
    master = train_with_two_sources(master_with(last_copies=ONE))
    master.step(ev.StopRequested("enough"))
    master.tick(0.1)
    master.hear(2, chunk(b"b"))
    assert only(master.step(ONE), ev.OptimizerCopied).payloads == (b"b",)
    assert sent(master.tick(0.1), OptimizerRequest) == []


def test_chunk_is_not_requested_again_while_its_parts_arrive(master_with: Any) -> None:
    """A chunk is not requested again while parts of it keep arriving."""
    master = train_with_two_sources(master_with())
    master.step(ONE)
    assert len(sent_by_master(master.tick(), OptimizerRequest)) == 1
    for _ in range(5):
        master.step(ev.DataArriving(2, 1000), 1.0)
        master.say(1, lends=True)
        assert sent_by_master(master.tick(), OptimizerRequest) == []
    assert sent_by_master(master.tick(2.5), OptimizerRequest)
