"""Each checker catches its planted bug: a simulator that cannot fail proves nothing."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sparkstrom.codec.messages import Activity, Committed, Update
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.master.commit_order import CommitOrder
from sparkstrom.protocol.master.members import Member, Members
from sparkstrom.protocol.master.partitions import Partition
from sparkstrom.protocol.master.residual_checkpoints import ResidualCheckpoints
from sparkstrom.protocol.master.sequencer import Sequencer
from sparkstrom.protocol.master.vacancies import Vacancies
from sparkstrom.protocol.worker import directives, node
from sparkstrom.protocol.worker.directives import Directives
from sparkstrom.protocol.worker.in_flight import InFlight
from sparkstrom.protocol.worker.optimizer_transfer import OptimizerTransfers
from sparkstrom.protocol.worker.replication import Replication
from sparkstrom.protocol.worker.snapshot_fetch import SnapshotFetch
from sparkstrom.runtime.trainer_inbox import TrainerInbox
from sparkstrom.runtime.training_loop import TrainingLoop
from sparkstrom.simulation import sim_process
from sparkstrom.simulation.sim_process import SimProcess
from sparkstrom.simulation.sim_replica import SimReplica
from tests.simulation.planted import (
    DEATHS,
    NARROW,
    ROUGH,
    SEEDS,
    Plant,
    drops_a_residual,
    violations,
)

# -- I1: nothing is lost on the way ------------------------------------------------------------


def grants_a_file_twice(patch: pytest.MonkeyPatch) -> None:
    def generous(self: ResidualCheckpoints, executor: str, joiner: int) -> None:
        files = self._free.get(executor)
        if files:
            path = min(files)
            self._granted[joiner] = {path: files[path]}

    patch.setattr(ResidualCheckpoints, "grant", generous)


def counts_no_lost_mass(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ResidualCheckpoints, "finish", lambda self: None)


def forgets_what_was_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ResidualCheckpoints, "keep", lambda self, executor, owner, kept: None)


def grants_again_on_return(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ResidualCheckpoints, "returned", lambda self, former, joiner: None)


def adds_its_grants_with_each_replica(patch: pytest.MonkeyPatch) -> None:
    take = TrainingLoop._take_grants

    def checkpoints(self: TrainingLoop) -> None:
        grants = self._grants
        take(self)
        self._grants = grants

    patch.setattr(TrainingLoop, "_take_grants", checkpoints)


def speaks_by_its_old_id(patch: pytest.MonkeyPatch) -> None:
    """After a return its endpoint goes on with the id that was closed."""
    carry = SimProcess._carry

    def forgetful(self: SimProcess, effect: ev.Effect) -> None:
        me = self.me
        carry(self, effect)
        if isinstance(effect, ev.Admitted) and effect.returned:
            self.me = me

    patch.setattr(SimProcess, "_carry", forgetful)


def publishes_by_its_old_id(patch: pytest.MonkeyPatch) -> None:
    """What was under way when it came back keeps its number."""
    patch.setattr(InFlight, "rekey", lambda self, closed, node, now_s: None)


def sees_orders_before_what_came_with_them(patch: pytest.MonkeyPatch) -> None:
    """The newest item is taken one boundary after the order that it belongs to."""
    take = TrainerInbox.take

    def torn(self: TrainerInbox) -> list[Any]:
        items = take(self)
        self._items = items[-1:]
        return items[:-1]

    patch.setattr(TrainerInbox, "take", torn)


def keeps_what_was_used_on_its_list(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ResidualCheckpoints, "used", lambda self, node: None)


# -- I2: each update once, each minibatch once ---------------------------------------------------


def numbers_a_repeat_again(patch: pytest.MonkeyPatch) -> None:
    number = Sequencer.number

    def forgetful(self: Sequencer, update: Update, *how: Any) -> Committed | None:
        last = self.last.get(update.origin)
        if last is not None and update.seq == last:
            self.last[update.origin] = last - 1
        return number(self, update, *how)

    patch.setattr(Sequencer, "number", forgetful)


def commits_another_payload(patch: pytest.MonkeyPatch) -> None:
    number = Sequencer.number

    def garbling(self: Sequencer, update: Update, *how: Any) -> Committed | None:
        return number(self, msgspec.structs.replace(update, payload=update.payload[:-2]), *how)

    patch.setattr(Sequencer, "number", garbling)


def goes_back_when_a_worker_dies(patch: pytest.MonkeyPatch) -> None:
    remove = Members.remove

    def forgetful(self: Members, *given: Any, **named: Any) -> Partition:
        partition = remove(self, *given, **named)
        partition.position = type(partition.position)(0, 0)
        return partition

    patch.setattr(Members, "remove", forgetful)


def counts_positions_before_their_updates(patch: pytest.MonkeyPatch) -> None:
    def hasty(self: CommitOrder, member: Member) -> None:
        if member.pending is not None:
            self._members.partition_of(member).advance(member.pending[1])

    patch.setattr(CommitOrder, "count_pending", hasty)


def releases_the_untrained(patch: pytest.MonkeyPatch) -> None:
    def blind(self: Vacancies, waiting: int, now_s: float) -> None:
        member = next(iter(self._members.live.values()))
        self._released_s, member.releasing = now_s, "a slot is needed"

    patch.setattr(Vacancies, "_release_one", blind)


# -- I3: equal bytes -------------------------------------------------------------------------------


def applies_twice(patch: pytest.MonkeyPatch) -> None:
    apply = SimReplica.apply_update

    def twice(self: SimReplica, committed: Committed) -> None:
        apply(self, committed)
        if committed.commit == 10:
            apply(self, committed)

    patch.setattr(SimReplica, "apply_update", twice)


def forgets_one(patch: pytest.MonkeyPatch) -> None:
    apply = SimReplica.apply_update

    def never(self: SimReplica, committed: Committed) -> None:
        if committed.commit == 10:
            self.commit = 10
        else:
            apply(self, committed)

    patch.setattr(SimReplica, "apply_update", never)


def applies_its_own_updates_twice(patch: pytest.MonkeyPatch) -> None:
    on_committed = Replication.on_committed

    def delivering(self: Replication, committed: Committed, now_s: float) -> list[ev.Effect]:
        own = committed.origin in self._membership.ids and committed.commit == self.received + 1
        payload = b"".join(u.payload for u in self._own.uncommitted if u.seq == committed.seq)
        effects = on_committed(self, committed, now_s)
        again = msgspec.structs.replace(committed, payload=payload)
        return [*effects, ev.Deliver(again)] if own else effects

    patch.setattr(Replication, "on_committed", delivering)


def applies_out_of_order(patch: pytest.MonkeyPatch) -> None:
    feed = SimProcess.feed

    def shuffled(self: SimProcess, event: ev.Event, now_s: float) -> None:
        feed(self, event, now_s)
        items = self._inbox._items
        if len(items) > 1 and all(isinstance(item, ev.Deliver) for item in items):
            items.reverse()

    patch.setattr(SimProcess, "feed", shuffled)


def begins_with_other_parameters(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sim_process, "SimReplica", lambda *given, whole: SimReplica(*given, whole=False))


def claims_a_replica_that_it_lacks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replication, "claims_whole", True)


def begins_without_its_grants(patch: pytest.MonkeyPatch) -> None:
    take = TrainingLoop._take

    def forgetful(self: TrainingLoop, item: Any) -> None:
        if isinstance(item, ev.Begin):
            self._grants = ()
        take(self, item)

    patch.setattr(TrainingLoop, "_take", forgetful)


def hashes_something_else(patch: pytest.MonkeyPatch) -> None:
    digest = SimReplica.digest
    calls = iter(range(10_000))
    patch.setattr(SimReplica, "digest", lambda self: "0" if next(calls) % 3 == 1 else digest(self))


def installs_without_its_own_updates(patch: pytest.MonkeyPatch) -> None:
    catch_up = Replication.catch_up

    def hasty(self: Replication, now_s: float) -> list[ev.Effect]:
        effects = catch_up(self, now_s)
        lossy = msgspec.structs.replace
        return [lossy(e, own=()) if isinstance(e, ev.Install) else e for e in effects]

    patch.setattr(Replication, "catch_up", hasty)


def installs_chunks_that_grew_old(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SnapshotFetch, "forget_useless", lambda self: None)


def trains_on_after_its_last_update(patch: pytest.MonkeyPatch) -> None:
    def naive(self: node.Node, state: Any, now_s: float) -> list[ev.Effect]:
        self.fit.state, self.fit.done = state, state.phase is state.phase.DONE
        return []

    patch.setattr(node.Node, "_on_state", naive)


def ends_without_audit(patch: pytest.MonkeyPatch) -> None:
    now = Directives.now

    def hasty(self: Directives) -> ev.Directive:
        command = now(self)
        if command.order is ev.Order.AUDIT:
            return directives.DONE
        return command

    patch.setattr(Directives, "now", hasty)


def lends_a_fresh_state(patch: pytest.MonkeyPatch) -> None:
    def generous(self: OptimizerTransfers) -> bool:
        trainer = self._trainer
        catching_up = trainer.activity is Activity.CATCHING_UP or self.fetch is not None
        return trainer.steps > 0 and not catching_up

    patch.setattr(OptimizerTransfers, "is_source", property(generous))


def claims_what_it_has_not_applied(patch: pytest.MonkeyPatch) -> None:
    on_committed = Replication.on_committed

    def hasty(self: Replication, committed: Committed, now_s: float) -> list[ev.Effect]:
        effects = on_committed(self, committed, now_s)
        self.history.applied = self.received
        return effects

    patch.setattr(Replication, "on_committed", hasty)


LOSSY = ROUGH | {"loss": 0.25, "crashes": 8, "step_s_max": 0.3, "window_bytes": 10_000}
LENDERS = ROUGH | {"crashes": 8, "loss": 0.25, "max_lead": 1, "publish_every": 1, "epochs": 6}

PLANTED: list[tuple[Plant, str, dict[str, Any]]] = [
    (drops_a_residual, "I1: p", {}),
    (grants_a_file_twice, "I1: e", {"kept_files": 4} | ROUGH),
    (counts_no_lost_mass, "I1: 0.0 of kept mass", {"kept_files": 4} | ROUGH),
    (forgets_what_was_kept, "I1: what", ROUGH),
    (
        grants_again_on_return,
        "I1:",
        {"kept_files": 4, "pauses": 6, "stop": 0.0, "failure": 0.0},
    ),
    (numbers_a_repeat_again, "I2: commit", ROUGH),
    (commits_another_payload, "I2: commit", ROUGH),
    (goes_back_when_a_worker_dies, "I2: partition", ROUGH),
    (goes_back_when_a_worker_dies, "I2: minibatch", ROUGH),
    (counts_positions_before_their_updates, "I2: partition", LOSSY),
    (releases_the_untrained, "I2: p", ROUGH | {"restart_s_max": 8.0}),
    (lends_a_fresh_state, "I3: p", LENDERS),
    (claims_what_it_has_not_applied, "I3: p", ROUGH),
    (applies_twice, "I3: p", ROUGH),
    (forgets_one, "I3: p", ROUGH),
    (applies_its_own_updates_twice, "I3: p", ROUGH),
    (applies_out_of_order, "I3: p", {}),
    (sees_orders_before_what_came_with_them, "I3: node", ROUGH),
    (speaks_by_its_old_id, "I4: p", ROUGH),
    (publishes_by_its_old_id, "I4: not over", ROUGH),
    (begins_with_other_parameters, "I3: p", {"whole": True}),
    (claims_a_replica_that_it_lacks, "I3: p", {"whole": False}),
    (begins_without_its_grants, "I1: ", {"whole": True, "kept_files": 4}),
    (hashes_something_else, "I3: node", ROUGH),
    (installs_without_its_own_updates, "I3: p", NARROW),
    (installs_chunks_that_grew_old, "I3: p", NARROW | {"log_bytes": 100, "loss": 0.25}),
    (
        trains_on_after_its_last_update,
        "I3: node",
        {"stop": 1.0, "late": 0.5, "failure": 0.0, "crashes": 0, "cuts": 4, "max_staleness": None},
    ),
    (ends_without_audit, "I3: p", ROUGH),
    (adds_its_grants_with_each_replica, "I1: p", {"kept_files": 4} | NARROW),
    (keeps_what_was_used_on_its_list, "I1: ", {"kept_files": 4} | ROUGH),
]


@pytest.mark.parametrize(
    ("plant", "begins", "given"), PLANTED, ids=lambda p: getattr(p, "__name__", "")
)
def test_a_planted_bug_is_caught(
    plant: Plant, begins: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert any(text.startswith(begins) for text in violations(given, SEEDS))


@pytest.mark.parametrize(
    "given",
    [ROUGH, NARROW, LOSSY, DEATHS, LENDERS],
    ids=["rough", "narrow", "lossy", "deaths", "lenders"],
)
def test_the_same_runs_are_clean_without_the_bug(given: dict[str, Any]) -> None:
    assert list(violations(given, range(8))) == []
