"""Keras' optimizers where several workers train: other momenta, schedules where the fit is.

An optimizer's step is traced once; while it is, its attributes are set to traced values. How many
train is an input of the compiled step, so that it is not compiled anew when that changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from sparkstrom.models.horizons import KERAS, changed, raised
from sparkstrom.models.keras_objects import RATE, keras, schedule_of

BY_FIT = "steps by the fit's minibatches"


class Above0:
    """A traced number above 0: Keras asks whether there is momentum before it uses any."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self.dtype, self.shape = value.dtype, value.shape

    def __jax_array__(self) -> Any:
        return self._value

    def __gt__(self, other: float) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return True

    def __rsub__(self, other: Any) -> Any:
        return other - self._value

    def __mul__(self, other: Any) -> Any:
        return self._value * other

    __rmul__ = __mul__
    __hash__ = None  # type: ignore[assignment]


@contextlib.contextmanager
def paced(optimizer: Any, pace: tuple[Any, Any] | None) -> Iterator[None]:
    """While this lasts, the optimizer is one for (workers; None: one alone, position)."""
    if pace is None:
        yield
        return
    workers, position = pace
    own = {name: getattr(optimizer, name) for name in following(optimizer)}
    meanwhile: dict[str, Any] = {}
    if workers is not None:
        meanwhile = {name: Above0(raised(value, workers)) for name, value in own.items()}
    schedule = schedule_of(optimizer)
    if schedule is not None:
        own[RATE], meanwhile[RATE] = schedule, lambda: schedule(position)
    try:
        for name, value in meanwhile.items():
            setattr(optimizer, name, value)
        yield
    finally:
        for name, value in own.items():
            setattr(optimizer, name, value)


@contextlib.contextmanager
def remembering(model: Any, pace: tuple[Any, Any] | None) -> Iterator[None]:
    """While this lasts, BatchNormalization's statistics forget as those of one among so many."""
    workers = None if pace is None else pace[0]
    own = [] if workers is None else [(layer, layer.momentum) for layer in statistics_of(model)]
    try:
        for layer, momentum in own:
            layer.momentum = Above0(raised(momentum, workers))
        yield
    finally:
        for layer, momentum in own:
            layer.momentum = momentum


def statistics_of(model: Any) -> list[Any]:
    """Layers that keep means and variances, with a momentum above 0."""
    layers = [
        each
        for each in model._flatten_layers()
        if isinstance(each, keras.layers.BatchNormalization)
    ]
    return [layer for layer in layers if layer.momentum]


def following(optimizer: Any) -> list[str]:
    """Attributes that count steps, but 0."""
    return [name for name in KERAS if getattr(optimizer, name, None)]


def told(optimizer: Any, model: Any, workers: int) -> dict[str, str]:
    """What is changed where so many train, for people."""
    what = {name: changed(getattr(optimizer, name), workers) for name in following(optimizer)}
    momenta = sorted({layer.momentum for layer in statistics_of(model)})
    if momenta:
        what["statistics"] = "; ".join(changed(momentum, workers) for momentum in momenta)
    return what if schedule_of(optimizer) is None else what | {"scheduler": BY_FIT}
