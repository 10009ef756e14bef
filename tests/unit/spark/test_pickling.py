"""Tests of sending models of the user's own classes to executors, and of what is logged then."""

from __future__ import annotations

import contextlib
import logging
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from py4j.protocol import get_command_part

from sparkstrom.base.errors import UsageError
from sparkstrom.models import DenseNetwork
from sparkstrom.spark.executor.entry_points import (
    SENDING_LOGGERS,
    pickle_by_value,
    redact_pickled_tasks,
)
from sparkstrom.spark.executor.inference import TrainedModel
from sparkstrom.worker.training_job import require_picklable
from tests.key_forms import forms_of


def local_model() -> DenseNetwork:
    """Return a model of a class that no other process can import."""

    class Doubled(DenseNetwork):
        def predict(self, features):
            return 2 * super().predict(features)

    return Doubled([2, 3])


def test_trained_model_of_local_class_unpickles_in_other_process() -> None:
    """A pickled TrainedModel of a local class can be loaded and used in another process."""
    model = local_model()
    trained = TrainedModel.from_model(model, model.initial())
    program = """
import pickle, sys
import numpy as np
trained = pickle.load(sys.stdin.buffer)
print(trained.open().predict(np.zeros((1, 2), np.float32)).sum())
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=pickle.dumps(trained),
        capture_output=True,
        check=True,
    )
    assert float(done.stdout) == pytest.approx(2.0)
    again = pickle.loads(pickle.dumps(trained))
    assert again.digest == trained.digest
    np.testing.assert_array_equal(again.parameters, trained.parameters)


def test_unpicklable_attribute_is_named_by_path() -> None:
    """An attribute that cannot be pickled is named by its path within the model."""

    class Holder(DenseNetwork):
        """A model that is pickled with all its attributes."""

        def __getstate__(self):
            return self.__dict__

    model = Holder([2, 3])
    require_picklable(model, pickle_by_value)
    model.tools = {"names": ["a"], "locks": [1, threading.Lock()]}
    with pytest.raises(
        UsageError, match=r"Holder\.tools\['locks'\]\[1\] cannot be pickled.*_thread\.lock"
    ):
        require_picklable(model, pickle_by_value)


def test_debug_logs_contain_no_pickled_tasks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Debug logs of py4j and Spark Connect contain no pickled tasks.

    The logged commands have the form that py4j makes, and the plan the form of protobuf's text.
    """
    key = bytes(range(128, 160))
    commands = [
        "i\norg.apache.spark.api.python.SimplePythonFunction\n"
        + get_command_part(bytearray(bytes(shift) + key), {})
        + get_command_part("3.11", {})
        + "e\n"
        for shift in range(3)
    ]
    plan = 'python_udf { eval_type: 207\n command: "a\\"' + octal(key) + '"\n python_ver: "3.11" }'
    redact_pickled_tasks()
    redact_pickled_tasks()
    for name in SENDING_LOGGERS:
        sending = logging.getLogger(name)
        with caplog.at_level(logging.DEBUG, sending.name), enabled(sending):
            for command in commands:
                sending.debug(f"Command to send: {command}")  # as py4j does
            sending.debug(f"Request: {plan}")
    assert len(caplog.messages) == 4 * len(SENDING_LOGGERS)
    for message in caplog.messages:
        assert "3.11" in message
        assert not any(form in message for form in forms_of(key))
        assert octal(key[:8]) not in message


@contextlib.contextmanager
def enabled(logger: logging.Logger) -> Iterator[None]:
    """Enable a logger for the block, because Spark Connect disables its own."""
    was, logger.disabled = logger.disabled, False
    yield
    logger.disabled = was


def octal(content: bytes) -> str:
    """Return bytes as octal escapes, as in protobuf's text."""
    return "".join(f"\\{byte:03o}" for byte in content)
