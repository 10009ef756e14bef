"""Optimizer state server: when copies are made, how long they are kept, and their chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.clock import Clock
from sparkstrom.codec.messages import OptimizerChunk, OptimizerRequest, hash_optimizer_copy
from sparkstrom.codec.optimizer_state_codec import decode_state_untrusted, encode_state
from sparkstrom.runtime import optimizer_states as optimizer_lending
from sparkstrom.runtime.optimizer_states import OptimizerStateServer


@pytest.fixture
def model(constant_step_model: Callable[..., Any]) -> Any:
    made = constant_step_model(5)
    made.state = {"mean": np.arange(1000, dtype=np.float32), "steps": 4}
    return made


class ManualClock:
    """A clock that the test advances."""

    now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s


def make_server(clock: Clock | None = None) -> OptimizerStateServer:
    """Return a server with chunks of 1000 bytes."""
    return OptimizerStateServer(clock or ManualClock(), chunk_bytes=1000)


def state_encoder(model: Any) -> Callable[[], bytes]:
    return lambda: encode_state(model.updater_state())


def make_request(copy: int = 0, index: int = 0) -> OptimizerRequest:
    """Return a request of node 8; copy 0 requests the first chunk of any copy."""
    return OptimizerRequest(8, copy, index)


def test_no_copy_is_made_without_request(model: Any) -> None:
    """Without a request, the trainer makes no copy."""
    lender = make_server()
    model.updater_state = None  # would raise
    lender.at_boundary(state_encoder(model))


def test_chunks_contain_state_at_batch_boundary(model: Any) -> None:
    """Chunks contain the state at the batch boundary, even if training changes it afterwards."""
    lender = make_server()
    assert lender.chunk(make_request()) is None
    lender.at_boundary(state_encoder(model))
    first = lender.chunk(make_request())
    assert first is not None
    model.state["mean"] += 1  # training continues
    chunks = [lender.chunk(make_request(first.copy, index)) for index in range(first.count)]
    assert [chunk.index for chunk in chunks if chunk] == list(range(first.count))
    content = b"".join(chunk.payload for chunk in chunks if chunk)
    assert {(c.asker, c.copy) for c in chunks if c} == {(8, hash_optimizer_copy(content))}
    lent = decode_state_untrusted(content)
    np.testing.assert_array_equal(lent["mean"], np.arange(1000, dtype=np.float32))
    assert lent["steps"] == 4


def make_server_with_copy(
    model: Any, clock: Clock | None = None
) -> tuple[OptimizerStateServer, OptimizerChunk]:
    """Return a server that has made a copy, and the copy's first chunk."""
    lender = make_server(clock)
    lender.chunk(make_request())
    lender.at_boundary(state_encoder(model))
    first = lender.chunk(make_request())
    assert first is not None
    return lender, first


@pytest.mark.parametrize(("other", "index"), [(1, 2), (0, 1_000_000)])
def test_request_for_unknown_copy_or_chunk_gets_first_chunk(
    model: Any, other: int, index: int
) -> None:
    """A request for another copy, or a chunk that does not exist, gets the copy's first chunk."""
    lender, first = make_server_with_copy(model)
    assert first.count > 2
    assert lender.chunk(make_request(first.copy + other, index)) == first


def test_copies_of_two_workers_have_different_ids(model: Any) -> None:
    """Copies of two workers differ in their numbers even after equally many steps."""
    _, one = make_server_with_copy(model)
    model.state["mean"] = model.state["mean"] + 1  # the same step count, in another worker
    _, other = make_server_with_copy(model)
    assert model.state["steps"] == 4
    assert one.copy != other.copy


def test_copy_is_kept_while_requests_arrive_and_then_replaced(model: Any) -> None:
    """A copy is kept while requests arrive; when they stop, it is dropped, and later replaced."""
    clock = ManualClock()
    lender, first = make_server_with_copy(model, clock)
    for _ in range(3):
        clock.now_s += optimizer_lending.COPY_LIFETIME_S
        lender.at_boundary(state_encoder(model))
        assert lender.chunk(make_request(first.copy, 1)) is not None
    clock.now_s += optimizer_lending.COPY_LIFETIME_S + 1
    lender.at_boundary(state_encoder(model))
    assert lender.chunk(make_request(first.copy, 1)) is None
    model.state["steps"] = 7
    lender.at_boundary(state_encoder(model))
    anew = lender.chunk(make_request(first.copy, 1))
    assert anew is not None
    assert (anew.copy == first.copy, anew.index) == (False, 0)


def test_new_request_replaces_old_copy_that_no_node_fetches(model: Any) -> None:
    """A new request, as of a later checkpoint, replaces an old copy that no other node fetches."""
    clock = ManualClock()
    lender, first = make_server_with_copy(model, clock)
    assert lender.chunk(make_request()) == first  # repeated at once: the answer was lost
    other = OptimizerRequest(9, first.copy, 1)
    assert lender.chunk(other) is not None
    clock.now_s += optimizer_lending.COPY_FRESH_S + 0.1
    assert lender.chunk(make_request()) == first  # another node is fetching it
    clock.now_s += optimizer_lending.COPY_LIFETIME_S
    model.state["steps"] = 9
    assert lender.chunk(make_request()) is None
    lender.at_boundary(state_encoder(model))
    second = lender.chunk(make_request())
    assert second is not None
    assert second.copy != first.copy


def test_unfetched_copy_answers_repeated_request_even_if_old(model: Any) -> None:
    """A copy that no node has fetched yet answers repeated requests, even if it is old."""
    clock = ManualClock()
    lender = make_server(clock)
    assert lender.chunk(make_request()) is None
    lender.at_boundary(state_encoder(model))
    clock.now_s += optimizer_lending.COPY_FRESH_S + 1
    assert lender.chunk(make_request()) is not None


def test_early_request_is_answered_once_after_copy_is_made(model: Any) -> None:
    """A request that arrives before the copy exists is answered once, after the copy was made."""
    lender = make_server()
    lender.add_request(3, make_request())
    assert list(lender.ready_chunks()) == []
    lender.at_boundary(state_encoder(model))
    ((to, chunk),) = lender.ready_chunks()
    assert (to, chunk.asker, chunk.index) == (3, 8, 0)
    assert list(lender.ready_chunks()) == []
    lender.add_request(4, make_request(chunk.copy, 1))
    assert [(to, chunk.index) for to, chunk in lender.ready_chunks()] == [(4, 1)]
