"""Tests of ``benchmarks.convergence``: settings, baselines, and small runs of each system."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")

from benchmarks.convergence import __main__ as command_line  # noqa: E402
from benchmarks.convergence import baselines, texts  # noqa: E402
from benchmarks.convergence.__main__ import parsed, runs, trials  # noqa: E402
from benchmarks.convergence.baselines import BASELINES, baseline, ddp  # noqa: E402
from benchmarks.convergence.ours import simulator_of, train  # noqa: E402
from benchmarks.convergence.powersgd import PowerSGD  # noqa: E402
from benchmarks.convergence.settings import Settings  # noqa: E402
from benchmarks.convergence.table import Result, table  # noqa: E402
from benchmarks.convergence.tasks import TASKS  # noqa: E402
from benchmarks.convergence.trial import Learner, Outcome, Trial, measured  # noqa: E402
from sparkstrom.rehearsal.fit import SimulatedFit  # noqa: E402

DIGITS = Trial("digits", "sgd", 4, 0, 0.3, epochs=2)
CONV = Trial("conv", "momentum", 4, 0, 0.05, epochs=2)


def simulate_fit(settings: Settings, trial: Trial = DIGITS) -> SimulatedFit:
    return simulator_of(trial, settings).run()


@pytest.mark.parametrize("system", BASELINES)
def test_each_baseline_learns_and_counts_its_bytes(system: str) -> None:
    """Each baseline lowers the loss, and all but DDP send fewer bytes than dense updates."""
    before = measured(DIGITS.task.module(0), DIGITS.task, DIGITS.task.split().test)
    outcome = baseline(system)(DIGITS)
    assert outcome.test["loss"] < 0.95 * before["loss"]
    assert outcome.bytes_dense == 4 * 9610 * 64
    assert outcome.factor is not None
    assert (outcome.factor > 1) == (system != "ddp")


def test_baseline_name_sets_density_and_steps() -> None:
    """A message has 3 chunks with 40 or 80 entries of 14 bits each and 8 bytes of magnitudes."""
    often, seldom, dense = (
        baseline(name)(DIGITS).factor for name in ("sparseloco-1-2", "sparseloco-2-8", "diloco-8")
    )
    assert (often, seldom) == (4 * 9610 * 16 / (3 * 78 * 8), 4 * 9610 * 16 / (3 * 148 * 2))
    assert dense == 8
    words = parsed(["--systems", "ours,diloco-8,sparseloco-0.5-4"]).systems
    assert words == ["ours", "diloco-8", "sparseloco-0.5-4"]


@pytest.mark.parametrize("name", ["diloco", "diloco-0", "sparseloco-x", "ddp-2", "fedavg"])
def test_unknown_baselines_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}': known are ddp, .* diloco-STEPS"):
        baseline(name)
    with pytest.raises(SystemExit):
        parsed(["--systems", f"ours,{name}"])


def test_gradient_sharing_learns_with_few_bytes() -> None:
    before = measured(DIGITS.task.module(0), DIGITS.task, DIGITS.task.split().test)
    outcome = train(DIGITS, Settings())
    assert outcome.test["loss"] < 0.9 * before["loss"]
    assert outcome.factor is not None
    assert 200 < outcome.factor < 500
    assert outcome.figures["publications"] == 64


def test_single_worker_with_high_density_learns_like_one_process() -> None:
    """A single worker with a density of 20% and without clipping learns like one process."""
    alone = ddp(DIGITS.alone)
    ours = train(DIGITS.alone, Settings(density=0.2, clip=None))
    assert ours.test["loss"] == pytest.approx(alone.test["loss"], rel=0.05)


def test_batch_norm_statistics_are_averaged() -> None:
    """With one worker's own statistics, a module with BatchNorm would predict at random."""
    outcome = train(CONV, Settings())
    assert outcome.test["accuracy"] > 0.6


def test_staleness_is_one_round_and_grows_with_latency() -> None:
    """With 4 workers in step, a gradient lacks at least the other three's current minibatches."""
    ages = [
        simulate_fit(Settings(latency=latency, jitter=0.0, max_lead=None)).staleness
        for latency in (0.0, 2.0)
    ]
    assert 3 <= ages[0] < 5
    assert ages[1] > ages[0] + 2


def test_max_staleness_lowers_staleness_and_costs_time() -> None:
    """``max_staleness`` limits a worker's steps while its update is in flight, and costs time."""
    free, one, none = (
        train(DIGITS, Settings(max_lead=None, latency=3.0, max_staleness=most)).figures
        for most in (None, 1, 0)
    )
    assert none["staleness_rounds"] < one["staleness_rounds"] < free["staleness_rounds"]
    assert none["time"] > 1.5 * one["time"] > 1.5 * free["time"]


def test_publication_contains_publish_every_steps() -> None:
    """Three publications have 5 steps each of a worker's 16; the fourth has the last step."""
    outcome = train(DIGITS, Settings(publish_every=5))
    assert outcome.figures["publications"] == 4 * 4
    assert outcome.factor is not None
    assert outcome.factor > 1000


def test_max_lead_of_1_lowers_staleness_and_costs_time() -> None:
    """With ``max_lead=1`` workers keep in step: updates are fresher, but the fit is slower."""
    near, far = (simulate_fit(Settings(max_lead=lead, jitter=0.4)) for lead in (1, 8))
    assert near.staleness < far.staleness
    assert near.seconds > far.seconds


def test_momentum_horizon_of_fit_keeps_training_stable() -> None:
    """At this learning rate, training is stable only with the horizon of the fit's minibatches."""
    trial = replace(CONV, workers=8, rate=0.05, epochs=4)
    fits, workers = (train(trial, Settings(horizon=whose)) for whose in ("fit", "worker"))
    assert fits.test["loss"] < 0.5 * workers.test["loss"]


def test_beta2_of_fit_is_raised_to_number_of_workers() -> None:
    """With ``beta2="fit"``, Adam's beta2 is raised to the number of workers."""
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    trial, power = replace(CONV, optimizer="adamw"), Settings(beta2="fit").beta2_power(4)
    assert trial.optimizer_of(power)(parameters).defaults["betas"] == (0.9, 0.999**4)
    assert trial.optimizer_of()(parameters).defaults["betas"] == (0.9, 0.999)


def test_unchanged_buffers_undoes_batch_norm_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """BatchNorm's statistics after DDP are of the first rank's minibatches only."""
    trial = replace(CONV, rate=0.0, workers=2, epochs=1)  # so that parameters stay as they are
    alone, trained = trial.task.module(0), list[Any]()
    for first, _ in trial.rounds():
        alone(torch.from_numpy(first.features))
    keep_module = lambda trial, module, **figures: trained.append(module)  # noqa: E731
    monkeypatch.setattr(baselines, "outcome", keep_module)
    ddp(trial)
    wanted = dict(alone.named_buffers())
    assert wanted
    for name, buffer in trained[0].named_buffers():
        torch.testing.assert_close(buffer, wanted[name])


def test_options_flag_reaches_optimizer() -> None:
    """With maximize=True, the loss of every system rises."""
    systems = ["ours", *BASELINES]
    words = "--tasks digits --optimizers sgd --workers 2 --seeds 1 --epochs 1 --options"
    options = {"maximize": True, "weight_decay": 0.1}
    args = [*words.split(), "maximize=True,weight_decay=0.1", "--systems", ",".join(systems)]
    (trial,) = trials(parsed(args))
    defaults = trial.optimizer_of()([torch.nn.Parameter(torch.zeros(1))]).defaults
    assert options.items() <= defaults.items()
    before = measured(trial.task.module(0), trial.task, trial.task.split().test)["loss"]
    found = list(runs(parsed(args)))
    assert [(each["system"], each["options"]) for each in found] == [(s, options) for s in systems]
    assert [each["system"] for each in found if (each["loss"] or math.inf) <= 1.05 * before] == []
    with pytest.raises(SystemExit):
        parsed(["--options", "nesterov"])


def test_warm_up_counts_steps_of_each_learner() -> None:
    """The warm-up's 50 steps are those of each learner, not minibatches of all workers."""
    trial = Trial("transformer", "sgd", 4, 0, 0.3, epochs=1)
    parameter = torch.nn.Parameter(torch.zeros(1))
    module = torch.nn.ParameterList([parameter])
    learner = Learner(trial, module)
    parameter.grad = torch.ones(1)
    learner.step()
    assert float(parameter.detach()) == pytest.approx(-0.3 / 50)
    for _ in range(50):
        learner.step()
    before = float(parameter.detach())
    learner.step()
    assert float(parameter.detach()) - before == pytest.approx(-0.3, rel=1e-4)


def test_settings_become_options_of_training_master() -> None:
    master = Settings.parse("publish_every=4,max_lead=none,aggregation=mean").master(3)
    assert (master.publish_every, master.max_lead, master.aggregation) == (4, None, "mean")
    assert (master.rng_seed, master.batch_size_per_worker) == (3, 32)


def test_settings_are_parsed_and_unknown_names_refused() -> None:
    assert Settings.parse("horizon=fit,max_lead=none,density=0.03,levels=2") == Settings(
        horizon="fit", max_lead=None, density=0.03, levels=2
    )
    with pytest.raises(ValueError, match="'tau=1': must be NAME=VALUE with a name of horizon"):
        Settings.parse("tau=1")


def test_powersgd_of_low_rank_sends_rest_later() -> None:
    """PowerSGD of full rank gives the mean gradient; of low rank, it sends the rest later."""
    random = torch.Generator().manual_seed(0)
    gradients = [[torch.randn(20, 30, generator=random)] for _ in range(3)]
    mean = torch.stack([each[0] for each in gradients]).mean(0)
    whole = PowerSGD([torch.Size((20, 30))], 3, 20, 0)
    torch.testing.assert_close(whole.averaged(gradients)[0], mean)
    low = PowerSGD([torch.Size((20, 30))], 3, 2, 0)
    assert not torch.allclose(low.averaged(gradients)[0], mean, atol=0.1)
    nothing = [[torch.zeros(20, 30)] for _ in range(3)]
    rest = low.averaged(nothing)[0]
    assert float(rest.norm()) > 0.1
    assert low.bytes_sent == 2 * 3 * 4 * 2 * (20 + 30)


def test_held_out_texts_contain_no_training_passages() -> None:
    """Each page is in one text: 80 % to train on, the rest to validate and to test."""
    from pydoc_data.topics import topics

    parts = texts.pages(0)
    sizes = [len(part) for part in parts]
    assert sizes == pytest.approx([share * sum(sizes) for share in texts.SHARES], rel=0.1)
    assert sum(sizes) == sum(map(len, topics.values()))
    assert [name for name, page in topics.items() if not any(page in part for part in parts)] == []


@pytest.mark.parametrize("name", TASKS)
def test_task_rows_fill_batches_and_module_is_reproducible(name: str) -> None:
    """Each task's rows divide into whole batches, and its module is reproducible by the seed."""
    task = TASKS[name]
    module, rows = task.module(0), task.split().train
    assert len(rows.labels) % 1024 == 0
    loss = measured(module, task, task.split().validate)["loss"]
    assert 0 < loss < 5
    again = torch.cat([p.flatten() for p in task.module(0).parameters()])
    assert torch.equal(torch.cat([p.flatten() for p in module.parameters()]), again)


def test_result_has_gap_to_one_process_and_settings() -> None:
    """A result has the gap between one process and the system, and the settings."""
    words = "--tasks digits --optimizers sgd --workers 1,2 --seeds 1 --epochs 1 --systems ours,ddp"
    alone, ours, dense = runs(parsed([*words.split(), "--set", "levels=1"]))
    assert [(r["workers"], r["system"]) for r in (alone, ours, dense)] == [
        (1, "ours"), (2, "ours"), (2, "ddp"),
    ]  # fmt: skip
    assert ours["settings"] == "levels=1"
    assert ours["gap"] == pytest.approx(ours["one"] - ours["value"], abs=2e-4)
    assert dense["bytes_factor"] == 1.0


def test_minibatches_flag_is_rounded_up_to_whole_epochs() -> None:
    """--minibatches is rounded up to whole epochs."""
    wanted = "--tasks digits,teacher --optimizers sgd --minibatches 64,1500 --workers 4 --seeds 1"
    found = [trial.minibatches for trial in trials(parsed(wanted.split()))]
    assert found == [64, 1504, 512, 1536]  # an epoch has 32 minibatches, and 512


def test_result_has_difference_to_ddp_with_error() -> None:
    """Each system's result has its difference to DDP, with an error."""
    wanted = "--tasks digits --optimizers sgd --epochs 2 --workers 4 --seeds 1 --systems ours,ddp"
    ours, peer = runs(parsed(wanted.split()))
    assert (peer["behind_ddp"], peer["behind_ddp_error"]) == (0, 0)
    assert ours["behind_ddp"] == pytest.approx(ours["gap"] - peer["gap"], abs=2e-4)
    assert 0 < ours["gap_error"] < 0.05
    assert 0 < ours["behind_ddp_error"] < 0.05


def test_ddp_best_is_compared_with_process_at_task_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``ddp-best`` tunes its rate; its gap is to one process at the task's rate."""
    monkeypatch.setattr(command_line, "BEST_TIMES", (4,))
    wanted = "--tasks digits --optimizers sgd --rate 0.1 --epochs 2 --workers 4 --seeds 1"
    best, peer = runs(parsed([*wanted.split(), "--systems", "ddp-best,ddp"]))
    assert (best["rate"], peer["rate"]) == (0.4, 0.1)
    assert best["one"] == peer["one"]
    assert best["gap"] == pytest.approx(best["one"] - best["value"], abs=2e-4)
    assert best["behind_ddp"] == pytest.approx(peer["value"] - best["value"], abs=2e-4)


def make_outcome(*right: float) -> Outcome:
    """Return the outcome of a trial in which these rows were right (1) or wrong (0)."""
    units = np.asarray(right, np.float32)
    return Outcome({"accuracy": float(units.mean()), "loss": 0.0}, {}, units=units)


def test_gap_error_is_computed_from_row_differences() -> None:
    """The error of a gap is computed from the differences of the two systems' rows."""
    gap, error = make_outcome(1, 1, 0, 1).worse_than(make_outcome(1, 1, 1, 1), "accuracy")
    assert gap == 0.25
    assert error == pytest.approx(0.25)
    assert make_outcome(0, 1).worse_than(make_outcome(0, 1), "accuracy") == (0, 0)


def test_shifted_task_has_shifted_copies_of_each_digit() -> None:
    """The task "shifted" has each test image shifted by up to one pixel in 25 ways."""
    digits, shifted = TASKS["digits"].split().test, TASKS["shifted"].split().test
    copies = TASKS["shifted"].copies
    assert len(shifted.labels) == copies * len(digits.labels) > 10_000
    middle = copies // 2  # not shifted
    assert (shifted.features[middle::copies] == digits.features).all()
    up = shifted.features[2].reshape(8, 8)  # one pixel up: SHIFTS[2] is (-1, 0)
    assert (up[:-1] == digits.features[0].reshape(8, 8)[1:]).all()
    assert not up[-1].any()


def table_result(system: str, seed: int, gap: float | None, behind: float | None) -> Result:
    return {
        "task": "digits",
        "optimizer": "sgd",
        "workers": 4,
        "minibatches": 64,
        "seed": seed,
        "system": system,
        "metric": "accuracy",
        "one": 0.9,
        "gap": gap,
        "behind_ddp": behind,
        "behind_ddp_error": 0.001,
    }


@pytest.mark.parametrize(
    ("gaps", "expected"),
    [
        ((0.01, 0.012, 0.011), "**1.1** / 2.1 ± 0.1"),  # differs by 1.0 ± 0.1
        ((0.031, 0.030, 0.032), "3.1 / **2.1** ± 0.1"),
        ((0.00, 0.04, 0.02), "2.0 / 2.1 ± 1.2"),  # the seeds differ more than the systems
        ((0.01, None, 0.011), "1 of 3 diverged / 2.1"),
    ],
)
def test_table_cell_is_bold_only_if_difference_exceeds_error(
    gaps: tuple[float | None, ...], expected: str
) -> None:
    """A table's cell is bold only if the difference exceeds its error."""
    results = []
    for seed, gap in enumerate(gaps):
        behind = None if gap is None else gap - 0.021
        results += [table_result("ours", seed, gap, behind), table_result("ddp", seed, 0.021, 0.0)]
    *_, row = table(results)
    assert row == f"| digits, sgd | 64 | 0.900 | {expected} |"
    *_, row = table([*results, table_result("ddp-best", 0, 0.005, None)])
    assert row == f"| digits, sgd | 64 | 0.900 | {expected} (0.5) |"
