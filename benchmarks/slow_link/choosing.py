"""Choosing each system's learning rate, on rows that no result is trained on or measured with.

Each rate of the grid is tried for one epoch of ``choose`` (80 steps of four workers), on links as
fast as the machine, by the very programs that are measured; the one with the highest mean accuracy
on ``validate`` over these steps is taken. So a rate is chosen once for all links.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace

from benchmarks.slow_link import data
from benchmarks.slow_link.figures import score
from benchmarks.slow_link.running import Link, observe
from benchmarks.slow_link.trial import Trial

EPOCHS = 1
LIMIT_S = 240.0  # only a bound: the trial ends by its steps
UNREACHABLE = 2.0  # accuracy: every copy is evaluated


def choose(trial: Trial, conf: Mapping[str, str]) -> dict[float, float]:
    """The score of every rate of the optimizer's grid, the best one first."""
    trials = [
        replace(
            trial,
            rate=rate,
            choosing=True,
            epochs=EPOCHS,
            limit_s=LIMIT_S,
            wanted=UNREACHABLE,
        )
        for rate in data.LEARNING_RATES[trial.optimizer]
    ]
    observed = observe(Link(None), trials, conf)
    scores = {each.rate: round(score(each, observed.events), 4) for each in trials}
    if not any(scores.values()):
        print(f"{trial.system}: no rate could be tried:\n{observed.log}", file=sys.stderr)
    return dict(sorted(scores.items(), key=lambda item: -item[1]))
