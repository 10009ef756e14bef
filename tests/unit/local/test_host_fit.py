"""A test of a resumed fit by gradient sharing on one machine, before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from sparkstrom import SharedTrainingMaster
from sparkstrom.base.identity import Position
from sparkstrom.local import fit_runner as host_fit
from sparkstrom.local.fit_runner import LocalFitContext, LocalFitRunner, PartitionedRows
from sparkstrom.models import DenseNetwork
from sparkstrom.protocol.common.fit_spec import FitSpec, PartitionStart
from sparkstrom.runtime.optimizer_states import OptimizerStates
from sparkstrom.runtime.theta import Theta


def test_position_after_last_minibatch_resumes_at_next_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A position after an epoch's last minibatch, as averaging may save it, is the next epoch."""
    for name in ("warm_up", "warm_up_transport"):
        monkeypatch.setattr(host_fit, name, lambda: None)
    saved = [Position(1, 7), Position(1, 3), Position(0, 0)]
    batches = (7, 7, 0)  # the last partition's count is unknown
    starts = tuple(
        PartitionStart(position, 50, 1, each) for position, each in zip(saved, batches, strict=True)
    )
    model = DenseNetwork([3, 2])
    spec = FitSpec(3, 4, model.n_params, "test", job=5, starts=starts)
    site = LocalFitContext(model, SharedTrainingMaster(), "a network", cast(Any, None), tmp_path)
    theta = Theta(model.n_params, 20)
    fit = LocalFitRunner(
        site, spec, theta, PartitionedRows((), tmp_path), cast(Any, {}), OptimizerStates()
    )
    assert [start.position for start in fit.spec.starts] == [(2, 0), (1, 3), (0, 0)]
    assert sum(start.minibatches for start in fit.spec.starts) == 14 + 10
