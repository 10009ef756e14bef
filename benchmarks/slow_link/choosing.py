"""Choose each system's learning rate, on rows that are not used to train or measure results.

Each rate of the grid trains one epoch of ``choose`` (80 steps of four workers) by the same programs
that are measured, without limits on links. The rate with the highest mean accuracy on ``validate``
over these steps is chosen, once for all links.
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
LIMIT_S = 240.0  # rarely reached: the trial ends after its steps
UNREACHABLE = 2.0  # an accuracy, with which all copies are evaluated


def choose(trial: Trial, conf: Mapping[str, str]) -> dict[float, float]:
    """Return the score of each rate in the optimizer's grid, the best rate first."""
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
