"""A small network of dense layers in NumPy, there to run everything without another install.

All weights and biases are views of one flat vector, so an optimizer, an encoder and a snapshot
see one array, and nothing is copied.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import KEY, Refused, custom, number, one_of, shown, whole
from sparkstrom.models.activations import ACTIVATIONS, F32
from sparkstrom.models.base import Batch, Columns, Flat, State
from sparkstrom.models.flat import bindable, one_array
from sparkstrom.models.horizons import changed
from sparkstrom.models.losses import LOSSES
from sparkstrom.models.row_checks import FEATURES, refuse_not_finite
from sparkstrom.models.updaters import UPDATERS, Sgd, Updater, following, paced

PARAMS_MAX = 2**31 - 1  # of a flat vector: messages count entries as int32
WIDTH = whole(1, PARAMS_MAX, unit="values")
L2 = number(least=0)
_WIDTHS = "give at least inputs and outputs, each above 0, such as [64, 32, 10]"


def _updater(value: Any) -> Any:
    """Return an updater, ours or any object with its methods, or raise Refused."""
    known = all(callable(getattr(value, name, None)) for name in ("init", "update"))
    if value is not None and (isinstance(value, type) or not known):
        raise Refused("must be None or an updater, such as sparkstrom.models.updaters.Adam(1e-3)")
    return value


UPDATER = custom(_updater, "must be None or an updater")


class DenseNetwork:
    """Dense layers of the given widths: inputs, hidden ones, outputs.

    Features are f32[rows, widths[0]], outputs f32[rows, widths[-1]]. Raises UsageError for options
    that cannot work, and for rows that do not fit.

    ``hidden``: relu, tanh, sigmoid or identity. ``loss``: cross_entropy (softmax outputs; labels
    are class indices or shares per class) or squared_error (linear outputs). ``l2`` is the weight
    of half the squared norm of the weight matrices. Same ``seed``, same initial parameters.
    """

    def __init__(
        self,
        widths: Sequence[int],
        *,
        hidden: str = "relu",
        loss: str = "cross_entropy",
        updater: Updater | None = None,
        seed: int = 0,
        l2: float = 0.0,
    ) -> None:
        if not (isinstance(widths, list | tuple) and len(widths) >= 2):
            raise UsageError(f"widths={shown(widths)}: {_WIDTHS}")
        widths = [WIDTH[KEY].read(f"widths[{i}]", width) for i, width in enumerate(widths)]
        size = sum((n_in + 1) * n_out for n_in, n_out in pairwise(widths))
        if size > PARAMS_MAX:
            raise UsageError(
                f"widths={shown(widths)}: {size:,} parameters are more than the {PARAMS_MAX:,} that"
                " one flat vector has; give smaller layers"
            )
        hidden = one_of(tuple(ACTIVATIONS))[KEY].read("hidden", hidden)
        loss = one_of(tuple(LOSSES))[KEY].read("loss", loss)
        if loss == "cross_entropy" and widths[-1] < 2:
            raise UsageError(
                f"widths={widths!r}: cross_entropy over one output is always 0; give two outputs"
            )
        l2, seed = L2[KEY].read("l2", l2), whole(0)[KEY].read("seed", seed)
        updater = UPDATER[KEY].read("updater", updater)
        self._widths, self._hidden, self._loss = tuple(widths), hidden, loss
        self._updater: Updater = updater if updater is not None else Sgd(0.1)
        self._paced, self._workers = self._updater, 1
        self._seed, self._l2 = seed, l2
        self._slices = _slices(self._widths)
        self._params: Flat | None = None
        self._gradient: Flat | None = None
        self._state: State = self._updater.init(self.n_params)

    def __repr__(self) -> str:
        return (
            f"DenseNetwork({list(self._widths)}, hidden={self._hidden!r}, loss={self._loss!r},"
            f" updater={self._updater!r}, seed={self._seed}, l2={self._l2})"
        )

    # -- the flat-parameter protocol -------------------------------------------------------------

    @property
    def n_params(self) -> int:
        """How many parameters."""
        return int(self._slices[-1][1].stop)

    def initial(self) -> Flat:
        """Fresh parameters f32[n_params]: He (relu) or Glorot uniform weights, zero biases."""
        chance = np.random.default_rng(self._seed)
        flat = np.zeros(self.n_params, np.float32)
        for (n_in, n_out), (weights, _) in zip(self._shapes, self._slices, strict=True):
            fan = n_in if self._hidden == "relu" else (n_in + n_out) / 2
            limit = np.sqrt(6 / fan) if self._hidden == "relu" else np.sqrt(3 / fan)
            flat[weights] = chance.uniform(-limit, limit, n_in * n_out)
        return flat

    def bind(self, params: Flat) -> None:
        """Work on this memory from now on, f32[n_params]; the updater's state stays."""
        self._params = bindable(params, self.n_params)

    def step(self, batch: Batch) -> float:
        """One minibatch: change the bound parameters; return the mean loss without L2."""
        params, gradient = self._bound(), self._gradient_memory()
        features, labels = one_array(batch.features), one_array(batch.labels)
        layers, slopes = self._views(params), self._views(gradient)
        activations = self._forward(features, layers)
        loss, upstream = LOSSES[self._loss].gradient(activations[-1], labels, batch.weights)
        for i in reversed(range(len(layers))):
            np.matmul(activations[i].T, upstream, out=slopes[i][0])
            np.sum(upstream, axis=0, out=slopes[i][1])
            if i:
                upstream = upstream @ layers[i][0].T
                ACTIVATIONS[self._hidden].backward(activations[i], upstream)
        if self._l2:
            for (weights, _), (slope, _) in zip(layers, slopes, strict=True):
                slope += np.float32(self._l2) * weights
        params += self._paced.update(gradient, self._state)
        return loss

    def keep_pace(self, workers: int, minibatches: int, counted: int) -> None:
        """Momentum counts the minibatches of so many workers; there is no schedule."""
        if workers != self._workers:
            self._paced, self._workers = paced(self._updater, workers), workers

    def horizons(self, workers: int) -> dict[str, str]:
        """What is changed where so many train, for people."""
        return {name: changed(m, workers) for name, m in following(self._updater).items()}

    def predict(self, features: Columns) -> F32:
        """Outputs f32[rows, outputs]: probabilities, or values for squared_error.

        Computed in float64 and rounded once: on some processors a product of matrices rounds by a
        row's place among the others, which float32 would show.
        """
        rows = one_array(features)
        self._check_width(rows)
        wide = [(w.astype(np.float64), b) for w, b in self._views(self._bound())]
        outputs = self._forward(rows, wide)[-1]
        return LOSSES[self._loss].output(outputs).astype(np.float32)

    @property
    def outputs(self) -> str:
        """What ``predict`` returns."""
        return "probabilities" if self._loss == "cross_entropy" else "values"

    def loss(self, batch: Batch) -> tuple[float, float]:
        """(sum of weight x loss, sum of weights) without L2; nothing changes."""
        outputs = self._forward(one_array(batch.features), self._views(self._bound()))[-1]
        labels = one_array(batch.labels)
        mean, _ = LOSSES[self._loss].gradient(outputs, labels, batch.weights)
        weight = batch.rows if batch.weights is None else batch.weights.sum(dtype=np.float64)
        return mean * float(weight), float(weight)

    def penalty(self) -> float:
        """l2 times half the squared norm of the weights."""
        squares = [np.square(w, dtype=np.float64).sum() for w, _ in self._views(self._bound())]
        return float(self._l2 * sum(squares) / 2)

    def check(self, features: Columns, labels: Columns) -> None:
        """Raise UsageError naming row and value where rows do not fit this network."""
        features, labels = one_array(features), one_array(labels, "labels")
        self._check_width(features)
        refuse_not_finite(FEATURES, features)
        if len(labels) != len(features):
            raise UsageError(f"{len(features)} rows of features, but {len(labels)} labels")
        LOSSES[self._loss].check(labels, self._widths[-1])

    def updater_state(self) -> State:
        """The optimizer's arrays and scalars, by name; the arrays are the live ones."""
        return self._state

    def load_updater_state(self, state: State) -> None:
        """Take a state that ``updater_state`` of an equal network returned."""
        fresh = self._updater.init(self.n_params)
        if set(state) != set(fresh):
            raise UsageError(
                f"updater state has {sorted(state)}, {self._updater.name} needs {sorted(fresh)}"
            )
        for name, value in state.items():
            if np.shape(value) != np.shape(fresh[name]):
                raise UsageError(
                    f"{name} of the updater state has shape {np.shape(value)},"
                    f" this network needs {np.shape(fresh[name])}"
                )
            fresh[name] = np.array(value, np.float32) if np.ndim(value) else value
        self._state = fresh

    def layer_of(self, index: int) -> str:
        """Where parameter ``index`` is, like ``layer 2 weights``; layers count from 1."""
        for layer, (weights, biases) in enumerate(self._slices, 1):
            if index < weights.stop:
                return f"layer {layer} weights"
            if index < biases.stop:
                return f"layer {layer} biases"
        raise IndexError(index)

    def describe(self) -> dict[str, Any]:
        """What ``models.registry.from_description`` makes an equal network from."""
        return {
            "kind": "dense",
            "widths": list(self._widths),
            "hidden": self._hidden,
            "loss": self._loss,
            "updater": {"name": self._updater.name, **asdict(self._updater)},  # type: ignore[call-overload]
            "seed": self._seed,
            "l2": self._l2,
            "parameters": [[name, list(shape)] for name, shape in self._named_shapes()],
        }

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> DenseNetwork:
        """The network that ``describe`` described."""
        options = dict(description["updater"])
        updater = UPDATERS[options.pop("name")](**options)
        return cls(
            description["widths"],
            hidden=description["hidden"],
            loss=description["loss"],
            updater=updater,
            seed=description["seed"],
            l2=description["l2"],
        )

    # -- inside ----------------------------------------------------------------------------------

    @property
    def _shapes(self) -> list[tuple[int, int]]:
        return list(zip(self._widths, self._widths[1:], strict=False))

    def _named_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Of the arrays in the flat vector, in order: for readers without this package."""
        for layer, shape in enumerate(self._shapes, 1):
            yield f"layer {layer} weights", shape
            yield f"layer {layer} biases", shape[1:]

    def _bound(self) -> Flat:
        assert self._params is not None, "bind parameters first"
        return self._params

    def _gradient_memory(self) -> Flat:
        if self._gradient is None:
            self._gradient = np.zeros(self.n_params, np.float32)
        return self._gradient

    def _views(self, flat: Flat) -> list[tuple[F32, F32]]:
        """Weights [inputs, outputs] and biases [outputs] of each layer."""
        return [
            (flat[weights].reshape(shape), flat[biases])
            for shape, (weights, biases) in zip(self._shapes, self._slices, strict=True)
        ]

    def _check_width(self, features: NDArray[Any]) -> None:
        width = math.prod(features.shape[1:])
        if width != self._widths[0]:
            raise UsageError(
                f"rows have {width} features, the network takes {self._widths[0]}: "
                "change the first of its widths or the data"
            )

    def _forward(self, features: NDArray[Any], layers: list[tuple[Any, F32]]) -> list[Any]:
        """The input and each layer's output; the last one without its loss's output function.

        It computes as precisely as the weights are given.
        """
        shape = len(features), math.prod(features.shape[1:])  # -1 means nothing of no rows
        x = np.ascontiguousarray(features.reshape(shape), np.float32)
        out = [x]
        for i, (weights, biases) in enumerate(layers):
            z = out[-1] @ weights
            z += biases
            out.append(ACTIVATIONS[self._hidden].forward(z) if i + 1 < len(layers) else z)
        return out

    def __getstate__(self) -> dict[str, Any]:
        """What ships is the architecture: no parameters, no gradient, no optimizer state."""
        return self.describe()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(DenseNetwork.from_description(state).__dict__)


def _slices(widths: tuple[int, ...]) -> list[tuple[slice, slice]]:
    """Where each layer's weights and biases lie in the flat vector."""
    out, at = [], 0
    for n_in, n_out in itertools.pairwise(widths):
        weights = slice(at, at + n_in * n_out)
        biases = slice(weights.stop, weights.stop + n_out)
        out.append((weights, biases))
        at = biases.stop
    return out
