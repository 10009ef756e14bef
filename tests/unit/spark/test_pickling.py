"""Models whose code is of the user's own script get to executors, in training and in inference."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.models import DenseNetwork
from sparkstrom.spark.driver.pickling import need_picklable
from sparkstrom.spark.executor.inference import TrainedModel


def local_model() -> DenseNetwork:
    """Of a class that no other process can import."""

    class Doubled(DenseNetwork):
        def predict(self, features):
            return 2 * super().predict(features)

    return Doubled([2, 3])


def test_a_trained_model_of_a_local_class_travels_by_plain_pickle() -> None:
    model = local_model()
    trained = TrainedModel.of(model, model.initial())
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


def test_what_cannot_be_pickled_is_named_by_its_path() -> None:
    class Holder(DenseNetwork):
        """Ships all it has."""

        def __getstate__(self):
            return self.__dict__

    model = Holder([2, 3])
    need_picklable(model)
    model.tools = {"names": ["a"], "locks": [1, threading.Lock()]}
    with pytest.raises(
        UsageError, match=r"Holder\.tools\['locks'\]\[1\] cannot be pickled.*_thread\.lock"
    ):
        need_picklable(model)
