"""Tests of ``benchmarks.averaging``: results equal the baselines', and the costs of rounds."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")

from benchmarks.averaging.__main__ import parsed, results  # noqa: E402
from benchmarks.averaging.clock import Link, rounds_cost, sharing_cost  # noqa: E402
from benchmarks.averaging.large_fit import widths_for  # noqa: E402
from benchmarks.averaging.rounds_here import Recipe, Rounds  # noqa: E402
from benchmarks.convergence.baselines import baseline  # noqa: E402
from benchmarks.convergence.trial import Trial  # noqa: E402
from sparkstrom.models import DenseNetwork  # noqa: E402

DIGITS = Trial("digits", "adam", 4, 0, 4e-3, epochs=2)


@pytest.mark.parametrize(
    ("ours", "theirs", "optimizer"),
    [("rounds-diloco-3", "diloco-3", "adam"), ("rounds-averaging-1", "ddp", "sgd")],
)
def test_rounds_equal_results_of_baselines(ours: str, theirs: str, optimizer: str) -> None:
    """A round ends with its epoch, so H divides the epoch's 8 steps, or one step is a round."""
    trial = Trial("digits", optimizer, 4, 0, 4e-3, epochs=1)
    mine, reference = baseline(ours)(trial), baseline(theirs)(trial)
    assert mine.test["loss"] == pytest.approx(reference.test["loss"], rel=1e-4)
    assert mine.factor == reference.factor


def test_unknown_recipes_and_links_are_refused() -> None:
    assert Recipe.parse("diloco-20") == Recipe(20, is_diloco=True)
    with pytest.raises(ValueError, match="known are averaging-STEPS, diloco-STEPS"):
        Recipe.parse("averaging-0")
    with pytest.raises(SystemExit):
        parsed(["--systems", "ours,fedavg-3"])
    with pytest.raises(SystemExit):
        parsed(["--links", "fast"])


def test_round_cost_follows_link_frequency_and_vectors() -> None:
    """There are 4 workers, and vectors of 1 MB on a link of 8 Mbit/s: one vector per second."""
    link = Link(bits=8e6, params=250_000, step_s=0.5, job_s=0.25)
    assert link.vector_s == 1.0
    often, seldom = (rounds_cost(link, 4, 8, each, 1, 0) for each in (1, 8))
    assert often.seconds == 8 * (0.5 + 0.75 + 1 + 2 + 0.25)
    assert seldom.seconds == 8 * 0.5 + 4.0
    assert often.bytes == 8 * seldom.bytes == 8 * 1e6 * (3 + 1 + 4)
    adam, own = rounds_cost(link, 4, 8, 8, 3, 0), rounds_cost(link, 4, 8, 8, 1, 2)
    assert seldom.bytes < adam.bytes < own.bytes
    assert sharing_cost(link, 4, 8, 1e5).seconds == 4.0
    assert sharing_cost(link, 4, 8, 2e6).seconds == 6.0  # down to three other workers
    assert sharing_cost(link, 4, 8, 4e6).bytes == 1.6e7


def test_small_runs_have_plausible_figures() -> None:
    args = parsed(["--epochs", "2", "--links", "1gbit", "--systems", "averaging-5,ours"])
    args.wanted = 0.3
    averaged, shared = results(args)
    assert averaged["steps_per_round"] == 5
    assert averaged["steps_s"] == shared["steps_s"] == 2 * 8 * 0.3
    assert averaged["gigabytes"] > 10 * shared["gigabytes"] > 0
    assert averaged["seconds"] > shared["seconds"]
    assert min(averaged["accuracy"], shared["accuracy"]) > 0.3
    assert averaged["seconds_to"] <= averaged["seconds"]


def test_network_sizes_and_steps_per_epoch_are_as_requested() -> None:
    """Networks have the requested number of parameters, and epochs the right number of steps."""
    assert np.isclose(DenseNetwork(widths_for(1_000_000)).n_params, 1e6, rtol=0.01)
    assert Rounds(DIGITS, Recipe(2, is_diloco=False)).steps_per_epoch == 8
