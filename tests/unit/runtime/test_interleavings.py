"""What one thread sees of the other's half-done work, at every line where it could look."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sparkstrom.codec.messages import Committed, MergedRange
from sparkstrom.codec.payload import encode_quanta
from sparkstrom.encoding.encoder import Encoded, Encoder
from sparkstrom.encoding.thresholds import FixedThreshold
from sparkstrom.encoding.totals import Total
from sparkstrom.models.base import Batch
from sparkstrom.protocol.common.events import Deliver, DeliverMerged, Directive, Order
from sparkstrom.runtime.replica import Replica
from sparkstrom.runtime.theta import Theta
from sparkstrom.runtime.trainer_channel import TrainerChannel
from sparkstrom.runtime.trainer_inbox import TrainerInbox
from tests.unit.runtime.interleaved import at_every_line

K, N, TAU = 10, 300, 0.125
FILES = ("runtime/replica.py", "runtime/theta.py", "encoding/encoder.py")
BATCH = Batch(np.zeros((1, 1), np.float32), np.zeros(1, np.int64))
TRAIN = Directive(Order.TRAIN, steps_max=3)

MakeCommit = Callable[..., Committed]
Work = Callable[[Replica, MakeCommit], None]


# -- a chunk is served while the trainer changes theta ----------------------------------------


def applies(replica: Replica, make_commit: MakeCommit) -> None:
    replica.apply(replica.theta.read(make_commit(1, 100)), 1)


def publishes(replica: Replica, make_commit: MakeCommit) -> None:
    replica.step(BATCH)
    assert isinstance(replica.publish(), Encoded)


def sees_its_own_committed(replica: Replica, make_commit: MakeCommit) -> None:
    publishes(replica, make_commit)
    replica.passed(1)


def applies_a_sum(replica: Replica, make_commit: MakeCommit) -> None:
    total = np.full(N, 3, np.int32)
    payload = encode_quanta(Total.of_array(total))
    merged = MergedRange(after=0, commit=4, last=[], count=N, payload=payload)
    replica.apply_range(DeliverMerged(merged, ()))


@pytest.fixture
def replica(pushing: Callable[..., Any]) -> Replica:
    encoder = Encoder(N, K, FixedThreshold(TAU), train_on="replica")
    return Replica(pushing(N, TAU), Theta(N, K), encoder, local=False)


@pytest.mark.parametrize("work", [applies, publishes, sees_its_own_committed, applies_a_sum])
def test_a_chunk_is_what_its_commit_says_wherever_it_comes_in(
    replica: Replica, make_commit: MakeCommit, work: Work
) -> None:
    """A commit has one content: all of it, and nothing of another one."""
    served: dict[int, set[bytes]] = {}
    waited = 0

    def serve() -> None:
        nonlocal waited
        if replica._lock.locked():
            waited += 1  # the node's thread comes in when the lock is free again
            return
        chunk = replica.chunk(0)
        served.setdefault(chunk.commit, set()).add(chunk.payload)

    with at_every_line(FILES, serve):
        work(replica, make_commit)
    serve()
    assert waited > 1
    assert {commit: len(contents) for commit, contents in served.items()} == dict.fromkeys(
        sorted({0, replica.theta.commit}), 1
    )


def test_a_commit_that_comes_while_a_chunk_is_made_is_in_it_whole_or_not_at_all(
    replica: Replica, make_commit: MakeCommit
) -> None:
    """The other way round: the trainer goes on between two lines of the copy."""
    publishes(replica, make_commit)  # what is taken out of a copy makes it longer
    contents = {0: replica.chunk(0).payload}
    at_line, lines = 0, 1
    while at_line <= lines:
        commit, lines, applied = len(contents), 0, False
        hits = replica.theta.read(make_commit(commit, 100))

        def apply(commit: int = commit, hits: Any = hits, wanted: int = at_line) -> None:
            nonlocal lines, applied
            lines += 1
            if lines >= wanted and not applied and not replica._lock.locked():
                applied = True
                replica.apply(hits, commit)

        with at_every_line(FILES, apply):
            chunk = replica.chunk(0)
        if not applied:
            replica.apply(hits, commit)
        contents[commit] = replica.chunk(0).payload
        assert chunk.payload == contents[chunk.commit]
        at_line += 1
    assert lines > 5


# -- the trainer takes while the node's thread publishes, and the other way round -------------


def made() -> TrainerChannel:
    station = TrainerChannel(TrainerInbox(N, 10_000, Theta(N, K).decode))
    station._changed = threading.Condition(threading.Lock())  # one that says whether it is held
    return station


def is_held(station: TrainerChannel) -> bool:
    lock: Any = station._changed._lock  # type: ignore[attr-defined]
    return bool(lock.locked())


def test_who_sees_a_command_has_the_items_that_came_with_it(
    make_commit: MakeCommit,
) -> None:
    station, item, taken = made(), Deliver(make_commit(1, 1)), list[Any]()
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        seen = station.command  # may be read at any time
        if not is_held(station):
            items, seen = station.take()
            taken.extend(items)
        assert seen != TRAIN or item in taken or len(station._inbox) > 0

    with at_every_line(("runtime/trainer_channel.py",), look):
        station.publish([item], TRAIN)
    look()
    assert looks > 4
    assert taken == [item]


def test_what_is_published_while_somebody_takes_comes_whole_and_once(
    make_commit: MakeCommit,
) -> None:
    item, at_line, lines = Deliver(make_commit(1, 1)), 0, 1
    while at_line <= lines:
        station, lines = made(), 0
        published = False

        def publish(station: TrainerChannel = station, wanted: int = at_line) -> None:
            nonlocal lines, published
            lines += 1
            if lines >= wanted and not published and not is_held(station):
                published = True
                station.publish([item], TRAIN)

        with at_every_line(("runtime/trainer_channel.py",), publish):
            items, command = station.take()
        assert (items, command == TRAIN) in (([item], True), ([], False))
        if not published:
            station.publish([item], TRAIN)
        again, command = station.take()
        assert ([*items, *again], command) == ([item], TRAIN)
        at_line += 1
    assert lines > 2
