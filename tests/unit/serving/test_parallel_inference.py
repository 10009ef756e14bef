"""Tests of parallel inference: each request gets its own answer, from exactly one model."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import pytest

from sparkstrom import InferenceMode, ParallelInference
from sparkstrom.base.errors import QueueFull, UsageError
from sparkstrom.models import DenseNetwork
from tests.unit.serving.conftest import (
    DEADLINE_S,
    MODES,
    WIDTH,
    BlockedServer,
    Probe,
    Watch,
    probe,
    rows,
    serving,
    wait_until_threads_wait,
)

QUEUED = [InferenceMode.SEQUENTIAL, InferenceMode.BATCHED]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [1, 3, 100])
def test_answers_equal_model_predictions_in_every_mode(mode: InferenceMode, count: int) -> None:
    """In every mode, answers equal the model's own predictions."""
    model = DenseNetwork([5, 8, 2], seed=3)
    features = np.random.default_rng(0).random((count, 5), np.float32)
    with ParallelInference(model, inference_mode=mode, workers=3) as inference:
        found = inference.output(features)
        assert inference.submit(features).result(DEADLINE_S).tolist() == found.tolist()
    model.bind(model.initial())
    assert found.tolist() == model.predict(features).tolist()


@pytest.mark.parametrize("mode", MODES)
def test_each_thread_gets_answer_to_its_own_request(watch: Watch, mode: InferenceMode) -> None:
    """With many threads, each gets the answer to its own request."""
    with (
        serving(1.0, inference_mode=mode, workers=3, queue_limit=64) as inference,
        ThreadPoolExecutor(32) as clients,
    ):
        asked = [rows(i, 1 + i % 4) for i in range(500)]
        answers = list(clients.map(inference.output, asked))
    for features, answer in zip(asked, answers, strict=True):
        assert (answer == features + 1).all()


def test_waiting_requests_are_batched_and_padded(watch: Watch) -> None:
    """Waiting requests are answered in one call, padded to a power of two."""
    held = BlockedServer(watch, batch_limit=8)
    asked = [held.inference.submit(rows(i)) for i in range(1, 6)]
    held.go_on()
    assert [one.result(DEADLINE_S)[0, 0] for one in asked] == [1, 2, 3, 4, 5]
    assert held.calls() == [8]  # five rows and three of padding


def test_sequential_mode_calls_model_once_per_request(watch: Watch) -> None:
    """In sequential mode, each request is a call of its own."""
    held = BlockedServer(watch, inference_mode="sequential")
    asked = [held.inference.submit(rows(i)) for i in range(1, 6)]
    held.go_on()
    assert [one.result(DEADLINE_S)[0, 0] for one in asked] == [1, 2, 3, 4, 5]
    assert held.calls() == [1] * 5


def test_batch_limit_holds_except_for_single_longer_request(watch: Watch) -> None:
    """A batch has at most ``batch_limit`` rows, except for a single longer request."""
    held = BlockedServer(watch, batch_limit=4)
    for count in (3, 2, 1, 100, 2):
        held.inference.submit(rows(1, count))
    held.go_on()
    assert held.calls() == [4, 4, 128]  # 3 + 1, 2 + 2, and 100 padded


def test_requests_of_different_row_shapes_are_not_batched(watch: Watch) -> None:
    """Requests whose rows have different shapes are not joined."""
    held = BlockedServer(watch, batch_limit=8)
    narrow = held.inference.submit(np.ones((1, 2), np.float32))
    wide = held.inference.submit(rows(5))
    held.go_on()
    assert narrow.result(DEADLINE_S).shape == (1, 2)
    assert wide.result(DEADLINE_S).shape == (1, WIDTH)
    assert held.calls() == [1, 1]


def test_failing_request_does_not_fail_its_batch(watch: Watch) -> None:
    """If a batch fails, only the requests that fail alone get the error."""
    held = BlockedServer(watch)
    good, bad, also = (held.inference.submit(rows(i)) for i in (1, -1, 2))
    held.go_on()
    assert good.result(DEADLINE_S)[0, 0] == 1
    assert also.result(DEADLINE_S)[0, 0] == 2
    with pytest.raises(ArithmeticError, match="negative"):
        bad.result(DEADLINE_S)
    assert held.inference.output(rows(3))[0, 0] == 3
    held.inference.close()


@pytest.mark.parametrize("mode", MODES)
def test_model_exception_is_raised_to_caller(watch: Watch, mode: InferenceMode) -> None:
    """An exception of the model is raised to the caller; later requests are answered."""
    with serving(inference_mode=mode) as inference:
        with pytest.raises(ArithmeticError, match="negative"):
            inference.output(rows(-1))
        with pytest.raises(ArithmeticError, match="negative"):
            inference.submit(rows(-1)).result(DEADLINE_S)
        assert inference.output(rows(1))[0, 0] == 1


@pytest.mark.parametrize("mode", QUEUED)
def test_request_to_full_queue_raises_at_once(watch: Watch, mode: InferenceMode) -> None:
    """A request to a full queue raises ``QueueFull`` at once; the waiting ones are answered."""
    held = BlockedServer(watch, queue_limit=2, inference_mode=mode)
    waiting = [held.inference.submit(rows(1)) for _ in range(2)]
    with pytest.raises(QueueFull, match="queue_limit=2: the queue is full"):
        held.inference.output(rows(1))
    held.go_on()
    assert [one.result(DEADLINE_S)[0, 0] for one in waiting] == [1, 1]
    assert held.inference.output(rows(7))[0, 0] == 7
    held.inference.close()


def test_inplace_request_beyond_queue_limit_raises(watch: Watch) -> None:
    """In place, too, a request beyond the waiting limit raises ``QueueFull``."""
    watch.gate.clear()
    inference = serving(inference_mode="inplace", workers=1, queue_limit=1)
    with ThreadPoolExecutor(2) as clients:
        asked = [clients.submit(inference.output, rows(i)) for i in range(2)]
        assert watch.entered.acquire(timeout=DEADLINE_S)
        while inference._inline_slots.acquire(blocking=False):  # until both requests have a slot
            inference._inline_slots.release()
        with pytest.raises(QueueFull):
            inference.output(rows(1))
        watch.gate.set()
        assert [one.result(DEADLINE_S)[0, 0] for one in asked] == [0, 1]
    inference.close()


def test_inplace_mode_predicts_in_calling_thread(watch: Watch) -> None:
    """In place, the model runs in the calling thread, and no other thread exists."""
    before = threading.active_count()
    with serving(inference_mode=InferenceMode.INPLACE) as inference:
        assert threading.active_count() == before
        inference.output(rows(1))
    assert watch.calls == [(1, threading.current_thread().name)]


@pytest.mark.parametrize("mode", MODES)
def test_model_replacement_neither_mixes_nor_drops_answers(
    watch: Watch, mode: InferenceMode
) -> None:
    """While models are replaced, each answer is of one model, and none is missing."""
    values = list(range(20))
    done = threading.Event()
    seen: list[float] = []

    def ask(_: int) -> int:
        count = 0
        while not done.is_set():
            answer = inference.output(rows(0, 5))
            assert len(set(answer.ravel().tolist())) == 1  # all rows are of one model
            seen.append(float(answer[0, 0]))
            count += 1
        return count

    with (
        serving(0.0, inference_mode=mode, workers=2) as inference,
        ThreadPoolExecutor(8) as clients,
    ):
        asked = [clients.submit(ask, i) for i in range(8)]
        try:
            for value in values:
                model, parameters = probe(value)
                inference.update_model(model, parameters=parameters)
                assert inference.output(rows(0))[0, 0] == value  # every request after the update
        finally:
            done.set()
        assert sum(one.result(DEADLINE_S) for one in asked) == len(seen)
    assert set(seen) <= set(map(float, values))


def test_queued_request_is_answered_by_new_model(watch: Watch) -> None:
    """Requests that wait during an update are answered by the new model."""
    held = BlockedServer(watch)
    waiting = held.inference.submit(rows(1))
    model, parameters = probe(10.0)
    held.inference.update_model(model, parameters=parameters)
    held.go_on()
    assert held.first.result(DEADLINE_S)[0, 0] == 0
    assert waiting.result(DEADLINE_S)[0, 0] == 11
    held.inference.close()


def test_waiting_inplace_request_is_answered_by_new_model(watch: Watch) -> None:
    """In place, too, a request that waits during an update is answered by the new model."""
    watch.gate.clear()
    with (
        serving(inference_mode="inplace", workers=1) as inference,
        ThreadPoolExecutor(2) as clients,
    ):
        first = clients.submit(inference.output, rows(0))
        assert watch.entered.acquire(timeout=DEADLINE_S)
        waiting = clients.submit(inference.output, rows(1))
        wait_until_threads_wait(inference._pool, 1)
        model, parameters = probe(10.0)
        inference.update_model(model, parameters=parameters)
        watch.gate.set()
        assert first.result(DEADLINE_S)[0, 0] == 0
        assert waiting.result(DEADLINE_S)[0, 0] == 11


def test_refused_replacement_leaves_old_model_in_service(watch: Watch) -> None:
    """A refused replacement leaves the old model in service."""
    with serving(2.0) as inference:
        with pytest.raises(UsageError, match="this model has float32"):
            inference.update_model(Probe([WIDTH, WIDTH]), parameters=np.zeros(1, np.float32))
        with pytest.raises(UsageError, match="model='model'"):
            inference.update_model("model")
        with pytest.raises(UsageError, match="this model has float32"):
            inference.update_model(Probe([WIDTH, WIDTH]), parameters=[0.0])  # type: ignore[arg-type]
        assert inference.output(rows(0))[0, 0] == 2


def test_cancelled_request_is_not_predicted(watch: Watch) -> None:
    """A cancelled request is not passed to the model."""
    held = BlockedServer(watch)
    gone, wanted = held.inference.submit(rows(1)), held.inference.submit(rows(2))
    assert gone.cancel()
    held.go_on()
    assert wanted.result(DEADLINE_S)[0, 0] == 2
    assert held.calls() == [1]


def test_cancelled_request_frees_its_queue_slot(watch: Watch) -> None:
    """A cancelled request frees its place in the queue and counts as done."""
    held = BlockedServer(watch, queue_limit=2)
    gone, stays = held.inference.submit(rows(1)), held.inference.submit(rows(2))
    assert gone.cancel()
    also = held.inference.submit(rows(3))
    assert gone in wait([gone], timeout=0).done  # wait() returns it as done
    with pytest.raises(QueueFull):
        held.inference.submit(rows(4))
    held.go_on()
    assert [one.result(DEADLINE_S)[0, 0] for one in (stays, also)] == [2, 3]
    held.inference.close()


def test_model_may_have_several_inputs_and_outputs() -> None:
    class Both(Probe):
        def predict(self, features: Any) -> Any:
            return {"sum": features["a"] + features["b"], "a": features["a"]}

    asked = {"a": rows(1, 3), "b": rows(2, 3)}
    with ParallelInference(Both([WIDTH, WIDTH])) as inference:
        found = inference.output(asked)
    assert found["sum"].tolist() == rows(3, 3).tolist()
    assert found["a"].shape == (3, WIDTH)


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8])
def test_submitted_array_may_be_changed_by_caller(watch: Watch, dtype: Any) -> None:
    """Arrays may be changed after ``submit``: the request has its own copy."""
    held = BlockedServer(watch)
    asked = rows(1).astype(dtype)
    waiting = held.inference.submit({"a": asked}), held.inference.submit(asked)
    asked[:] = 100
    held.go_on()
    assert [one.result(DEADLINE_S)[0, 0] for one in waiting] == [1, 1]
    held.inference.close()


def test_model_with_fewer_outputs_than_rows_is_refused() -> None:
    """A model that returns fewer outputs than rows raises ``UsageError``."""

    class Mean(Probe):
        def predict(self, features: Any) -> Any:
            return features.mean(axis=0)

    with (
        ParallelInference(Mean([WIDTH, WIDTH])) as inference,
        pytest.raises(UsageError, match="each row needs an output of its own"),
    ):
        inference.output(rows(1, 2))


@pytest.mark.parametrize(
    ("features", "words"),
    [(np.zeros((0, WIDTH)), "at least one row"), (3.0, "a single number"),
     ((np.zeros((2, 1)), np.zeros((3, 1))), "as many of each")],
)  # fmt: skip
@pytest.mark.parametrize("mode", MODES)
def test_empty_scalar_or_unequal_features_are_refused(
    features: Any, words: str, mode: InferenceMode
) -> None:
    """Features without rows, a single number, and inputs of unequal lengths are refused."""
    with serving(inference_mode=mode) as inference, pytest.raises(UsageError, match=words):
        inference.output(features)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"workers": 0}, "workers=0"), ({"batch_limit": 0}, "batch_limit=0"),
     ({"queue_limit": -1}, "queue_limit=-1"), ({"inference_mode": "fast"}, "'batched'"),
     ({"load_balance_mode": "fifo"}, "takes no load_balance_mode"), ({"batchlimit": 3}, "did you")],
)  # fmt: skip
def test_invalid_inference_option_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    """An invalid or unknown option raises ``UsageError`` with its name."""
    with pytest.raises(UsageError, match=words):
        serving(**options)


@pytest.mark.parametrize(
    ("features", "words"),
    [
        ("abc", "features are 'abc': give an array of numbers"),
        ([[1.0, 2.0], [3.0]], "give an array of numbers"),
        (np.zeros((2, 3), np.float32), "rows have 3 features, the network takes 8"),
    ],
)
def test_features_that_network_cannot_take_are_refused(features: Any, words: str) -> None:
    """Features that the network cannot take raise ``UsageError`` with the reason."""
    with (
        ParallelInference(DenseNetwork([8, 4]), workers=1) as inference,
        pytest.raises(UsageError, match=words),
    ):
        inference.output(features)


@pytest.mark.parametrize("mode", MODES)
def test_usage_error_of_model_is_result_of_submit(mode: InferenceMode) -> None:
    """A ``UsageError`` of the model is the result of ``submit``, in every mode."""
    with ParallelInference(DenseNetwork([8, 4]), inference_mode=mode) as inference:
        answer = inference.submit(np.zeros((2, 3), np.float32))
        assert isinstance(answer.exception(DEADLINE_S), UsageError)


def test_dl4j_option_name_is_refused_with_reason() -> None:
    """A Java name of a DL4J option is refused with the reason."""
    with pytest.raises(UsageError, match=r"^ParallelInference takes no loadBalanceMode: every"):
        ParallelInference(DenseNetwork([4, 3]), loadBalanceMode="FIFO")
