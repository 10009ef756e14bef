"""Tests that the checkers of I1 to I3 report planted bugs: a check that never fails is useless."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sparkstrom.codec.messages import Activity, Commit, Update
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.master.commit_order import CommitOrder
from sparkstrom.protocol.master.commit_sequencer import Sequencer
from sparkstrom.protocol.master.members import Member, Members, Partition, ResidualCheckpoints
from sparkstrom.protocol.master.phases import VacantPartitions
from sparkstrom.protocol.worker import node
from sparkstrom.protocol.worker import node as directives
from sparkstrom.protocol.worker.node import Directives
from sparkstrom.protocol.worker.optimizer_transfer import OptimizerTransfers
from sparkstrom.protocol.worker.parent_link import InFlight
from sparkstrom.protocol.worker.replication import Replication, SnapshotFetch
from sparkstrom.runtime.training_loop import TrainerInbox, TrainingLoop
from sparkstrom.simulation import process as sim_process
from sparkstrom.simulation.process import SimProcess
from sparkstrom.simulation.replica import SimReplica
from tests.simulation.planted import (
    DEATHS,
    NARROW,
    ROUGH,
    SEEDS,
    Plant,
    discard_residual,
    return_wrong_digest,
    violations,
)

# -- I1: what is learned is sent or kept -------------------------------------------------------


def grant_residual_file_twice(patch: pytest.MonkeyPatch) -> None:
    """Grant each residual file again and again."""

    def generous(self: ResidualCheckpoints, executor: str, joiner: int) -> None:
        files = self._free.get(executor)
        if files:
            path = min(files)
            self._granted[joiner] = {path: files[path]}

    patch.setattr(ResidualCheckpoints, "grant", generous)


def ignore_lost_mass(patch: pytest.MonkeyPatch) -> None:
    """Do not count unused residual files as lost."""
    patch.setattr(ResidualCheckpoints, "count_lost", lambda self: None)


def forget_saved_residual_files(patch: pytest.MonkeyPatch) -> None:
    """Do not record the residual files that workers leave."""
    patch.setattr(ResidualCheckpoints, "record", lambda self, executor, owner, kept: None)


def skip_grant_transfer_on_return(patch: pytest.MonkeyPatch) -> None:
    """Do not transfer a granted file to the new id of a returned process."""
    patch.setattr(ResidualCheckpoints, "transfer_grant", lambda self, former, joiner: None)


def add_grants_with_each_replica(patch: pytest.MonkeyPatch) -> None:
    """Add the granted residual files with each installed replica."""
    take = TrainingLoop._add_saved_residuals

    def checkpoints(self: TrainingLoop) -> None:
        grants = self._grants
        take(self)
        self._grants = grants

    patch.setattr(TrainingLoop, "_add_saved_residuals", checkpoints)


def send_under_closed_id(patch: pytest.MonkeyPatch) -> None:
    """Keep sending under the closed id after a return."""
    carry = SimProcess._apply_effect

    def forgetful(self: SimProcess, effect: ev.Effect) -> None:
        me = self.me
        carry(self, effect)
        if isinstance(effect, ev.IdAssigned) and effect.returned:
            self.me = me

    patch.setattr(SimProcess, "_apply_effect", forgetful)


def skip_renumbering_on_return(patch: pytest.MonkeyPatch) -> None:
    """Do not renumber the updates that are in flight at a return."""
    patch.setattr(InFlight, "renumber", lambda self, closed, node, now_s: None)


def delay_newest_inbox_item(patch: pytest.MonkeyPatch) -> None:
    """Let the trainer take the newest item one boundary too late, after its directive."""
    take = TrainerInbox.take

    def torn(self: TrainerInbox) -> list[Any]:
        items = take(self)
        self._items = items[-1:]
        return items[:-1]

    patch.setattr(TrainerInbox, "take", torn)


def skip_marking_grants_used(patch: pytest.MonkeyPatch) -> None:
    """Do not mark used residual files as used."""
    patch.setattr(ResidualCheckpoints, "mark_grants_used", lambda self, node: None)


# -- I2: each update once, each minibatch once ---------------------------------------------------


def number_repeated_update_again(patch: pytest.MonkeyPatch) -> None:
    """Number a repeated update again."""
    number = Sequencer.number

    def forgetful(self: Sequencer, update: Update, *how: Any) -> Commit | None:
        last = self.last.get(update.origin)
        if last is not None and update.seq == last:
            self.last[update.origin] = last - 1
        return number(self, update, *how)

    patch.setattr(Sequencer, "number", forgetful)


def commit_truncated_payload(patch: pytest.MonkeyPatch) -> None:
    """Commit a truncated payload."""
    number = Sequencer.number

    def garbling(self: Sequencer, update: Update, *how: Any) -> Commit | None:
        garbled = msgspec.structs.replace(update.payload, data=update.payload.data[:-2])
        return number(self, msgspec.structs.replace(update, payload=garbled), *how)

    patch.setattr(Sequencer, "number", garbling)


def reset_position_when_worker_leaves(patch: pytest.MonkeyPatch) -> None:
    """Set a partition back to its beginning when its worker leaves."""
    remove = Members.remove

    def forgetful(self: Members, *given: Any, **named: Any) -> Partition:
        partition = remove(self, *given, **named)
        partition.position = type(partition.position)(0, 0)
        return partition

    patch.setattr(Members, "remove", forgetful)


def count_positions_before_commit(patch: pytest.MonkeyPatch) -> None:
    """Count reported positions before their updates are committed."""

    def hasty(self: CommitOrder, member: Member) -> None:
        if member.pending is not None:
            self._members.partition_of(member).advance(member.pending[1])

    patch.setattr(CommitOrder, "apply_pending", hasty)


def release_unfinished_worker(patch: pytest.MonkeyPatch) -> None:
    """Ask the first worker to leave, even if it has not finished."""

    def blind(self: VacantPartitions, waiting: int, now_s: float) -> None:
        member = next(iter(self._members.live.values()))
        self._released_s, member.releasing = now_s, "a slot is needed"

    patch.setattr(VacantPartitions, "_choose_worker_to_leave", blind)


# -- I3: equal replicas ----------------------------------------------------------------------------


def apply_commit_twice(patch: pytest.MonkeyPatch) -> None:
    """Apply commit 10 twice to each replica."""
    apply = SimReplica.apply_update

    def twice(self: SimReplica, committed: Commit) -> None:
        apply(self, committed)
        if committed.commit == 10:
            apply(self, committed)

    patch.setattr(SimReplica, "apply_update", twice)


def skip_one_commit(patch: pytest.MonkeyPatch) -> None:
    """Do not apply commit 10 to any replica."""
    apply = SimReplica.apply_update

    def never(self: SimReplica, committed: Commit) -> None:
        if committed.commit == 10:
            self.commit = 10
        else:
            apply(self, committed)

    patch.setattr(SimReplica, "apply_update", never)


def apply_own_updates_twice(patch: pytest.MonkeyPatch) -> None:
    """Apply the commit of a worker's own update, which its replica has already."""
    on_committed = Replication.on_commit

    def delivering(self: Replication, committed: Commit, now_s: float) -> list[ev.Effect]:
        own = committed.origin in self._membership.ids and committed.commit == self.received + 1
        unacknowledged = self._in_flight.uncommitted
        data = b"".join(u.payload.data for u in unacknowledged if u.seq == committed.seq)
        payload = msgspec.structs.replace(committed.payload, data=data)
        effects = on_committed(self, committed, now_s)
        again = msgspec.structs.replace(committed, payload=payload)
        return [*effects, ev.ApplyCommit(again)] if own else effects

    patch.setattr(Replication, "on_commit", delivering)


def apply_commits_in_reverse_order(patch: pytest.MonkeyPatch) -> None:
    """Reverse the order of commits that wait for the trainer."""
    feed = SimProcess.handle

    def shuffled(self: SimProcess, event: ev.Event, now_s: float) -> None:
        feed(self, event, now_s)
        items = self._inbox._items
        if len(items) > 1 and all(isinstance(item, ev.ApplyCommit) for item in items):
            items.reverse()

    patch.setattr(SimProcess, "handle", shuffled)


def start_with_other_parameters(patch: pytest.MonkeyPatch) -> None:
    """Start workers with other initial parameters."""
    patch.setattr(sim_process, "SimReplica", lambda *given, whole: SimReplica(*given, whole=False))


def claim_missing_replica(patch: pytest.MonkeyPatch) -> None:
    """Report to the parent that no snapshot is needed."""
    patch.setattr(Replication, "needs_no_snapshot", True)


def start_without_grants(patch: pytest.MonkeyPatch) -> None:
    """Forget the granted residual files when starting from the initial replica."""
    apply = TrainingLoop._apply

    def forgetful(self: TrainingLoop, item: Any) -> None:
        if isinstance(item, ev.UseInitialReplica):
            self._grants = ()
        apply(self, item)

    patch.setattr(TrainingLoop, "_apply", forgetful)


def install_snapshot_without_own_updates(patch: pytest.MonkeyPatch) -> None:
    """Leave out own uncommitted updates when a snapshot is installed."""
    catch_up = Replication.continue_fetch

    def hasty(self: Replication, now_s: float) -> list[ev.Effect]:
        effects = catch_up(self, now_s)
        lossy = msgspec.structs.replace
        return [lossy(e, own=()) if isinstance(e, ev.InstallSnapshot) else e for e in effects]

    patch.setattr(Replication, "continue_fetch", hasty)


def install_outdated_chunks(patch: pytest.MonkeyPatch) -> None:
    """Keep chunks that are no longer valid."""
    patch.setattr(SnapshotFetch, "drop_useless_chunks", lambda self: None)


def train_after_last_update(patch: pytest.MonkeyPatch) -> None:
    """Accept states of an earlier phase, so that training continues after the last update."""

    def naive(self: node.Node, state: Any, now_s: float) -> list[ev.Effect]:
        self.fit.state, self.fit.done = state, state.phase is state.phase.DONE
        return []

    patch.setattr(node.Node, "_on_state", naive)


def skip_audit(patch: pytest.MonkeyPatch) -> None:
    """End instead of hashing the replica."""
    now = Directives.current

    def hasty(self: Directives) -> ev.Directive:
        command = now(self)
        if command.order is ev.Command.AUDIT:
            return directives.DONE
        return command

    patch.setattr(Directives, "current", hasty)


def serve_fresh_optimizer_state(patch: pytest.MonkeyPatch) -> None:
    """Serve a fresh optimizer state of a latecomer to others."""

    def generous(self: OptimizerTransfers) -> bool:
        trainer = self._trainer
        catching_up = trainer.activity is Activity.CATCHING_UP or self.fetch is not None
        return trainer.steps > 0 and not catching_up

    patch.setattr(OptimizerTransfers, "is_source", property(generous))


def claim_unapplied_commits(patch: pytest.MonkeyPatch) -> None:
    """Report received commits as applied before the trainer has applied them."""
    on_committed = Replication.on_commit

    def hasty(self: Replication, committed: Commit, now_s: float) -> list[ev.Effect]:
        effects = on_committed(self, committed, now_s)
        self.history.applied = self.received
        return effects

    patch.setattr(Replication, "on_commit", hasty)


LOSSY = ROUGH | {"loss": 0.25, "crashes": 8, "step_s_max": 0.3, "window_bytes": 10_000}
LENDERS = ROUGH | {"crashes": 8, "loss": 0.25, "max_lead": 1, "publish_every": 1, "epochs": 6}

PLANTED: list[tuple[Plant, str, dict[str, Any]]] = [
    (discard_residual, "I1: p", {}),
    (grant_residual_file_twice, "I1: e", {"kept_files": 4} | ROUGH),
    (ignore_lost_mass, "I1: 0.0 of kept mass", {"kept_files": 4} | ROUGH),
    (forget_saved_residual_files, "I1: what", ROUGH),
    (
        skip_grant_transfer_on_return,
        "I1:",
        {"kept_files": 4, "pauses": 6, "stop": 0.0, "failure": 0.0},
    ),
    (number_repeated_update_again, "I2: commit", ROUGH),
    (commit_truncated_payload, "I2: commit", ROUGH),
    (reset_position_when_worker_leaves, "I2: partition", ROUGH),
    (reset_position_when_worker_leaves, "I2: minibatch", ROUGH),
    (count_positions_before_commit, "I2: partition", LOSSY),
    (release_unfinished_worker, "I2: p", ROUGH | {"restart_s_max": 8.0}),
    (serve_fresh_optimizer_state, "I3: p", LENDERS),
    (claim_unapplied_commits, "I3: p", ROUGH),
    (apply_commit_twice, "I3: p", ROUGH),
    (skip_one_commit, "I3: p", ROUGH),
    (apply_own_updates_twice, "I3: p", ROUGH),
    (apply_commits_in_reverse_order, "I3: p", {}),
    (delay_newest_inbox_item, "I3: node", ROUGH),
    (send_under_closed_id, "I4: p", ROUGH),
    (skip_renumbering_on_return, "I4: not over", ROUGH),
    (start_with_other_parameters, "I3: p", {"whole": True}),
    (claim_missing_replica, "I3: p", {"whole": False}),
    (start_without_grants, "I1: ", {"whole": True, "kept_files": 4}),
    (return_wrong_digest, "I3: node", ROUGH),
    (install_snapshot_without_own_updates, "I3: p", NARROW),
    (install_outdated_chunks, "I3: p", NARROW | {"log_bytes": 100, "loss": 0.25}),
    (
        train_after_last_update,
        "I3: node",
        {"stop": 1.0, "late": 0.5, "failure": 0.0, "crashes": 0, "cuts": 4, "max_staleness": None},
    ),
    (skip_audit, "I3: p", ROUGH),
    (add_grants_with_each_replica, "I1: p", {"kept_files": 4} | NARROW),
    (skip_marking_grants_used, "I1: ", {"kept_files": 4} | ROUGH),
]


@pytest.mark.parametrize(
    ("plant", "begins", "given"), PLANTED, ids=lambda p: getattr(p, "__name__", "")
)
def test_checker_reports_planted_bug(
    plant: Plant, begins: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the seeds shows a violation that begins with the expected text."""
    plant(monkeypatch)
    assert any(text.startswith(begins) for text in violations(given, SEEDS))


@pytest.mark.parametrize(
    "given",
    [ROUGH, NARROW, LOSSY, DEATHS, LENDERS],
    ids=["rough", "narrow", "lossy", "deaths", "lenders"],
)
def test_runs_have_no_violations_without_planted_bug(given: dict[str, Any]) -> None:
    assert list(violations(given, range(8))) == []
