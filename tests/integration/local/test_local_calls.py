"""Tests of calls during a fit, from other threads and processes, and of evaluate's arguments."""

from __future__ import annotations

import os
import re
import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

from sparkstrom import ParallelWrapper
from sparkstrom.base.errors import SparkstromError, TrainingError, UsageError
from sparkstrom.models import DenseNetwork, Sgd
from sparkstrom.models.torch import TorchModel

LIMIT_S = 60.0
chance = np.random.default_rng(0)
FEATURES = chance.normal(size=(200, 4)).astype(np.float32)
LABELS = (FEATURES.sum(axis=1) > 0).astype(int)


class RunningFit:
    """A fit in its own thread; the constructor waits until it trains."""

    def __init__(self, wrapper: ParallelWrapper) -> None:
        self.error: BaseException | None = None
        self.summary: Any = None
        self._wrapper, self._trains = wrapper, threading.Event()
        self._thread = threading.Thread(target=self._fit, daemon=True)
        self._thread.start()
        assert self._trains.wait(LIMIT_S)

    def on_iteration(self, event: Any) -> None:
        if event.minibatches > 4:
            self._trains.set()

    def _fit(self) -> None:
        try:
            self.summary = self._wrapper.fit((FEATURES, LABELS), 4, listeners=[self], run_log="")
        except SparkstromError as error:
            self.error = error

    def end(self) -> None:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()


@pytest.fixture(params=["SHARED_GRADIENTS", "AVERAGING"])
def training(request: pytest.FixtureRequest, wrapper: Callable[..., ParallelWrapper]) -> Any:
    model = DenseNetwork([4, 8, 2], loss="cross_entropy")
    return wrapper(
        model, 2, training_mode=request.param, progress=False, batch_size_per_worker=8,
        debug_longer_iterations=20,
    )  # fmt: skip


@pytest.mark.slow
def test_a_second_fit_at_the_same_time_is_refused(training: ParallelWrapper) -> None:
    first = RunningFit(training)
    with pytest.raises(UsageError, match="is under way in another thread"):
        training.fit((FEATURES, LABELS), run_log="")
    first.end()
    assert first.summary.replicas_equal
    assert first.summary.examples == 4 * len(FEATURES)


@pytest.mark.slow
def test_closing_wrapper_during_fit_raises_training_error(training: ParallelWrapper) -> None:
    """A fit raises TrainingError if its wrapper is closed while it trains."""
    fit = RunningFit(training)
    training.close()
    fit.end()
    assert isinstance(fit.error, TrainingError)
    assert "was closed while it trained" in str(fit.error)
    assert training.worker_pids() == []


@pytest.mark.slow
def test_forked_process_does_not_affect_fit_of_parent(training: ParallelWrapper) -> None:
    """A forked process cannot use the wrapper, and its exit does not affect the parent's fit."""
    fit = RunningFit(training)
    ours, theirs = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: a fork despite threads
        child = os.fork()
    if not child:
        try:
            with training:
                training.fit((FEATURES, LABELS), run_log="")
        except BaseException as error:
            os.write(theirs, str(error).encode())
        training._closing()  # as at the interpreter's exit
        os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as heard:
        assert b"this one was forked from it" in heard.read()
    os.waitpid(child, 0)
    assert training._context.scratch.exists()
    fit.end()
    assert fit.summary.replicas_equal
    assert training.fit((FEATURES, LABELS), run_log="").replicas_equal


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["SHARED_GRADIENTS", "AVERAGING"])
@pytest.mark.parametrize("kind", ["dense", "torch"])
def test_epoch_loss_equals_loss_of_evaluate(
    pooled_wrapper: Callable[..., ParallelWrapper], mode: str, kind: str
) -> None:
    """Rows, class and ignored labels weigh in an epoch's loss as in the loss of ``evaluate``."""
    weights = np.where(np.arange(len(LABELS)) % 4, 0.0, 1.0 + np.arange(len(LABELS)) % 3)
    labels, model = LABELS, DenseNetwork([4, 8, 2], updater=Sgd(1e-30))
    if kind == "torch":
        labels = np.where(FEATURES[:, 0] > 0.5, 2, LABELS)  # 2 is ignored
        loss = torch.nn.CrossEntropyLoss(torch.tensor([1.0, 5.0, 2.0]), ignore_index=2)
        optimizer = partial(torch.optim.SGD, lr=1e-30)
        model = TorchModel(torch.nn.Linear(4, 3), loss, optimizer)
    made = pooled_wrapper(model, training_mode=mode, progress=False, batch_size_per_worker=2)
    data = FEATURES, labels, weights.astype(np.float32)
    summary = made.fit(data, 2, run_log="")
    expected = made.evaluate(data, "loss").loss
    assert [epoch.loss for epoch in summary.history] == pytest.approx([expected] * 2, rel=1e-5)
    assert summary.loss == pytest.approx(expected, rel=1e-5)
    assert summary.examples == 2 * len(LABELS)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["SHARED_GRADIENTS", "AVERAGING"])
def test_out_of_range_label_error_names_row(
    pooled_wrapper: Callable[..., ParallelWrapper], mode: str
) -> None:
    """Workers check all labels before training; ignored labels, and doubles, are accepted."""
    optimizer = partial(torch.optim.SGD, lr=0.1)
    model = TorchModel(torch.nn.Linear(4, 2), torch.nn.CrossEntropyLoss(), optimizer)
    made = pooled_wrapper(model, training_mode=mode, progress=False, batch_size_per_worker=8)
    labels = LABELS.astype(np.float64)
    labels[120], labels[150] = -100.0, 7.0
    with pytest.raises(UsageError) as error:
        made.fit((FEATURES, labels), run_log="")
    assert re.search(r"row 150 of the data: column 'label' \(label\) is 7", str(error.value))
    assert "labels must be 0 to 1, as the model returns 2 classes; renumber" in str(error.value)
    labels[150] = 1.0
    assert made.fit((FEATURES, labels), run_log="").examples == len(LABELS)
    assert model.known_classes is None  # the module may have other outputs in the next fit


def skip_every_step(module: Any, optimizer: Any, batch: Any) -> Any:
    """A training step that always overflows."""
    optimizer.zero_grad()
    return torch.tensor(float("nan"))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["SHARED_GRADIENTS", "AVERAGING"])
def test_a_models_warnings_in_workers_are_in_the_summary(
    pooled_wrapper: Callable[..., ParallelWrapper], mode: str
) -> None:
    """Of warnings from one place, the summary has each worker's last one."""
    optimizer = partial(torch.optim.SGD, lr=0.1)
    model = TorchModel(torch.nn.Linear(4, 2), None, optimizer, step=skip_every_step)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        made = pooled_wrapper(model, training_mode=mode, progress=False, batch_size_per_worker=8)
        summary = made.fit((FEATURES, LABELS), run_log="")
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    told = sorted(text for text in summary.warnings if "with a loss of NaN" in text)
    for partition, text in enumerate(told):
        assert re.match(rf"partition {partition} on .*: .*no gradient: 10;", text)
    assert len(told) == 2


def test_evaluate_accepts_same_data_as_fit(wrapper: Callable[..., ParallelWrapper]) -> None:
    """evaluate() takes arrays, tensors and datasets, and refuses other data and empty arrays."""
    made = wrapper(DenseNetwork([4, 8, 2], loss="cross_entropy"), 1, progress=False)
    found = made.evaluate((FEATURES, LABELS)).classification.accuracy
    tensors = torch.tensor(FEATURES), torch.tensor(LABELS)
    for data in (tensors, torch.utils.data.TensorDataset(*tensors)):
        assert made.evaluate(data).classification.accuracy == found
    with pytest.raises(UsageError, match="there are no rows to evaluate"):
        made.evaluate((FEATURES[:0], LABELS[:0]))
    with pytest.raises(UsageError, match="rows cannot be read from"):
        made.evaluate(3)
