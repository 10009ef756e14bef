"""Theta: snapshots of chunks from different commits, merged commits, overflows, the hash."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparkstrom.base.errors import WireError
from sparkstrom.codec.messages import BUFFERS, Chunk, Commit, MergedRange, Payload, Update
from sparkstrom.codec.payload import encode_theta
from sparkstrom.encoding.grid import EXACT_QUANTA
from sparkstrom.encoding.update_sum import UpdateSum
from sparkstrom.models.base import Flat
from sparkstrom.protocol.common.events_and_effects import ApplyMergedRange, SendMerged
from sparkstrom.runtime import theta as module
from sparkstrom.runtime.theta import snapshot_chunk_count
from tests.unit.runtime.memories import as_host_array, make_theta

K, N = 10, 300
MakeCommit = Callable[..., Commit]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_PARAMS", 128)


def make_own_update(commit: Commit) -> Update:
    """Return an update of this node with the payload of ``commit``."""
    return Update(
        origin=7,
        seq=1,
        seen=0,
        epoch=0,
        batch=0,
        steps=0,
        payload=commit.payload,
    )


def make_buffers_commit(commit: int) -> Commit:
    """Return a commit of buffers, which differ from commit to commit."""
    return Commit(
        commit=commit,
        origin=9,
        seq=commit,
        payload=Payload(BUFFERS, 0, 0, b"statistics of %d" % commit),
    )


@pytest.mark.parametrize(("n_params", "chunks"), [(1, 2), (128, 2), (129, 3), (300, 4)])
def test_chunks_cover_all_parameters_and_last_one_has_buffers(n_params: int, chunks: int) -> None:
    assert snapshot_chunk_count(n_params) == chunks
    theta = make_theta(n_params, K)
    theta.buffers = b"statistics"
    *parts, of_buffers = [theta.chunk(index).payload for index in range(chunks)]
    sizes = [len(part) // 4 for part in parts]
    assert sum(sizes) == n_params
    assert min(sizes) > 0
    assert of_buffers == b"statistics"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(data=st.data(), commits=st.integers(0, 6))
def test_chunks_of_different_commits_equal_direct_application(
    make_commit: MakeCommit,
    draw_grid_parameters: Callable[[int, int], Flat],
    data: st.DataObject,
    commits: int,
) -> None:
    """Chunks read at any commits, plus the commits they lack and own updates, equal theta."""
    server = make_theta(N, K)
    server.load(draw_grid_parameters(N, 2))
    read_at = [data.draw(st.integers(0, commits)) for _ in range(4)]
    chunks, log = [], []
    for commit in range(commits + 1):
        if commit:
            if data.draw(st.booleans()):
                log.append(make_buffers_commit(commit))
                server.buffers = log[-1].payload.data
            else:
                hits = data.draw(st.lists(st.integers(1, N), min_size=1, max_size=20, unique=True))
                log.append(make_commit(commit, *hits))
                server.add(server.decode(log[-1].payload))
            server.commit = commit
        chunks += [server.chunk(index) for index in range(4) if read_at[index] == commit]
    mine = make_commit(1, 1, -N)
    receiver = make_theta(N, K)
    receiver.load(draw_grid_parameters(N, 3))  # is overwritten
    held = [c for c in log if c.commit > min(read_at)]
    chunks.sort(key=lambda chunk: chunk.index)
    receiver.install(
        chunks, held, [make_own_update(mine), make_own_update(make_buffers_commit(1))], commits
    )
    server.add(server.decode(mine.payload))
    assert receiver.digest() == server.digest()
    assert receiver.commit == commits


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(data=st.data())
def test_snapshot_with_held_sums_equals_direct_application(
    make_commit: MakeCommit, draw_grid_parameters: Callable[[int, int], Flat], data: st.DataObject
) -> None:
    """Commits 1 to 8 are held singly or as sums; a chunk contains all of a sum or nothing."""
    ends = sorted(data.draw(st.sets(st.integers(1, 7), max_size=4)) | {8})
    read_at = [data.draw(st.sampled_from([0, *ends])) for _ in range(4)]
    server = make_theta(N, K)
    server.load(draw_grid_parameters(N, 2))
    chunks = [server.chunk(index) for index in range(4) if read_at[index] == 0]
    held: list[Commit | MergedRange] = []
    for after, end in zip([0, *ends], ends, strict=False):
        part = []
        for commit in range(after + 1, end + 1):
            hits = data.draw(st.lists(st.integers(1, N), min_size=1, max_size=20, unique=True))
            part.append(make_commit(commit, *hits))
            server.add(server.decode(part[-1].payload))
        server.commit = end
        one = len(part) == 1 and data.draw(st.booleans())
        sum_ = SendMerged(1, after, end, [(9, end)], 1, tuple(part))
        held.append(part[0] if one else server.merge(sum_))
        chunks += [server.chunk(index) for index in range(4) if read_at[index] == end]
    chunks.sort(key=lambda chunk: chunk.index)
    receiver, mine = make_theta(N, K), make_commit(1, 1, -N)
    receiver.install(chunks, held, [make_own_update(mine)], 8)
    server.add(server.decode(mine.payload))
    assert receiver.digest() == server.digest()


def test_install_without_held_commits_or_own_updates_equals_snapshot(
    draw_grid_parameters: Callable[[int, int], Flat],
) -> None:
    """Without held commits and own updates, the installed parameters are the snapshot."""
    server, receiver = make_theta(N, K), make_theta(N, K)
    server.load(draw_grid_parameters(N, 4))
    server.commit = 17
    server.buffers = b"statistics"
    receiver.install([server.chunk(i) for i in range(4)], [], [], 17)
    assert receiver.buffers == b"statistics"
    np.testing.assert_array_equal(receiver.to_host(), server.to_host())


@pytest.mark.parametrize(
    "payload",
    [bytes(4), encode_theta(np.full(128, 1e-5, np.float32))],
    ids=["too short", "off the grid"],
)
def test_install_rejects_short_chunk_and_off_grid_values(payload: bytes) -> None:
    """A chunk that is too short, or has values off the grid, raises WireError."""
    good = [make_theta(N, K).chunk(index) for index in (1, 2, 3)]
    with pytest.raises(WireError):
        make_theta(N, K).install([Chunk(index=0, commit=0, payload=payload), *good], [], [], 0)


def test_updates_and_sums_change_local_as_theta(make_commit: MakeCommit) -> None:
    """Updates and sums are added to both theta and ``local``."""
    theta = make_theta(N, K)
    local = as_host_array(theta.create_local())
    local += np.float32(0.25)
    theta.add(theta.decode(make_commit(1, 5).payload))
    theta.add_sum(UpdateSum.of_array(np.full(N, 1024, np.int32)))
    assert theta.to_host()[[4, 5]].tolist() == [1.125, 1.0]
    assert local[[4, 5]].tolist() == [1.375, 1.25]


def test_overflow_count_and_first_index_are_recorded(make_commit: MakeCommit) -> None:
    """Parameters that leave the exact range are counted; the index of the first one is kept."""
    theta = make_theta(N, K)
    values = theta.to_host()
    values[[4, 9]] = EXACT_QUANTA * theta.q
    theta.load(values)
    theta.add(theta.decode(make_commit(1, 5, 10).payload))
    assert (theta.overflows, theta.first_overflow) == (2, 4)
    theta.add_sum(UpdateSum.of_array(np.ones(N, np.int32)))
    assert theta.overflows > 2
    assert theta.first_overflow == 4


def test_chunk_excludes_own_uncommitted_updates(
    make_commit: MakeCommit, draw_grid_parameters: Callable[[int, int], Flat]
) -> None:
    """Chunks are computed without own uncommitted updates, which theta itself keeps."""
    theta, before = make_theta(N, K), draw_grid_parameters(N, 5)
    theta.load(before)
    mine = [
        theta.decode(make_commit(1, *hits).payload) for hits in ((1, -128, 129, 300), (1, 2, -300))
    ]
    for hits in mine:
        theta.add(hits)
    parts = [decode_theta(theta.chunk(index, mine)) for index in range(3)]
    np.testing.assert_array_equal(np.concatenate(parts), before)
    assert (theta.to_host() != before).sum() == 4  # theta itself is unchanged


def decode_theta(chunk: Chunk) -> Flat:
    return np.frombuffer(chunk.payload, np.float32)


def test_merged_range_minus_own_update_adds_only_other_commits(make_commit: MakeCommit) -> None:
    """A merged range minus this node's own update adds only the other nodes' commits."""
    theta, others = make_theta(N, K), make_theta(N, K)
    commits = [make_commit(i, *hits) for i, hits in enumerate([(1, 2), (2, -3), (3, 300)], 1)]
    first = theta.merge(SendMerged(1, 0, 2, [(9, 2)], 4, tuple(commits[:2])))
    whole = theta.merge(SendMerged(1, 0, 3, [(9, 3)], 6, (first, commits[2])))
    assert (first.after, first.commit, whole.after, whole.commit) == (0, 2, 0, 3)
    assert (whole.last, whole.count) == ([(9, 3)], 6)
    theta.add_sum(theta.read_merged(ApplyMergedRange(whole, (make_own_update(commits[1]),))))
    for commit in (commits[0], commits[2]):
        others.add(others.decode(commit.payload))
    assert theta.digest() == others.digest()


def test_buffers_are_part_of_the_digest() -> None:
    theta = make_theta(2, K)
    before = theta.digest()
    theta.buffers = b"x"
    assert theta.digest() != before


def test_digest_is_sha256_of_parameter_bytes() -> None:
    """The digest is the SHA-256 of the parameters' bytes."""
    theta = make_theta(2, K)
    zero = "af5570f5a1810b7af78caf4bc70a660f0df51e42baf91d4de5b2328de0e83dfc"  # of 8 zero bytes
    assert theta.digest() == zero
    theta.load(np.array([0, theta.q], np.float32))
    assert theta.digest() != zero


def test_int32_wraparound_in_sum_counts_as_overflow() -> None:
    """An entry of a sum that wrapped around in int32 is counted as an overflow."""
    theta = make_theta(64, K)
    total = UpdateSum(64)
    total.add((np.array([3], np.int32), np.array([2**31 - 1], np.int32)))
    total.add((np.array([3], np.int32), np.array([2**31 - 1], np.int32)))
    theta.add_sum(total)
    assert theta.overflows == 1
