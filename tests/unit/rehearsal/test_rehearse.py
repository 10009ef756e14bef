"""Tests of ``ParallelWrapper.rehearse``: kinds of models, arguments, results and pages."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast
from xml.etree import ElementTree

import numpy as np
import pyarrow
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from sparkstrom import ParallelWrapper, UsageError
from sparkstrom.data.column_selection import ColumnSpec
from sparkstrom.data.row_sample import RowSampler, sample_blocks
from sparkstrom.local import parallel_wrapper, worker_pool
from sparkstrom.local.data import read_data_blocks
from sparkstrom.models.base import Batch
from sparkstrom.models.dense import DenseNetwork
from sparkstrom.models.updaters import Sgd
from sparkstrom.observe.progress import DisplayedFigures, ProgressDisplay, ProgressRate
from sparkstrom.rehearsal import rehearse as rehearse_module
from sparkstrom.rehearsal import runs as runs_module
from sparkstrom.rehearsal.conditions import StepTimes
from sparkstrom.rehearsal.fit import CurvePoint, SimulatedFit
from sparkstrom.rehearsal.rehearse import RehearsalRequest
from sparkstrom.rehearsal.result import (
    ALL_REDUCE,
    ONE_PROCESS,
    SPARKSTROM,
    Rehearsal,
    make_run,
    seconds_to,
)
from tests.unit.rehearsal.recipes import COLUMNS, ROWS, make_momentum_network, make_network, rows

SETTINGS: dict[str, Any] = {"step": "50ms", "epochs": 4, "workers": (1, 4)}


def torch_model() -> Any:
    torch = pytest.importorskip("torch")
    from sparkstrom.models.torch import TorchModel

    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Linear(COLUMNS, 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(16, 2),
    )
    optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    return TorchModel(module, torch.nn.CrossEntropyLoss(), optimizer)


def jax_model() -> Any:
    optax = pytest.importorskip("optax")
    jax = pytest.importorskip("jax")
    from sparkstrom.models.jax import JaxModel

    def init(key: Any) -> Any:
        return {"w": 0.1 * jax.random.normal(key, (COLUMNS, 2)), "b": jax.numpy.zeros(2)}

    def apply(params: Any, x: Any) -> Any:
        return x @ params["w"] + params["b"]

    loss = optax.softmax_cross_entropy_with_integer_labels
    return JaxModel(init, apply, loss, optax.sgd(0.1, momentum=0.9))


def keras_model() -> Any:
    pytest.importorskip("jax")
    os.environ.setdefault("KERAS_BACKEND", "jax")  # before Keras is imported
    keras = pytest.importorskip("keras")
    from sparkstrom.models.keras import KerasModel

    keras.utils.set_random_seed(0)
    layers = [keras.Input((COLUMNS,)), keras.layers.Dense(8, activation="tanh")]
    module = keras.Sequential([*layers, keras.layers.Dense(2, activation="softmax")])
    loss = keras.losses.SparseCategoricalCrossentropy()
    return KerasModel(module, loss, keras.optimizers.SGD(0.1, momentum=0.9))


def rehearsed(model: Any, **given: Any) -> Rehearsal:
    """Rehearse two workers with these settings; check that the parameters do not change."""
    with ParallelWrapper(model, workers=2, batch_size_per_worker=8, progress=False) as wrapper:
        before = wrapper.parameters
        made = wrapper.rehearse(rows(), **SETTINGS | given)
        np.testing.assert_array_equal(wrapper.parameters, before)
        return made


@pytest.fixture(scope="module")
def simulated() -> Rehearsal:
    return rehearsed(make_momentum_network(), validation=0.25, scaling="sequential,ddp", kill=1)


def test_rehearsal_compares_worker_counts_with_one_process_and_ddp(simulated: Rehearsal) -> None:
    """Results are of one process, each number of workers per scaling rule, and DDP."""
    assert [(run.system, run.workers, run.scaling) for run in simulated.runs] == [
        (ONE_PROCESS, 1, ""), (SPARKSTROM, 1, "sequential"),
        (SPARKSTROM, 4, "sequential"), (SPARKSTROM, 4, "ddp"), (ALL_REDUCE, 4, ""),
    ]  # fmt: skip
    one, *_, ours, _, ddp = simulated.runs
    assert simulated.is_held_out
    assert one.speedup == pytest.approx(1.0)
    assert ours.loss < one.points[0].measures["loss"]
    assert ours.accuracy is not None
    assert ours.accuracy > 0.8
    assert ours.deaths == 1
    assert ours.replicas_equal
    assert ours.times_fewer_bytes is not None
    assert ours.times_fewer_bytes > 2  # of such a small network
    assert ours.link_bytes["driver"][0] > ours.link_bytes["worker 1"][0]
    assert ddp.times_fewer_bytes == 1
    assert ours.points[-1].seconds == pytest.approx(ours.seconds, rel=0.1)
    assert [point.examples for point in ours.points] == sorted(p.examples for p in ours.points)


class SmallBatchFailingNetwork(DenseNetwork):
    """A network that fails on a small minibatch, like BatchNorm."""

    def step(self, batch: Batch) -> float:
        if batch.rows <= 8:
            raise ValueError(f"Expected more than 8 values, got {batch.rows}")
        return super().step(batch)


def test_failed_runs_are_listed_with_reason() -> None:
    """One process and the workers have minibatches of 8 rows, DDP with 4 ranks has 32."""
    made = rehearsed(SmallBatchFailingNetwork([COLUMNS, 8, 2]))
    *failed, ddp = made.runs
    assert [run.system for run in failed] == [ONE_PROCESS, SPARKSTROM, SPARKSTROM]
    assert all("Expected more than 8 values, got 8" in run.error for run in failed)
    assert str(made).count("got 8") == 3
    assert ddp.error == ""
    assert ddp.accuracy is not None
    assert ddp.accuracy > 0.7


class RecordingDisplay(ProgressDisplay):
    """A display that records the figures that it is asked to show."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[DisplayedFigures] = []

    def show(self, figures: DisplayedFigures, *, force: bool = False) -> None:
        self.shown.append(figures)


def test_displayed_progress_grows_over_all_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fraction done grows over all runs and ends at 1; each run has a phase of its own."""
    recorded = RecordingDisplay()
    monkeypatch.setattr(parallel_wrapper, "make_progress_display", lambda _: recorded)
    # On a busy machine, another process would simulate the last runs.
    monkeypatch.setattr(runs_module, "LONG_S", math.inf)
    rehearsed(make_momentum_network(), scaling="sequential,ddp")
    phases = list(dict.fromkeys(figures.phase for figures in recorded.shown))
    assert phases == [
        "rehearsing one process (1 of 5)",
        "rehearsing 1 worker, sequential (2 of 5)",
        "rehearsing 4 workers, sequential (3 of 5)",
        "rehearsing 4 workers, ddp (4 of 5)",
        "rehearsing DDP with 4 ranks (5 of 5)",
        "rehearsed",
    ]
    done = [figures.fraction_done for figures in recorded.shown]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0.0, 1.0)
    assert done[-2] == pytest.approx(1.0)  # before the last call
    assert len(set(done)) > 100
    rate = ProgressRate(remaining_s=65.0)
    assert recorded.shown[0].to_texts(rate) == ["1:05 left"]
    assert recorded.shown[-1].to_texts(rate) == []


def test_text_json_and_html_contain_all_runs(simulated: Rehearsal, tmp_path: Path) -> None:
    """The text, JSON and HTML contain all runs; a failed save raises ``UsageError``."""
    text = str(simulated)
    for run in simulated.runs:
        assert run.name in text
    again = json.loads(json.dumps(simulated.to_dict(), allow_nan=False))
    assert [run["workers"] for run in again["runs"]] == [1, 1, 4, 4, 4]
    assert again["conditions"]["times"]["step_s"] == 0.05
    page = tmp_path / "page.html"
    simulated.save(page)
    html = page.read_text()
    assert html.count("<svg") > 4
    assert "script" not in html
    assert ElementTree.fromstring(simulated._repr_html_()).find(".//table") is not None
    with pytest.raises(UsageError, match="cannot be written: No such file"):
        simulated.save(tmp_path / "none" / "page.html")


@pytest.mark.parametrize("make", [torch_model, jax_model, keras_model])
def test_rehearsal_of_framework_model_is_reproducible(make: Any) -> None:
    """Rehearsals of PyTorch, JAX and Keras models are reproducible with a seed."""
    first, again = (rehearsed(make(), workers=4, epochs=2) for _ in range(2))
    assert [run.digest for run in first.runs] == [run.digest for run in again.runs]
    assert [run.loss for run in first.runs] == [run.loss for run in again.runs]
    one, ours, _ = first.runs
    assert ours.loss < 0.9 * one.points[0].measures["loss"]
    assert ours.replicas_equal


def test_step_and_encoding_times_are_measured_without_step_option() -> None:
    """Without ``step``, the times of a step and of encoding are measured."""
    made = rehearsed(make_momentum_network(), step=None, workers=1, jitter=0.3)
    times = made.conditions.times
    assert 0 < times.step_s < 60
    assert 0 < times.encode_s < 60
    assert times.jitter == 0.3


class ThreadCountingNetwork(DenseNetwork):
    """A network that records how many threads the matrix library uses in its steps."""

    used: ClassVar[set[int]] = set()

    def step(self, batch: Batch) -> float:
        self.used.update(pool["num_threads"] for pool in threadpool_info())
        return super().step(batch)


@pytest.mark.parametrize(("step", "used"), [("50ms", {1}), (None, {1, 2})])
def test_simulated_steps_use_one_thread_and_measured_steps_more(
    monkeypatch: pytest.MonkeyPatch, step: Any, used: set[int]
) -> None:
    """Simulated steps use one thread; measured steps use as many as a worker has."""
    for module in (worker_pool, rehearse_module):
        monkeypatch.setattr(module, "count_cores", lambda: 4)
    monkeypatch.setattr(ThreadCountingNetwork, "used", set())
    if "torch" in sys.modules:  # loaded by another test: its first call sets OpenMP's threads
        sys.modules["torch"].get_num_threads()
    with threadpool_limits(3):
        before = threadpool_info()
        rehearsed(ThreadCountingNetwork([COLUMNS, 8, 2]), workers=2, step=step)  # with 2 workers
        assert threadpool_info() == before
    assert ThreadCountingNetwork.used == used


def test_unreached_to_loss_is_reported_without_time() -> None:
    """A loss that no run reaches has no time, and the text mentions it."""
    made = rehearsed(make_momentum_network(), to_loss=-1.0)
    assert made.runs[0].seconds_to_loss is None
    assert "not reached" in str(made)
    assert math.isfinite(made.best.loss)


def test_the_loss_to_reach_is_below_the_one_before_training() -> None:
    """Where the loss improves by less than 5 %, the default target is not the initial loss."""
    made = rehearsed(make_network(Sgd(3e-4)))
    first, lowest = (made.runs[0].points[i].measures["loss"] for i in (0, -1))
    assert lowest < first < 1.05 * lowest
    assert made.to_loss == pytest.approx(lowest + 0.05 * (first - lowest))
    quick = rehearsed(make_momentum_network())
    lowest = min(point.measures["loss"] for point in quick.runs[0].points)
    assert quick.to_loss == pytest.approx(1.05 * lowest)


def test_a_loss_before_training_is_not_called_reached_first() -> None:
    """If the target is not below the initial loss, the text asks for a lower one."""
    made = make_rehearsal(2.0, (ONE_PROCESS, "", 8.0, ""), (SPARKSTROM, "", 2.0, ""))
    assert made.verdict() == ["The loss is as low before training: give a lower to_loss."]


def test_infinite_loss_does_not_count_as_reached() -> None:
    """An infinite loss before the target is reached does not count as reached."""
    points = [
        SimpleNamespace(seconds=seconds, measures={"loss": loss})
        for seconds, loss in ((1.0, math.inf), (2.0, 0.5))
    ]
    simulated = cast(SimulatedFit, SimpleNamespace(points=points, error=""))
    assert seconds_to(simulated, 0.5) == 2.0


def make_rehearsal(to_loss: float | None, *fits: tuple[str, str, float, str]) -> Rehearsal:
    """Return a rehearsal of fits of 100 rows, whose loss falls from 2 to 0."""
    made = [
        SimulatedFit(
            workers=1 if system == ONE_PROCESS else 4,
            points=[CurvePoint(0.0, 0, {"loss": 2.0}), CurvePoint(seconds, 100, {"loss": 0.0})],
            seconds=seconds,
            examples=100,
            error=error,
        )
        for system, _, seconds, error in fits
    ]
    runs = tuple(
        make_run(system, rule, fit, made[0], to_loss=to_loss, n_params=9, link_bits_s=1e9)
        for (system, rule, _, _), fit in zip(fits, made, strict=True)
    )
    conditions = RehearsalRequest().conditions(StepTimes(1.0))
    return Rehearsal(runs, conditions, 9, 0.1, 100, 100, 1, 10, False, to_loss)


@pytest.mark.parametrize(
    ("straggler", "text"),
    [
        ("5x0.5", ["Slow workers: 3 of 4, with 0.5 times the speed."]),
        ("1x0.5", ["Slow workers: 1, with 0.5 times the speed."]),
        (None, []),
    ],
)
def test_the_slow_workers_are_counted_as_they_were_simulated(
    straggler: str | None, text: list[str]
) -> None:
    """At least one worker is not slow. Before, the text had the five that were asked for."""
    made = make_rehearsal(None, (ONE_PROCESS, "", 8.0, ""), (SPARKSTROM, "", 2.0, ""))
    conditions = RehearsalRequest.from_options(straggler=straggler).conditions(StepTimes(1.0))
    lines = replace(made, conditions=conditions).describe()
    assert [line for line in lines if line.startswith("Slow")] == text


@pytest.mark.parametrize("to_loss", [1.0, None])
def test_failed_run_has_no_times_and_is_never_best(to_loss: float | None) -> None:
    """A failed run has no times or speedup and is never the best."""
    made = make_rehearsal(
        to_loss,
        (ONE_PROCESS, "", 8.0, ""),
        (SPARKSTROM, "ddp", 1.0, "too far"),
        (SPARKSTROM, "limited", 2, ""),
    )
    _, failed, limited = made.runs
    assert (failed.seconds_to_loss, failed.speedup, failed.accuracy) == (None, None, None)
    assert limited.speedup == 4.0
    assert (made.best_scaling, made.pays_up_to) == ("limited", 4)
    alone = make_rehearsal(to_loss, (ONE_PROCESS, "", 8.0, ""), (SPARKSTROM, "ddp", 1.0, "too far"))
    assert (alone.best.system, alone.pays_up_to) == (ONE_PROCESS, 1)
    assert made.best is (limited if to_loss else made.runs[0])


def test_runs_have_no_speedup_if_single_process_failed() -> None:
    """If the single process failed, there are no speedups."""
    made = make_rehearsal(1.0, (ONE_PROCESS, "", 8.0, "too far"), (SPARKSTROM, "ddp", 1.0, ""))
    assert [run.speedup for run in made.runs] == [None, None]
    assert made.best is made.runs[1]
    without_loss = make_rehearsal(None, (ONE_PROCESS, "", 8.0, "bad"), (SPARKSTROM, "", 1.0, ""))
    assert without_loss.runs[1].speedup is None


def test_verdict_has_no_advice_if_all_runs_failed() -> None:
    """If all runs failed, the verdict has no advice and lists the failures."""
    systems = ((ONE_PROCESS, ""), (SPARKSTROM, "ddp"), (SPARKSTROM, "limited"))
    made = make_rehearsal(None, *((*system, 1.0, "too far") for system in systems))
    assert made.best is made.runs[0]
    advice, *failures = made.verdict()
    assert advice == "Every run failed, so there is no advice on the number of workers."
    assert len(failures) == 3
    assert all(line.endswith(" failed: too far") for line in failures)


@pytest.mark.parametrize(
    ("to_loss", "advice"),
    [
        (-1.0, ["No run reaches loss -1: add epochs.", "The lowest loss is that of one process."]),
        (None, ["The lowest loss is that of one process."]),
    ],
)
def test_no_run_is_called_the_fastest_if_none_reaches_a_loss(
    to_loss: float | None, advice: list[str]
) -> None:
    """Without a loss that is reached, the verdict does not say that one process is fastest."""
    made = make_rehearsal(to_loss, (ONE_PROCESS, "", 8.0, ""), (SPARKSTROM, "", 2.0, ""))
    assert made.verdict()[: len(advice)] == advice
    assert "Use one machine" not in str(made)


def test_losses_that_are_negative_are_plotted(tmp_path: Path) -> None:
    """A page draws curves of losses that fall to 0 or below, as log-likelihoods do."""
    made = make_rehearsal(-1.0, (ONE_PROCESS, "", 8.0, ""), (SPARKSTROM, "", 2.0, ""))
    made.save(page := tmp_path / "page.html")
    assert page.read_text().count("<polyline") == 4  # two runs over time, and over rows


def test_text_mentions_sample_size_and_total_rows() -> None:
    """If only a sample was trained, the text has both numbers of rows."""
    made = rehearsed(make_momentum_network(), rows=64, workers=2)
    assert (made.rows, made.rows_total) == (64, ROWS)
    assert "64 of 256 rows: an epoch of all takes 4 times as long" in str(made)


@pytest.mark.parametrize("given", [np.int64(4), np.array([4, 4]), {4}, iter([4])])
def test_workers_option_accepts_numpy_integers_and_iterables(given: Any) -> None:
    """``workers`` is an integer of Python or NumPy, or an iterable of them."""
    workers = RehearsalRequest.from_options(workers=given).workers
    assert [(type(count), count) for count in workers] == [(int, 4)]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"workers": ()}, r"workers=\(\): must be numbers of workers, such as"),
        ({"workers": (1, 0)}, "workers=0"),
        ({"workers": "1,4"}, "workers='1,4': must be numbers"),
        ({"workers": np.array(2.5)}, r"workers=array\(2.5\): must be numbers"),
        ({"workers": (10_000,)}, "workers=10000: at most 4,096"),
        ({"link": "fast"}, "link='fast': rate 'fast': write it as tc does"),
        ({"link": 0}, "link=0.0: must be finite and above 0"),
        ({"link": math.inf}, "link=inf: must be finite and above 0"),
        ({"latency": -1}, "latency=-1.0: must be 0 or more seconds"),
        ({"step": "soon"}, "step='soon': duration 'soon': write 300ms"),
        ({"jitter": 1.5}, "jitter=1.5: must be from 0 to below 1"),
        ({"straggler": "0.5"}, "straggler='0.5': write NUMBERxSPEED, such as '1x0.5'"),
        ({"straggler": "1x2"}, "straggler=2.0: must be above 0 and at most 1"),
        ({"kill": -1}, "kill=-1"),
        ({"kill": 10**9}, "kill=1000000000: must be at most 100,000 deaths"),
        ({"rows": 0}, "rows=0"),
        ({"seed": -1}, "seed=-1"),
        ({"scaling": "linear"}, "scaling='linear': must be of sequential, limited, ddp"),
        ({"scaling": 5}, r"scaling=5: must be rules, such as \('sequential', 'ddp'\)"),
        ({"scaling": None}, "scaling=None: must be rules"),
        ({"to_loss": math.nan}, "to_loss=nan: must be a finite number"),
        ({"stragler": "1x0.5"}, "rehearse knows no option stragler; did you mean straggler?"),
    ],
)
def test_invalid_option_raises_usage_error_with_name_and_value(
    given: dict[str, Any], words: str
) -> None:
    """An invalid option raises ``UsageError`` with its name and value."""
    with pytest.raises(UsageError, match=words):
        RehearsalRequest.from_options(**given)


def test_validation_rows_of_zero_weight_raise_usage_error() -> None:
    """Losses of rows without weight would be called infinite, as of a run that diverged."""
    features, labels = rows()
    weights = np.ones(len(labels), np.float32)
    data, held = (features, labels, weights), (features, labels, 0 * weights)
    with (
        ParallelWrapper(make_momentum_network(), workers=1, progress=False) as wrapper,
        pytest.raises(UsageError, match="on which losses are computed"),
    ):
        wrapper.rehearse(data, validation=held, **SETTINGS)


def test_repeated_scaling_rule_is_rehearsed_once() -> None:
    """Before, the rehearsal waited forever for a second run of the same name."""
    assert RehearsalRequest.parse(scaling="ddp,limited,ddp").scaling == ("ddp", "limited")


def test_more_workers_than_rows_raise_usage_error() -> None:
    """More workers than rows are refused."""
    with pytest.raises(UsageError, match="workers=300: the sample has 256 rows"):
        rehearsed(make_momentum_network(), workers=300)


def test_sample_has_requested_size_and_depends_only_on_seed() -> None:
    """A sample has the requested size, is spread over all rows and depends only on the seed."""
    data = np.arange(40_000, dtype=np.float32).reshape(20_000, 2), np.zeros(20_000, np.int64)

    def drawn(count: int, seed: int) -> Any:
        return sample_blocks(read_data_blocks(data, ColumnSpec()), count, seed)

    some, again, other = drawn(500, 0), drawn(500, 0), drawn(500, 1)
    assert (some.rows, some.total) == (500, 20_000)
    numbers = [np.concatenate([b.numbers for b in each.blocks]) for each in (some, again, other)]
    np.testing.assert_array_equal(numbers[0], numbers[1])
    assert not np.array_equal(numbers[0], numbers[2])
    assert 8_000 < numbers[0].mean() < 12_000
    assert drawn(50_000, 0).rows == 20_000


def test_a_sample_has_held_out_rows_although_they_are_few() -> None:
    """If the user names held-out rows, the sample has a tenth as many, or all of them."""
    features, held = np.arange(20_000, dtype=np.float32).reshape(-1, 1), np.zeros(20_000, bool)
    held[100:180] = True
    table = pyarrow.table({"x": features[:, 0], "y": held.astype(np.int64), "held": held})
    blocks = list(read_data_blocks(table, ColumnSpec(["x"], "y", None, "held")))
    for count, wanted in ((500, 50), (5_000, 80)):
        part = RowSampler(count, 0)
        for block in blocks:
            part.add(block)
        merged = RowSampler(count, 0)
        merged.merge(part.take(), part.total)
        sample = merged.finish()
        found = sum(int(b.form.held_out(b.records).sum()) for b in sample.blocks)
        assert wanted <= found < wanted + 10
        assert (sample.rows, sample.total) == (count, 20_000)
        drawn = sum(len(block.records) for block in sample.blocks)
        assert count <= drawn <= count + wanted


def test_merged_part_samples_have_requested_size_of_all_rows() -> None:
    """Samples of parts are merged into one of the requested size, of all parts' rows."""
    data = np.arange(4_000, dtype=np.float32).reshape(2_000, 2), np.zeros(2_000, np.int64)
    whole, merged = RowSampler(100, 0), RowSampler(100, 0)
    for block in read_data_blocks(data, ColumnSpec()):
        whole.add(block)
    for source in range(3):
        part = RowSampler(100, 0, source)
        for block in read_data_blocks(data, ColumnSpec()):
            part.add(block)
        merged.merge(part.take(), part.total)
    sample = merged.finish()
    assert (sample.rows, sample.total) == (100, 6_000)
    with pytest.raises(UsageError, match="the data have no rows to rehearse with"):
        RowSampler(100, 0).finish()
