"""Tests when a saved estimator needs a pickle: if a description cannot rebuild its model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparkstrom.spark.ml.persistence import _is_self_describing


@pytest.mark.parametrize(
    ("model", "enough"), [({"kind": "dense", "widths": [2, 1]}, True), ({"kind": "torch"}, False)]
)
def test_only_description_of_dense_network_needs_no_pickle(
    tmp_path: Path, model: dict[str, object], enough: bool
) -> None:
    """A dense network's description suffices to rebuild it; a torch model's does not."""
    description = tmp_path / "model.npz.json"
    description.write_text(json.dumps({"model": model}))
    assert _is_self_describing(description) is enough
