"""Tests that files written at commit 4b66307 (November 2026) can still be read."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import numpy as np

from sparkstrom.checkpoint.files import read_untrusted_checkpoint
from sparkstrom.checkpoint.saved_model import load_model
from sparkstrom.fit.checkpoints import read_resume_point
from sparkstrom.ml import SparkstromEstimator
from sparkstrom.models.base import from_description
from sparkstrom.observe.reporting.report_page import render_report
from sparkstrom.observe.reporting.run_log_reader import read_history

GOLDEN = Path(__file__).parents[1] / "golden"


def test_golden_network_gives_same_predictions() -> None:
    model, parameters, epochs = load_model(GOLDEN / "network.npz")
    model.bind(parameters)
    outputs = model.predict(np.load(GOLDEN / "network-inputs.npy"))
    np.testing.assert_allclose(outputs, np.load(GOLDEN / "network-outputs.npy"), atol=1e-6)
    assert epochs == 3


def test_golden_checkpoint_can_be_resumed() -> None:
    model, parameters, _ = load_model(GOLDEN / "network.npz")
    with (GOLDEN / "checkpoint.npz").open("rb") as file:
        found = read_resume_point("f.npz", read_untrusted_checkpoint(file, "f.npz"), model)
    assert (found.key.number, found.epochs, found.epochs_done) == (1, 3, 3)
    np.testing.assert_array_equal(found.parameters, parameters)
    assert [epoch["epoch"] for epoch in found.figures["whole"]] == [1, 2, 3]


def test_golden_run_log_renders_as_report() -> None:
    history = read_history(GOLDEN / "run.jsonl")
    assert len(history.fits) == 1
    assert "2 workers trained 3 epochs" in render_report(history)


def test_golden_estimator_metadata_can_be_read() -> None:
    text = (GOLDEN / "estimator/metadata/part-00000.txt").read_text()
    ours = json.loads(text)["sparkstrom"]
    assert from_description(ours["model"]).n_params == 23
    assert ours["master"] is None
    module, _, name = json.loads(text)["class"].rpartition(".")
    assert getattr(importlib.import_module(module), name) is SparkstromEstimator
