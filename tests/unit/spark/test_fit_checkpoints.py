"""Tests of FitCheckpoints with real files: what a network's next fit does with a checkpoint."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from sparkstrom import SharedTrainingMaster, SparkNetwork
from sparkstrom.base.errors import ControllerLost, UsageError
from sparkstrom.checkpoint.directory import CheckpointDirectory
from sparkstrom.fit.checkpoints import (
    FitCheckpoints,
    FitKey,
    ResumeAction,
    ResumeDecision,
    build_checkpoint,
)
from sparkstrom.fit.fit_context import TaskSlots
from sparkstrom.fit.network_state import NetworkStateHolder
from sparkstrom.fit.session import FitSession
from sparkstrom.local.parallel_wrapper import ParallelWrapper
from sparkstrom.models import Adam, DenseNetwork
from sparkstrom.models.base import Flat, FlatModel
from sparkstrom.observe.progress_display import make_progress_display
from sparkstrom.runtime.optimizer_states import OptimizerStates
from tests.unit.spark.test_checkpoint_content import WIDTHS, Module, make_content

NOTHING: Any = None


@pytest.fixture
def model() -> FlatModel:
    return DenseNetwork(WIDTHS, updater=Adam(0.01))


@pytest.fixture
def directory(tmp_path: Path, model: FlatModel) -> str:
    """Return a directory with a checkpoint of a program's second fit, which is not finished."""
    CheckpointDirectory(str(tmp_path)).write(build_checkpoint(model, make_content(model)))
    return str(tmp_path)


def checkpoints(model: FlatModel, directory: str | None, **options: Any) -> FitCheckpoints:
    """Return the checkpoints of a new network, without fits, that uses this directory."""
    master = SharedTrainingMaster(checkpoint_directory=directory, **options)
    return FitCheckpoints(model, master, f"network {id(master)}")


def find(made: FitCheckpoints, said: list[str] | None = None) -> ResumeDecision | None:
    """Decide what the next fit, of 5 epochs, does; append its messages to ``said``."""
    said = [] if said is None else said
    return made.find(FitKey(made.fits + 1), 5, said.append)


def test_rerun_skips_finished_fits_and_resumes_unfinished_one(
    model: FlatModel, directory: str
) -> None:
    """A program that is run again skips finished fits and resumes the unfinished one, once."""
    made, said = checkpoints(model, directory), list[str]()
    first = find(made, said)
    assert first is not None
    assert first.action is ResumeAction.SKIP
    made.mark_ended(1)
    second = find(made, said)
    assert second is not None
    assert second.action is ResumeAction.RESUME
    made.mark_ended(2)
    assert find(made, said) is None  # the network's own parameters are newer
    assert "has the result of fit 1" in said[0]
    assert "it has 10 minibatches of fit 2, 1 of 5 epochs are complete" in said[1]


@pytest.mark.parametrize("done", [1, None])
def test_rerun_with_stream_skips_earlier_fits_and_micro_batches(
    tmp_path: Path, model: FlatModel, done: int | None
) -> None:
    """A program with a stream that is run again skips earlier fits and finished micro-batches.

    Of the micro-batches' summaries only the newest is restored, whether or not the checkpoint's own
    micro-batch was finished.
    """
    made = checkpoints(model, str(tmp_path))
    keys = FitKey(1), FitKey(2, "q", 0), FitKey(3, "q", 1)
    for key in keys:
        made.record_summary(key, {"fit": key.number})
        made.mark_ended(key.number)
    last = keys[-1] if done else FitKey(4, "q", 2)
    fit = make_content(model, key=last, epochs_done=done, summaries=made.summaries_for(last))
    CheckpointDirectory(str(tmp_path)).write(build_checkpoint(model, fit))
    again = checkpoints(model, str(tmp_path))
    actions = []
    for key in (FitKey(1), FitKey(2, "q", 1), FitKey(3, "q", 2)):
        found = again.find(key, 5, list[str]().append)
        assert found is not None
        assert found.checkpoint.summaries == {"1": {"fit": 1}, str(last.number): {"fit": 3}}
        actions.append(found.action)
        again.mark_ended(key.number)
    last_action = ResumeAction.START_FROM if done else ResumeAction.RESUME
    assert actions == [ResumeAction.SKIP, ResumeAction.SKIP, last_action]
    again.record_summary(FitKey(3, "q", 2), {"fit": 5})
    assert again.summaries_for(FitKey(4, "q", 3)) == {"1": {"fit": 1}, "4": {"fit": 5}}
    assert again.summaries_for(FitKey(4)) == {"1": {"fit": 1}}


def test_rerun_with_restore_repeats_neither_fit_nor_stream(
    tmp_path: Path, model: FlatModel
) -> None:
    """It uses the stream's checkpoint, whose network started from the restored parameters."""
    pretrained, own = str(tmp_path / "pretrained"), str(tmp_path / "own")
    first = make_content(model, key=FitKey(1), epochs_done=1, summaries={})
    path = CheckpointDirectory(pretrained).write(build_checkpoint(model, first))
    made = checkpoints(model, own)
    made.restore(path, pytest.fail)
    made.record_summary(FitKey(2), {"fit": 2})
    stream = FitKey(3, "q", 7)
    config = made.config(stream, 20, OptimizerStates())
    assert config is not None
    later = make_content(model, key=stream, summaries=config.summaries, ancestor=config.ancestor)
    CheckpointDirectory(own).write(build_checkpoint(model, later))
    again = checkpoints(model, own)
    again.restore(path, pytest.fail)
    actions = []
    for key in (FitKey(2), stream):
        found = again.find(key, 5, list[str]().append)
        assert found is not None
        actions.append(found.action)
        again.mark_ended(key.number)
    assert actions == [ResumeAction.SKIP, ResumeAction.RESUME]


def test_second_network_may_not_resume_from_same_directory(
    model: FlatModel, directory: str
) -> None:
    """A second network, as in a hyperparameter search, may not resume from the same directory."""
    first = checkpoints(model, directory)
    assert find(first) is not None
    second = checkpoints(model, directory)
    for _ in range(2):  # a second call of fit is refused, too
        with pytest.raises(UsageError, match="another network's of this program"):
            find(second)
    assert find(checkpoints(model, directory, resume=False)) is None


@pytest.mark.parametrize("other", ["ck", "./a/../ck/", "link", "file://{}/ck", "{}/ck"])
def test_directory_in_use_is_recognized_under_other_paths(
    tmp_path: Path, model: FlatModel, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """A directory in use is recognized as a relative path, a symbolic link or a URL."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ck").mkdir()
    (tmp_path / "link").symlink_to("ck")
    monkeypatch.setattr("sparkstrom.fit.checkpoints._directory_owners", {})
    addresses = (f"{tmp_path}/ck/", other.format(tmp_path), "ck2", "memory://ck/")
    first, same, *others = [checkpoints(model, address) for address in addresses]
    assert find(first) is None
    with pytest.raises(UsageError, match="another network's of this program"):
        find(same)
    assert [find(made) for made in others] == [None, None]


@pytest.mark.flips("SharedTrainingMaster.resume")
def test_resume_false_ignores_checkpoint(model: FlatModel, directory: str) -> None:
    """With resume=False, the first fit ignores the directory's checkpoint."""
    assert find(checkpoints(model, directory, resume=False)) is None
    assert find(checkpoints(model, directory)) is not None


@pytest.mark.flips("SharedTrainingMaster.checkpoint_directory")
def test_without_directory_no_checkpoint_is_read_or_configured(
    model: FlatModel, directory: str
) -> None:
    """Without checkpoint_directory, no checkpoint is read, and none is configured."""
    without, with_one = checkpoints(model, None), checkpoints(model, directory)
    assert find(without) is None
    assert without.config(FitKey(1), 20, OptimizerStates()) is None
    kept = with_one.config(FitKey(1), 20, OptimizerStates())
    assert kept is not None
    assert kept.directory.url == directory


@pytest.mark.flips("SharedTrainingMaster.checkpoint_every", "SharedTrainingMaster.keep_last")
def test_checkpoint_every_and_keep_last_configure_checkpoints(
    model: FlatModel, directory: str
) -> None:
    """checkpoint_every and keep_last set the interval and the number of checkpoints to keep."""
    kept = checkpoints(model, directory, checkpoint_every="2 epochs", keep_last=7).config(
        FitKey(1), 20, OptimizerStates()
    )
    assert kept is not None
    assert (kept.every.amount, kept.every.unit, kept.directory.keep_last) == (2, "epochs", 7)
    other = checkpoints(model, directory).config(FitKey(1), 20, OptimizerStates())
    assert other is not None
    assert (other.every.amount, other.every.unit, other.directory.keep_last) == (300, "s", 3)


def test_fit_after_failed_fit_rereads_newest_checkpoint(model: FlatModel, directory: str) -> None:
    """After a failed fit, the next one reads the newest checkpoint again and resumes from it."""
    made = checkpoints(model, directory)
    made.fits = 1
    assert find(made) is not None
    made.mark_failed()
    again = find(made)
    assert again is not None
    assert again.action is ResumeAction.RESUME


@pytest.mark.parametrize("by_hand", [True, False])
def test_fit_that_fails_before_running_keeps_its_checkpoint(
    model: FlatModel, directory: str, by_hand: bool
) -> None:
    """If a fit fails before it runs, the next one finds the same newest or restored checkpoint."""
    made = checkpoints(model, None if by_hand else directory)
    made.fits = 1
    if by_hand:
        made.restore(directory, pytest.fail)
    with pytest.raises(ZeroDivisionError), made.undo_find_on_error():
        fail_after_finding(made)
    again = find(made)
    assert again is not None
    assert again.action is ResumeAction.RESUME
    made.mark_ended(2)
    assert find(made) is None


def fail_after_finding(made: FitCheckpoints) -> None:
    """Find a checkpoint, then fail as if the rows could not be read."""
    assert find(made) is not None
    raise ZeroDivisionError("its rows cannot be read")


def test_interrupted_fit_consumes_its_checkpoint(model: FlatModel, directory: str) -> None:
    """The fit after an interrupted one does not use that one's checkpoint again."""
    made = checkpoints(model, directory)
    made.fits = 1
    with pytest.raises(KeyboardInterrupt), made.undo_find_on_error():
        be_interrupted(made)
    assert find(made) is None


def be_interrupted(made: FitCheckpoints) -> None:
    """Find a checkpoint, record that the fit is over, and raise KeyboardInterrupt."""
    assert find(made) is not None
    made.mark_ended(2)
    raise KeyboardInterrupt


@pytest.mark.parametrize("resume", [True, False])
def test_restored_checkpoint_is_reused_if_failed_fit_wrote_none(
    tmp_path: Path, model: FlatModel, directory: str, resume: bool
) -> None:
    """A restored checkpoint is used again after a fit that failed without writing one."""
    made = checkpoints(model, str(tmp_path / "new"), resume=resume)
    made.restore(directory, pytest.fail)
    assert find(made) is not None
    made.mark_failed()
    again = find(made)
    assert again is not None
    assert again.action is ResumeAction.RESUME


@pytest.mark.parametrize("wrote", [False, True])
@pytest.mark.parametrize("lost_first", [False, True])
@pytest.mark.parametrize("resume", [False, True])
def test_only_own_checkpoint_of_fit_replaces_restored_one(
    tmp_path: Path, model: FlatModel, directory: str, wrote: bool, lost_first: bool, resume: bool
) -> None:
    """A restored checkpoint is replaced only by one that its own failed fit wrote.

    The newer checkpoint that was in the directory before does not replace it. That holds also if a
    controller was lost after the fit wrote its checkpoint. With resume=False no checkpoint of the
    directory is ever read.
    """
    CheckpointDirectory(directory).write(build_checkpoint(model, make_content(model)))
    old, new = sorted(tmp_path.glob("*.npz"))
    made = checkpoints(model, directory, resume=resume)
    made.restore(str(old), pytest.fail)
    assert find(made) is not None
    fit = FitSession(NOTHING, made, cast(Any, SimpleNamespace(key=FitKey(2))), NOTHING, NOTHING)
    errors: list[Exception] = [OSError()]
    if lost_first:
        errors.insert(0, ControllerLost("it is gone", "killed"))
    for i, error in enumerate(errors):
        saving = SimpleNamespace(
            is_user_requested=True,
            newest=str(new) if wrote and i == 0 else None,
            close_failed=lambda: None,
        )
        with pytest.raises(type(error)):
            fit._run_one(failing_run(error), NOTHING, NOTHING, cast(Any, saving), None)
    again = find(made)
    assert again is not None
    assert again.checkpoint.path == str(new if wrote and resume else old)


def failing_run(error: Exception) -> Any:
    """Return an object whose method ``run`` raises this error."""

    def run(*_: Any) -> None:
        raise error

    return SimpleNamespace(run=run)


class TwoSlots:
    """A fake Spark application with two executors, which reads no rows."""

    is_stopped, live_conf, name = False, dict[str, str](), "app-1"
    cancel_jobs_on_interrupt, has_workers_output = nullcontext, True

    def conf(self) -> dict[str, str]:
        return {}

    def check(self, strategy: Any) -> None: ...

    def check_data(self, data: Any) -> None: ...

    def await_slots(self, seconds: float, notify: Any) -> TaskSlots:
        return TaskSlots(2, 1)

    def get_local_property(self, key: str) -> str | None:
        return None


def test_min_workers_refusal_keeps_checkpoint_for_next_call(
    model: FlatModel, directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fit that is refused because of min_workers leaves its checkpoint for the next call."""
    monkeypatch.setattr("sparkstrom.spark.network.make_application", lambda spark: TwoSlots())
    master = SharedTrainingMaster(checkpoint_directory=directory, min_workers=3)
    network = SparkNetwork(None, model, master, progress=False)
    monkeypatch.setattr(network, "_prepare", lambda slots, say: (2, []))
    network._checkpoints.fits = 1
    for _ in range(2):
        with pytest.raises(UsageError, match="min_workers=3"):
            network.fit(object(), epochs=5)
    again = find(network._checkpoints)
    assert again is not None
    assert again.action is ResumeAction.RESUME


@pytest.mark.parametrize("restores", [True, False])
@pytest.mark.parametrize("number", [1, 2, 3])  # skipped, resumes, starts from the checkpoint
def test_changed_module_warns_once_and_in_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, restores: bool
) -> None:
    """If the module differs from the saved one, one warning is shown and is in the summary."""
    said = list[str]()
    show = make_progress_display(progress=False)
    monkeypatch.setattr(type(show), "say", lambda self, text: said.append(text))
    model = Module(WIDTHS, updater=Adam(0.01))
    CheckpointDirectory(str(tmp_path)).write(
        build_checkpoint(model, make_content(model, summaries={}))
    )
    model.text = "Tanh()"
    directory = None if restores else str(tmp_path)
    options: dict[str, Any] = {"training_mode": "AVERAGING", "checkpoint_directory": directory}
    rows = np.zeros((4, WIDTHS[0]), np.float32), np.zeros(4, np.int64)
    with ParallelWrapper(model, 1, progress=False, **options) as wrapper:
        monkeypatch.setattr(wrapper, "_train", lambda request, theta, rows, reporting: reporting)
        if restores:
            wrapper.restore(tmp_path)
        wrapper._checkpoints.fits = number - 1
        result = wrapper.fit(rows, epochs=5)
    (warning,) = [text for text in said if "was saved from a model with module" in text]
    warned = [text for text in result.warnings if "was saved from a model" in text]
    assert [f"sparkstrom warns: {text}" for text in warned] == [warning]


@pytest.mark.parametrize("number", [2, 3])  # resumes, starts from the checkpoint
def test_changed_module_warning_is_in_spark_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """On Spark, too, the summary has a warning if the module differs from the saved one."""
    model = Module(WIDTHS, updater=Adam(0.01))
    CheckpointDirectory(str(tmp_path)).write(build_checkpoint(model, make_content(model)))
    model.text = "Tanh()"
    monkeypatch.setattr("sparkstrom.spark.network.make_application", lambda spark: TwoSlots())
    master = SharedTrainingMaster(checkpoint_directory=str(tmp_path))
    network = SparkNetwork(None, model, master, progress=False)
    monkeypatch.setattr(network, "_prepare", lambda slots, say: (2, []))
    monkeypatch.setattr(network, "_partition", lambda *args: SimpleNamespace(workers=2))
    monkeypatch.setattr(network, "_try_first_rows", lambda request, rows: None)
    monkeypatch.setattr(network, "_train", lambda request, rows, reporting: reporting)
    network._checkpoints.fits = number - 1
    (warning,) = cast(Any, network.fit(object(), epochs=5)).warnings
    assert "was saved from a model with module" in warning


def test_wrong_label_refusal_keeps_checkpoint_for_next_fit(
    model: FlatModel, directory: str
) -> None:
    """A fit that is refused because of a wrong label leaves its checkpoint for the next fit."""
    rows = np.zeros((4, WIDTHS[0]), np.float32), np.full(4, 99)
    options: dict[str, Any] = {"training_mode": "AVERAGING", "checkpoint_directory": directory}
    with ParallelWrapper(model, 2, progress=False, **options) as wrapper:
        wrapper._checkpoints.fits = 1
        with pytest.raises(UsageError, match=r"'label' \(label\) is 99: labels must be"):
            wrapper.fit(rows, epochs=5)
        again = find(wrapper._checkpoints)
    assert again is not None
    assert again.action is ResumeAction.RESUME


@pytest.mark.parametrize(
    ("done", "use"), [(None, ResumeAction.RESUME), (5, ResumeAction.START_FROM)]
)
def test_restored_checkpoint_is_used_by_next_fit(
    tmp_path: Path, model: FlatModel, done: int | None, use: ResumeAction
) -> None:
    """A restored checkpoint sets the network's state; the next fit resumes it or starts from it."""
    fit = make_content(model, epochs_done=done)
    path = CheckpointDirectory(str(tmp_path)).write(build_checkpoint(model, fit))
    made = checkpoints(model, None)
    learnt = NetworkStateHolder(model)
    learnt.load_checkpoint(made.restore(path, pytest.fail))
    assert learnt.parameters.tolist() == list(range(23))
    assert learnt.epochs == 10 + (done or 0)
    assert learnt.minibatches_before == 40 + 10
    found = find(made)
    assert found is not None
    assert found.action is use


@pytest.mark.parametrize("assigns", [True, False])
def test_assigned_parameters_replace_checkpoint_of_previous_fit(
    tmp_path: Path, model: FlatModel, assigns: bool
) -> None:
    """Assigned parameters replace the previous fit's older checkpoint, also after a failed fit."""
    made = checkpoints(model, str(tmp_path))
    assert find(made) is None
    done = make_content(model, key=FitKey(1), epochs_done=5)
    CheckpointDirectory(str(tmp_path)).write(build_checkpoint(model, done))
    made.mark_ended(1)
    if assigns:
        made.mark_assigned()
    for _ in range(2):
        made.mark_failed()
        found = find(made)
        assert (found is None) == assigns


def test_parameters_assigned_before_the_first_fit_do_not_hide_its_checkpoint(
    model: FlatModel, directory: str
) -> None:
    """A program that is run again, and again assigns parameters, resumes from its checkpoint."""
    made = checkpoints(model, directory)
    for number, action in ((1, ResumeAction.SKIP), (2, ResumeAction.RESUME)):
        made.mark_assigned()
        found = find(made)
        assert found is not None
        assert found.action is action
        made.mark_ended(number)


def test_assigned_parameters_replace_checkpoint_of_failed_fit(
    model: FlatModel, directory: str
) -> None:
    """Assigned parameters replace the failed fit's checkpoint until the retry writes its own."""
    made, said = checkpoints(model, directory), list[str]()
    made.mark_failed()
    made.fits = 1
    made.mark_assigned()
    for _ in range(2):
        assert find(made, said) is None
        assert "parameters were assigned after" in said[-1]
        made.mark_failed()
    made.mark_written()
    made.mark_failed()
    again = find(made)
    assert again is not None
    assert again.action is ResumeAction.RESUME


def test_restore_from_directory_without_checkpoint_names_it(
    tmp_path: Path, model: FlatModel
) -> None:
    """Restoring from a directory without a checkpoint raises UsageError, which names it."""
    with pytest.raises(UsageError, match=f"'{re.escape(str(tmp_path))}' contains no checkpoint"):
        checkpoints(model, None).restore(str(tmp_path), pytest.fail)


def test_saved_optimizer_states_are_used_by_one_fit_only(model: FlatModel, directory: str) -> None:
    """Optimizer states of a checkpoint are used by one fit, and then forgotten."""
    learnt = NetworkStateHolder(model)
    found = find(checkpoints(model, directory))
    assert found is not None
    learnt.load_checkpoint(found.checkpoint)
    assert learnt.resume_state(2)[1] == make_content(model).states
    learnt.forget_resume_state()
    assert learnt.resume_state(2) == ({}, OptimizerStates())
    assert learnt.minibatches_before == 0


@pytest.mark.parametrize(("workers", "own"), [(2, {1: b"own"}), (3, {})])
def test_own_optimizer_states_need_same_worker_count(
    model: FlatModel, directory: str, workers: int, own: dict[int, bytes]
) -> None:
    """Workers get their own optimizer states only if there are as many as in the checkpoint."""
    found = find(checkpoints(model, directory))
    assert found is not None
    learnt = NetworkStateHolder(model)
    learnt.load_checkpoint(replace(found.checkpoint, states=OptimizerStates(b"one", {1: b"own"})))
    assert learnt.resume_state(workers)[1] == OptimizerStates(b"one", own)


def test_failed_fit_is_rolled_back(model: FlatModel, directory: str) -> None:
    """A failed fit is rolled back; parameters are read-only, so the values to restore are safe."""
    learnt = NetworkStateHolder(model)
    found = find(checkpoints(model, directory))
    assert found is not None
    before, k = learnt.parameters.copy(), learnt.grid_exponent()
    with pytest.raises(RuntimeError, match="a worker"), learnt.rollback_on_error():
        fail_half_way(learnt, found)
    np.testing.assert_array_equal(learnt.parameters, before)
    assert (learnt.epochs, learnt.grid_exponent(), learnt.resume_state(2)) == (
        0,
        k,
        ({}, OptimizerStates()),
    )


def fail_half_way(learnt: NetworkStateHolder, found: ResumeDecision) -> None:
    """Load the checkpoint that was found, then fail as if a worker had failed."""
    with pytest.raises(ValueError, match="read-only"):
        learnt.parameters[0] = 99.0
    learnt.load_checkpoint(found.checkpoint)
    assert learnt.epochs
    raise RuntimeError("a worker")


def test_residual_files_are_forgotten_after_failed_fit(
    model: FlatModel, caplog: pytest.LogCaptureFixture
) -> None:
    """After a failed fit, residual files are forgotten with a warning; optimizer states stay."""
    learnt = NetworkStateHolder(model)
    kept = {"executor 1": {"/tmp/file": 0.5}}
    learnt._value = replace(learnt.value, kept=kept, states=OptimizerStates(b"one"))
    assert learnt.resume_state(2) == (kept, OptimizerStates(b"one"))
    with pytest.raises(ZeroDivisionError), learnt.rollback_on_error():
        fail_with_its_state(learnt)
    assert learnt.resume_state(2) == ({}, OptimizerStates(b"one"))
    assert "next fit starts without them" in caplog.text


def fail_with_its_state(learnt: NetworkStateHolder) -> None:
    """Hand the residual files and optimizer states to a fit, then fail."""
    learnt.forget_resume_state()
    raise ZeroDivisionError


def test_network_copies_initial_parameters_of_model(model: FlatModel) -> None:
    """A network copies the model's initial parameters; later changes to the array do not matter."""
    own = np.zeros(model.n_params, np.float32)
    learnt = NetworkStateHolder(InitialParametersModel(model, own))  # type: ignore[arg-type]
    own[:] = 7.0
    assert not learnt.parameters.any()


class InitialParametersModel:
    """A fake model that only has initial parameters."""

    def __init__(self, model: FlatModel, parameters: Flat) -> None:
        self._parameters, self.n_params = parameters, model.n_params

    def initial(self) -> Flat:
        return self._parameters


@pytest.mark.flips("SharedTrainingMaster.checkpoint_updaters")
def test_checkpoint_updaters_reaches_checkpoint_configuration(
    model: FlatModel, directory: str
) -> None:
    """checkpoint_updaters sets whether one worker's optimizer state is saved or all workers'."""
    for updaters in ("one", "all"):
        made = checkpoints(model, directory, checkpoint_updaters=updaters)
        kept = made.config(FitKey(1), 20, OptimizerStates())
        assert kept is not None
        assert kept.updaters == updaters


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"checkpoint_directory": ""}, "must be None, a path or a URL"),
        ({"checkpoint_every": "5 bananas"}, "5 min"),
        ({"keep_last": 0}, "keep_last=0"),
        ({"checkpoint_updaters": "both"}, "checkpoint_updaters='both': must be one of one, all"),
        ({"resume": "yes"}, "resume='yes'"),
    ],
)
def test_invalid_checkpoint_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        SharedTrainingMaster(**options)
