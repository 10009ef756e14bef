"""Horizon notes: what a fit has made of momentum and schedules, for its summary."""

from __future__ import annotations

from sparkstrom.models.base import FlatModel, Paced
from sparkstrom.models.horizons import UNSEEN
from sparkstrom.spark.driver.training_master import SharedTrainingMaster

Horizons = dict[str, str | int]


def horizons_of(master: SharedTrainingMaster, model: FlatModel, rows: list[int]) -> Horizons:
    """``workers`` and each change while all of them trained; empty where nothing was changed."""
    workers = sum(count > 0 for count in rows)
    if master.horizon != "fit" or workers < 2 or not isinstance(model, Paced):
        return {}
    changes = model.horizons(workers)
    return {"workers": workers, **changes} if changes else {}


def horizon_warnings(master: SharedTrainingMaster, model: FlatModel, rows: list[int]) -> list[str]:
    """Where momentum could not be made to count the fit's minibatches."""
    made = horizons_of(master, model, rows)
    if master.horizon != "fit" or sum(count > 0 for count in rows) < 2:
        return []
    if not isinstance(model, Paced):
        return [
            f"a {type(model).__name__} counts each worker's own steps: momentum and schedules that"
            " were tuned on one machine last too long on several; give it keep_pace"
            " (sparkstrom.models.base.Paced), or say horizon='worker'"
        ]
    if UNSEEN in made:
        return [
            f"the optimizer has parts that cannot be looked into ({made[UNSEEN]}): momentum inside"
            " counts each worker's own steps; build it with optax.inject_hyperparams, or lower the"
            " momentum m to m ** workers yourself and say horizon='worker'"
        ]
    return []


def in_words(made: Horizons) -> str:
    """One line for people."""
    changes = [f"{name} {change}" for name, change in made.items() if name != "workers"]
    return f"{made['workers']} workers: {', '.join(changes)}"
