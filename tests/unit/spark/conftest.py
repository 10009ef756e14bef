"""A fixture that makes the job that a fit would send to executors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sparkstrom.base.identity import Endpoint
from sparkstrom.codec.sealed_frames import KEY_BYTES
from sparkstrom.models import DenseNetwork, Sgd
from sparkstrom.options.gradient_sharing import SharedTrainingMaster
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.worker.training_job import TrainingJob


@pytest.fixture
def make_job() -> Callable[..., TrainingJob]:
    """Return a function that makes a job of 4 workers; its keywords are SharedTrainingMaster's."""

    def make(**options: Any) -> TrainingJob:
        model = DenseNetwork([6, 3], updater=Sgd(0.5))
        return TrainingJob(
            spec=FitSpec(workers=4, epochs=2, n_params=model.n_params, version="1", job=1),
            key=bytes(KEY_BYTES),
            model=model,
            master=SharedTrainingMaster(**options),
            k=20,
            layers=None,
            endpoint=Endpoint("127.0.0.1", 1),
            join_stream=1,
            network="n",
        )

    return make
