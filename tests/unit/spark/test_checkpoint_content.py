"""Tests of checkpoint content: what is saved of a fit, and how a later fit resumes from it."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.base.identity import Position
from sparkstrom.checkpoint.files import (
    Checkpoint,
    read_untrusted_checkpoint,
    write_checkpoint,
)
from sparkstrom.codec.optimizer_state_codec import encode_state
from sparkstrom.fit.checkpoints import (
    EARLIER_RUN,
    CheckpointContent,
    FitKey,
    ResumeAction,
    build_checkpoint,
    choose_resume_action,
    make_fit_key,
    read_resume_point,
)
from sparkstrom.fit.early_stopping_listener import Best
from sparkstrom.fit.summary import (
    TrainingSummary,
    summary_from_json,
    summary_of_skipped_fit,
    summary_to_json,
)
from sparkstrom.models import Adam, DenseNetwork, Sgd
from sparkstrom.models.base import FlatModel
from sparkstrom.protocol.common.fit_spec import FitSpec, PartitionStart
from sparkstrom.runtime.master_control import Snapshot
from sparkstrom.runtime.optimizer_states import OptimizerStates

WIDTHS = [4, 3, 2]
STARTS = (PartitionStart(Position(2, 1), 7, 9, 3), PartitionStart(Position(1, 0), 8, 2, 3))
WHOLE = {"epoch": 1, "loss": 0.5, "examples": 8, "validation": 0.25, "partitions": 2}
FIGURES = {
    "whole": [WHOLE],
    "parts": [[0, {"epoch": 1, "loss_sum": 0.5, "examples": 8}]],
}


def adam_state(model: FlatModel) -> bytes:
    """Return the encoded optimizer state of a model that has not trained."""
    model.bind(model.initial())
    state = model.updater_state()
    return encode_state({f"updater/{name}": value for name, value in state.items()})


def make_content(model: FlatModel, **changes: Any) -> CheckpointContent:
    """Return the content of a checkpoint of fit 2 with two workers."""
    parameters = np.arange(model.n_params, dtype=np.float32)
    made = CheckpointContent(
        FitKey(2),
        FitSpec(2, 5, model.n_params, "1", first_epoch=10, minibatches_before=40, starts=STARTS),
        "'auto'",
        Snapshot(17, parameters, b"buffers", STARTS),
        FIGURES,
        k=21,
        states=OptimizerStates(adam_state(model)),
        summaries={"1": {"loss": 0.25}},
    )
    return replace(made, **changes)


def write_and_read_checkpoint(checkpoint: Checkpoint) -> Checkpoint:
    """Write the checkpoint to a file in memory and return what is read back."""
    file = io.BytesIO()
    write_checkpoint(checkpoint, file)
    file.seek(0)
    return read_untrusted_checkpoint(file, "f.npz")


def saved(model: FlatModel, **changes: Any) -> Checkpoint:
    """Return the checkpoint of a fit with these changes, as it is read from a file."""
    return write_and_read_checkpoint(build_checkpoint(model, make_content(model, **changes)))


@pytest.fixture
def model() -> FlatModel:
    return DenseNetwork(WIDTHS, updater=Adam(0.01))


def test_checkpoint_file_restores_saved_values(model: FlatModel) -> None:
    """A checkpoint read from a file has the parameters, positions and figures that were saved."""
    copied = Snapshot(9, np.ones(model.n_params, np.float32), b"b", ())
    best = Best(3, "loss", 0.5, 9)
    found = read_resume_point("f.npz", saved(model, best=(best, copied)), model)
    assert (found.key, found.epochs, found.epochs_done) == (FitKey(2), 5, None)
    assert (found.k, found.first_epoch, found.minibatches_before) == (21, 10, 40)
    assert (found.parameters.tolist(), found.buffers) == (list(range(23)), b"buffers")
    assert found.starts == STARTS
    assert found.minibatches == 7 + 3
    assert found.complete_epochs == 1
    assert (found.figures, found.summaries) == (FIGURES, {"1": {"loss": 0.25}})
    assert found.best is not None
    assert (found.best[0], found.best[1].buffers) == (best, b"b")
    assert found.best[1].commit == EARLIER_RUN  # it is not a commit of this run


def make_partition_state(model: FlatModel, partition: int) -> bytes:
    """Return the optimizer state of a partition's worker that has taken 10 + partition steps."""
    model.bind(model.initial())
    state = model.updater_state() | {"steps": 10 + partition}
    named = {f"updater/{name}": value for name, value in state.items()}
    return encode_state(named | {"partition": partition})


def test_worker_states_are_restored_and_written_once(model: FlatModel) -> None:
    """Each worker's optimizer state is read back; a state with two uses is written once."""
    first, second = make_partition_state(model, 0), make_partition_state(model, 1)
    states = OptimizerStates(second, {0: first, 1: second})
    checkpoint = saved(model, states=states, wanted="all")
    found = read_resume_point("f.npz", checkpoint, model)
    assert (found.states, found.missing_states) == (states, ())
    names = {name for name in checkpoint.arrays if name.startswith("state")}
    assert names == {"state", "state_of_0"}
    assert checkpoint.description["updaters"] == {
        "wanted": "all",
        "own": {"0": "state_of_0", "1": "state"},
        "left_out": [],
    }


def test_missing_worker_states_are_listed_only_with_all(model: FlatModel) -> None:
    """With "all", workers without a saved state are listed as missing; with "one", none is."""
    first = make_partition_state(model, 0)
    states = OptimizerStates(first, {0: first})
    found = read_resume_point("f.npz", saved(model, states=states, wanted="all"), model)
    assert (found.states, found.missing_states) == (states, (1,))
    one = read_resume_point("f.npz", saved(model, states=OptimizerStates(first)), model)
    assert (one.states, one.missing_states) == (OptimizerStates(first), ())


def test_older_file_has_one_state_for_all_workers(model: FlatModel) -> None:
    """A file without "updaters", as older versions wrote it, has one state for all workers."""
    checkpoint = saved(model)
    del checkpoint.description["updaters"]
    found = read_resume_point("f.npz", checkpoint, model)
    assert (found.states, found.missing_states) == (OptimizerStates(adam_state(model)), ())


def test_rejects_worker_state_of_another_optimizer(model: FlatModel) -> None:
    other = DenseNetwork(WIDTHS, updater=Sgd(0.1))
    states = OptimizerStates(adam_state(model), {1: make_partition_state(other, 1)})
    with pytest.raises(UsageError, match="an optimizer state"):
        read_resume_point("f.npz", saved(model, states=states, wanted="all"), model)


def test_other_worker_count_resumes_after_last_complete_epoch(model: FlatModel) -> None:
    """The same number of workers resumes exactly; another number, after the last complete epoch."""
    found = read_resume_point("f.npz", saved(model), model)
    assert found.starts_for(2) == STARTS
    assert found.starts_for(3) == (PartitionStart(Position(1, 0)),) * 3
    assert found.figures_for(2) == FIGURES
    assert found.figures_for(3)["parts"] == []


def test_empty_partition_does_not_reduce_complete_epochs(model: FlatModel) -> None:
    """A partition without rows does not reduce the number of complete epochs."""
    empty = (*STARTS[:1], PartitionStart(Position(0, 0), 0, 0, 0))
    snapshot = replace(make_content(model).snapshot, partitions=empty)
    found = read_resume_point("f.npz", saved(model, snapshot=snapshot), model)
    assert found.starts_for(4)[0].position == (2, 0)


def test_rejects_checkpoint_with_other_parameter_shapes(model: FlatModel) -> None:
    with pytest.raises(UsageError, match=r"f.npz has parameter .*\[4, 3\].* in its place"):
        read_resume_point("f.npz", saved(model), DenseNetwork([2, 2, 2], updater=Adam()))


@pytest.mark.parametrize("options", [{"hidden": "tanh"}, {"loss": "squared_error"}])
def test_rejects_checkpoint_of_other_activation_or_loss(
    model: FlatModel, options: dict[str, Any]
) -> None:
    other = DenseNetwork(WIDTHS, updater=Adam(0.01), **options)
    with pytest.raises(UsageError, match=r"f\.npz is of a model with "):
        read_resume_point("f.npz", saved(model), other)


class Module(DenseNetwork):
    """A model described like a TorchModel, of whose code only the module's text is known."""

    text = "ReLU()"

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"kind": "torch", "text": self.text}


def test_skipped_fit_warns_if_module_text_changed() -> None:
    """The summary of a skipped fit warns if the module's text has changed since the checkpoint."""
    model = Module(WIDTHS, updater=Adam(0.01))
    content = saved(model, key=FitKey(3), epochs_done=5)
    model.text = "Tanh()"
    point = read_resume_point("f.npz", content, model)
    assert point.warning is not None
    assert "module='ReLU()', the given model has 'Tanh()' in its place" in point.warning
    assert point.warning in summary_of_skipped_fit(point, FitKey(3)).warnings


def test_rejects_checkpoint_of_another_optimizer(model: FlatModel) -> None:
    other = DenseNetwork(WIDTHS, updater=Sgd(0.1))
    with pytest.raises(UsageError, match=r"an optimizer state .* resume=False"):
        read_resume_point("f.npz", saved(model), other)


def test_description_is_json_with_positions_and_fit_key(model: FlatModel) -> None:
    said = json.loads(json.dumps(saved(model).description))
    assert said["partitions"] == [[2, 1, 7, 9, 3], [1, 0, 8, 2, 3]]
    assert said["key"] == {"number": 2, "stream": "", "batch": -1}


# -- which fit a checkpoint belongs to ---------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "epochs", "done", "use"),
    [
        (1, 5, None, ResumeAction.SKIP),
        (2, 5, None, ResumeAction.RESUME),
        (2, 9, None, ResumeAction.RESUME),
        (3, 5, None, ResumeAction.START_FROM),
        (2, 5, 5, ResumeAction.SKIP),
        (2, 4, 5, ResumeAction.SKIP),
        (2, 6, 5, ResumeAction.RESUME),  # more epochs are requested
        (2, 5, 3, ResumeAction.SKIP),  # stopped early
        (3, 5, 5, ResumeAction.START_FROM),
    ],
)
def test_fit_number_and_epochs_decide_resume_action(
    model: FlatModel, number: int, epochs: int, done: int | None, use: ResumeAction
) -> None:
    """A fit resumes a checkpoint of the same number, unless it is finished with enough epochs."""
    found = read_resume_point("f.npz", saved(model, epochs_done=done), model)
    assert choose_resume_action(found, FitKey(number), epochs) is use


@pytest.mark.parametrize(
    ("stream", "batch", "done", "use"),
    [
        ("q", 6, 1, ResumeAction.SKIP),
        ("q", 7, 1, ResumeAction.SKIP),
        ("q", 7, None, ResumeAction.RESUME),
        ("q", 8, 1, ResumeAction.START_FROM),
        ("another", 3, 1, ResumeAction.START_FROM),
        ("", -1, 1, ResumeAction.START_FROM),
    ],
)
def test_a_micro_batch_is_trained_once(
    model: FlatModel, stream: str, batch: int, done: int | None, use: ResumeAction
) -> None:
    """A micro-batch is identified by its query and number, not by its fit's number."""
    checkpoint = saved(model, key=FitKey(58, "q", 7), epochs_done=done, summaries={})
    found = read_resume_point("f.npz", checkpoint, model)
    assert choose_resume_action(found, FitKey(1, stream, batch), 5) is use


@pytest.mark.parametrize(
    ("key", "use"),
    [
        (FitKey(1), ResumeAction.SKIP),
        (FitKey(2), ResumeAction.START_FROM),  # a fit after the stream, which had no more rows
        (FitKey(1, "another", 0), ResumeAction.START_FROM),
        (FitKey(58), ResumeAction.START_FROM),
    ],
)
def test_fit_before_stream_with_saved_summary_is_skipped(
    model: FlatModel, key: FitKey, use: ResumeAction
) -> None:
    """A fit outside the stream is skipped if the stream's checkpoint has its summary."""
    summaries = {"1": {"loss": 0.5}, "58": {"loss": 0.25}}
    checkpoint = saved(model, key=FitKey(58, "q", 7), epochs_done=1, summaries=summaries)
    found = read_resume_point("f.npz", checkpoint, model)
    assert choose_resume_action(found, key, 5) is use


def test_fit_key_reads_query_and_batch_from_local_properties() -> None:
    """Query and batch number are read from Spark's local properties."""
    said = {"sql.streaming.queryId": "q", "streaming.sql.batchId": "7"}
    assert make_fit_key(3, said.get) == FitKey(3, "q", 7)
    assert make_fit_key(3, {}.get) == FitKey(3)


FALSE_OF_SKIPPED = ("0 workers", "diverged", "bit-identical", "0 minibatches", "All figures")


def test_skipped_fit_without_saved_summary_has_no_figures(
    model: FlatModel,
) -> None:
    """A skipped fit without a saved summary gets a warning, and no other fit's figures."""
    for summaries in ({}, {"2": {"loss": 0.25}}):
        content = saved(model, key=FitKey(3), summaries=summaries)
        point = read_resume_point("f.npz", content, model)
        assert choose_resume_action(point, FitKey(1), 5) is ResumeAction.SKIP
        made = summary_of_skipped_fit(point, FitKey(1))
        assert (made.n_params, made.minibatches, made.resumed_from) == (23, 0, "f.npz")
        assert np.isnan(made.loss)
        for text in (str(made), made.table(), made.table(all=True), made._repr_html_()):
            assert "This fit was skipped, and its figures are not known" in text
            assert "f.npz contains no summary of fit 1" in text
            assert not any(false in text for false in FALSE_OF_SKIPPED), text
        assert json.dumps(made.to_dict(), allow_nan=False)
        assert summary_from_json(summary_to_json(made)).history == []


def test_a_skipped_micro_batch_has_the_newest_summary(model: FlatModel) -> None:
    """A skipped micro-batch gets the newest summary in the checkpoint."""
    written = summary_to_json(replace(unknown(model), minibatches=7))
    content = saved(model, key=FitKey(3, "stream", 9), summaries={"4": written})
    point = read_resume_point("f.npz", content, model)
    assert summary_of_skipped_fit(point, FitKey(1, "stream", 8)).minibatches == 7


def unknown(model: FlatModel) -> TrainingSummary:
    """Return the summary of a skipped fit whose figures are not known."""
    return summary_of_skipped_fit(read_resume_point("f.npz", saved(model), model), FitKey(0))


class FrozenLayersModel(DenseNetwork):
    """A model with weights of frozen layers, which are neither parameters nor buffers."""

    def saved_buffers_bytes(self) -> bytes:
        return b" and frozen weights"


def test_checkpoint_contains_frozen_layer_weights() -> None:
    """They follow the snapshot's buffers, as in a saved model."""
    made = saved(FrozenLayersModel(WIDTHS, updater=Adam(0.01)))
    assert made.arrays["buffers"].tobytes() == b"buffers and frozen weights"
