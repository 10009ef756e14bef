"""Tests of options as JSON: only given options are written, and only our classes are read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sparkstrom import (
    AutoThreshold,
    EarlyStopping,
    SharedTrainingMaster,
    VoidConfiguration,
    WarmUp,
)
from sparkstrom.base.errors import UsageError
from sparkstrom.options.resolution import from_json, replace_options, to_json

MASTER = SharedTrainingMaster(
    VoidConfiguration(network_mask="10.0.0.0/8", port_range=(40000, 40009)),
    workers_per_node=2,
    threshold=AutoThreshold(1e-4),
    layer_multipliers={"layer 1": 2},
    warm_up=WarmUp(100),
    residual_post_processor=None,
)


@pytest.mark.parametrize(
    "value", [MASTER, SharedTrainingMaster(), EarlyStopping(patience=2, metric="accuracy"), None]
)
def test_json_round_trip_returns_equal_options(value: Any) -> None:
    found = from_json(json.loads(json.dumps(to_json(value))))
    assert found == value
    assert getattr(found, "given", None) == getattr(value, "given", None)


def test_json_contains_only_given_options() -> None:
    assert set(to_json(SharedTrainingMaster(rng_seed=3))) == {"class", "rng_seed"}


def test_replace_options_marks_only_changed_option_as_given() -> None:
    """Changing one option does not mark the default values of others as given."""
    found = replace_options(MASTER, rng_seed=7)
    assert (found.rng_seed, found.workers_per_node) == (7, 2)
    assert found.given == MASTER.given | {"rng_seed"}


def test_json_rejects_foreign_classes() -> None:
    with pytest.raises(UsageError, match=r"object.* cannot be saved"):
        to_json([object()])
    with pytest.raises(UsageError, match="'Popen', which is none of ours"):
        from_json({"class": "Popen", "args": ["x"]})
