"""Interleavings: what a thread sees of another's unfinished work, at every instruction of it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest

from sparkstrom.codec.messages import Commit, MergedRange, Payload
from sparkstrom.codec.payload import encode_quanta
from sparkstrom.encoding.encoder import Encoder
from sparkstrom.encoding.thresholds import FixedThreshold
from sparkstrom.encoding.update_sum import UpdateSum
from sparkstrom.models.base import Batch
from sparkstrom.protocol.common.events_and_effects import (
    ApplyCommit,
    ApplyMergedRange,
    Command,
    Directive,
    Effect,
    Event,
    InstallSnapshot,
)
from sparkstrom.runtime import training_loop as trainer_inbox
from sparkstrom.runtime.node_thread import NodeThread
from sparkstrom.runtime.theta import Replica, snapshot_chunk_count
from sparkstrom.runtime.trainer_thread import TrainerChannel
from sparkstrom.runtime.training_loop import MergedCommits, TrainerInbox, TrainerItem
from tests.unit.runtime.faulty_channels import DirectiveFirstChannel, NoLock, UnlockedReadChannel
from tests.unit.runtime.fits import Mesh
from tests.unit.runtime.interleaved import at_every_instruction
from tests.unit.runtime.memories import backend, make_theta

K, N, TAU = 10, 300, 0.125
FILES = ("runtime/theta.py", "encoding/encoder.py", "encoding/residual.py")
CHANNELS = ("runtime/trainer_thread.py", "runtime/faulty_channels.py")
ITEMS = get_args(trainer_inbox.TrainerEffect)
BATCH = Batch(np.zeros((1, 1), np.float32), np.zeros(1, np.int64))
TRAIN = Directive(Command.TRAIN, steps_max=3)

MakeCommit = Callable[..., Commit]
Work = Callable[[Replica, MakeCommit], None]


# -- a chunk is served while the trainer changes theta ----------------------------------------


def apply_commit(replica: Replica, make_commit: MakeCommit) -> None:
    replica.apply_update(make_commit(1, 100))


def publish_update(replica: Replica, make_commit: MakeCommit) -> None:
    replica.step(BATCH)
    assert isinstance(replica.publish(), Payload)


def commit_own_update(replica: Replica, make_commit: MakeCommit) -> None:
    publish_update(replica, make_commit)
    replica.mark_committed(1)


def apply_sum(replica: Replica, make_commit: MakeCommit) -> None:
    total = np.full(N, 3, np.int32)
    payload = encode_quanta(UpdateSum.of_array(total))
    merged = MergedRange(after=0, commit=4, last=[], count=N, payload=payload)
    replica.apply_range(ApplyMergedRange(merged, ()))


def apply_sum_with_own_update(replica: Replica, make_commit: MakeCommit) -> None:
    publish_update(replica, make_commit)
    total = replica.theta.new_sum()
    assert total.add_update(make_commit(1, 100))
    replica.apply_merged(MergedCommits(total, 2, 1))


def take_averaged_buffers(replica: Replica, make_commit: MakeCommit) -> None:
    replica.take_buffers(b"average", 1)


def install_snapshot(replica: Replica, make_commit: MakeCommit) -> None:
    """Install a snapshot of another replica, with a commit that it lacks."""
    other = make_theta(N, K)
    other.add(other.decode(make_commit(1, 7).payload))
    other.buffers, other.commit = b"theirs", 5
    chunks = tuple(other.chunk(index) for index in range(snapshot_chunk_count(N)))
    replica.install(InstallSnapshot(chunks, (make_commit(6, 9),), (), 6))


WORKS = [
    apply_commit,
    publish_update,
    commit_own_update,
    apply_sum,
    apply_sum_with_own_update,
    take_averaged_buffers,
    install_snapshot,
]


@pytest.fixture
def replica(constant_step_model: Callable[..., Any]) -> Replica:
    encoder = Encoder(N, K, FixedThreshold(TAU), train_on="replica", backend=backend())
    return Replica(constant_step_model(N, TAU), make_theta(N, K), encoder, local=False)


def serve_snapshots_during(
    replica: Replica, make_commit: MakeCommit, work: Work
) -> tuple[Any, int]:
    """Serve a snapshot before each instruction of ``work``.

    Return (commit -> the different contents served for it, how often the lock was held).
    """
    served: dict[int, set[tuple[bytes, ...]]] = {}
    waited = 0

    def serve() -> None:
        nonlocal waited
        if replica._lock.locked():
            waited += 1  # the node's thread would wait for the lock
            return
        chunks = [replica.chunk(index) for index in range(snapshot_chunk_count(N))]
        (commit,) = {chunk.commit for chunk in chunks}
        served.setdefault(commit, set()).add(tuple(chunk.payload for chunk in chunks))

    with at_every_instruction(FILES, serve):
        work(replica, make_commit)
    serve()
    return served, waited


@pytest.mark.parametrize("work", WORKS)
def test_snapshot_during_change_has_one_content_per_commit(
    replica: Replica, make_commit: MakeCommit, work: Work
) -> None:
    """Each commit is served with one content, whenever the snapshot is read during a change."""
    served, waited = serve_snapshots_during(replica, make_commit, work)
    assert waited > 1
    assert {commit: len(contents) for commit, contents in served.items()} == dict.fromkeys(
        sorted({0, replica.theta.commit}), 1
    )


@pytest.mark.parametrize("work", WORKS)
def test_content_check_detects_missing_lock(
    replica: Replica, make_commit: MakeCommit, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above detects a missing lock."""
    monkeypatch.setattr(replica, "_lock", NoLock())
    served, _ = serve_snapshots_during(replica, make_commit, work)
    assert any(len(contents) > 1 for contents in served.values())


def test_chunk_has_concurrent_commit_whole_or_not_at_all(
    replica: Replica, make_commit: MakeCommit
) -> None:
    """The reverse: the trainer applies a commit between two instructions of the copy."""
    publish_update(replica, make_commit)  # subtracting an own update adds instructions to the copy
    contents = {0: replica.chunk(0).payload}
    at_line, lines = 0, 1
    while at_line <= lines:
        commit, lines, applied = len(contents), 0, False
        hits = replica.theta.read(make_commit(commit, 100).payload)

        def apply(commit: int = commit, hits: Any = hits, wanted: int = at_line) -> None:
            nonlocal lines, applied
            lines += 1
            if lines >= wanted and not applied and not replica._lock.locked():
                applied = True
                replica.apply(hits, commit)

        with at_every_instruction(FILES, apply):
            chunk = replica.chunk(0)
        if not applied:
            replica.apply(hits, commit)
        contents[commit] = replica.chunk(0).payload
        assert chunk.payload == contents[chunk.commit]
        at_line += 1
    assert lines > 5


# -- the trainer takes while the node's thread publishes, and the reverse ----------------------


def make_channel(kind: type[TrainerChannel] = TrainerChannel) -> TrainerChannel:
    """Return a channel whose lock has ``locked``."""
    channel = kind(TrainerInbox(10_000, make_theta(N, K).new_sum), wake=lambda: None)
    channel._changed = threading.Condition(threading.Lock())  # has ``locked``
    return channel


def is_held(channel: TrainerChannel) -> bool:
    """Return whether a thread holds the channel's lock."""
    lock: Any = channel._changed._lock  # type: ignore[attr-defined]
    return bool(lock.locked())


def read_during_publish(channel: TrainerChannel, item: TrainerItem) -> int:
    """Read the channel before each instruction of ``publish``; return the number of reads.

    Raise AssertionError if the directive is seen without its item.
    """
    taken: list[TrainerItem] = []
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        seen = channel.command  # may be read at any time
        if not is_held(channel):
            items, seen = channel.take()
            taken.extend(items)
        assert seen != TRAIN or item in taken or len(channel._inbox) > 0

    with at_every_instruction(CHANNELS, look):
        channel.publish([item], TRAIN)
    look()
    assert taken == [item]
    return looks


def test_directive_is_never_seen_before_its_items(make_commit: MakeCommit) -> None:
    """The trainer never sees a directive before the items that were published with it."""
    assert read_during_publish(make_channel(), ApplyCommit(make_commit(1, 1))) > 4


def test_publish_check_detects_directive_before_its_items(make_commit: MakeCommit) -> None:
    """The check detects a channel that sets the directive before it adds the items."""
    with pytest.raises(AssertionError):
        read_during_publish(make_channel(DirectiveFirstChannel), ApplyCommit(make_commit(1, 1)))


def publish_during_take(kind: type[TrainerChannel], item: TrainerItem) -> int:
    """Publish at each point of ``take`` in turn; return the number of points.

    Raise AssertionError if ``take`` returns the item without its directive, or the reverse.
    """
    at_point, points = 0, 1
    while at_point <= points:
        channel, points = make_channel(kind), 0
        published = False

        def publish(channel: TrainerChannel = channel, wanted: int = at_point) -> None:
            nonlocal points, published
            points += 1
            if points >= wanted and not published and not is_held(channel):
                published = True
                channel.publish([item], TRAIN)

        with at_every_instruction(CHANNELS, publish):
            items, command = channel.take()
        assert (items, command == TRAIN) in (([item], True), ([], False))
        if not published:
            channel.publish([item], TRAIN)
        again, command = channel.take()
        assert ([*items, *again], command) == ([item], TRAIN)
        at_point += 1
    return points


def test_item_published_during_take_is_taken_once_with_directive(
    make_commit: MakeCommit,
) -> None:
    """An item and its directive, published during ``take``, are taken together and once."""
    assert publish_during_take(TrainerChannel, ApplyCommit(make_commit(1, 1))) > 2


def test_take_check_detects_directive_taken_apart_from_items(make_commit: MakeCommit) -> None:
    """The check detects a channel that takes items and directive separately."""
    with pytest.raises(AssertionError):
        publish_during_take(UnlockedReadChannel, ApplyCommit(make_commit(1, 1)))


# -- what a duty cycle of the node's thread publishes -------------------------------------------


def find_torn_cycles(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> list[Directive]:
    """Run a fit; return the directives that were published before items that preceded them."""
    waiting, torn = Counter[TrainerChannel](), list[Directive]()
    perform, publish = NodeThread._perform, TrainerChannel.publish

    def performing(self: NodeThread, effect: Effect) -> None:
        perform(self, effect)
        waiting[self._channel] += isinstance(effect, ITEMS)

    def publishing(self: TrainerChannel, items: list[TrainerItem], command: Directive) -> None:
        waiting[self] -= len(items)
        if waiting[self]:
            torn.append(command)
        publish(self, items, command)

    monkeypatch.setattr(NodeThread, "_perform", performing)
    monkeypatch.setattr(TrainerChannel, "publish", publishing)
    mesh.begin()
    for partition in range(2):
        mesh.add_worker(partition)
    mesh.finish()
    return torn


def test_duty_cycle_publishes_directive_with_all_preceding_items(
    make_mesh: Callable[..., Mesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A duty cycle of the node publishes a directive together with all items before it."""
    assert find_torn_cycles(make_mesh(), monkeypatch) == []


def test_cycle_check_detects_directive_published_too_early(
    make_mesh: Callable[..., Mesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check detects a node that publishes directives before the end of the cycle."""
    step = NodeThread._step

    def hasty(self: NodeThread, event: Event) -> None:
        step(self, event)
        self._channel.publish([], self._machine.directive)

    monkeypatch.setattr(NodeThread, "_step", hasty)
    assert find_torn_cycles(make_mesh(), monkeypatch)
