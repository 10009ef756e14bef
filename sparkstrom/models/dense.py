"""DenseNetwork: a small network of dense layers in NumPy that needs no other library.

All weights and biases are views of one flat vector, so the optimizer, the encoder and snapshots
work on one array without copying.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import KEY, Refused, custom, number, one_of, shown, whole
from sparkstrom.models.activations_and_losses import ACTIVATIONS, F32, LOSSES
from sparkstrom.models.base import (
    Batch,
    Columns,
    Flat,
    Layout,
    Shape,
    State,
    check_bindable,
    require_single_array,
)
from sparkstrom.models.momentum_scaling import describe_change
from sparkstrom.models.row_checks import FEATURES, refuse_non_finite
from sparkstrom.models.updaters import UPDATERS, Sgd, Updater, get_momenta, scale_optimizer

PARAMS_MAX = 2**31 - 1  # messages count entries of the flat vector as int32
WIDTH = whole(1, PARAMS_MAX, unit="values")
L2 = number(least=0)
_WIDTHS_REMEDY = "give at least inputs and outputs, each above 0, such as [64, 32, 10]"


def _check_optimizer(value: Any) -> Any:
    """Return the value if it is None or a built-in updater; otherwise raise Refused.

    Subclasses are also refused, because workers and saved files get only the updater's name and
    options.
    """
    if value is not None and type(value) not in UPDATERS.values():
        raise Refused(
            "must be None or one of sparkstrom.models.updaters, such as Adam(1e-3); TorchModel"
            " takes optimizers of your own"
        )
    return value


OPTIMIZER_OPTION = custom(_check_optimizer, "must be None or an updater")


class DenseNetwork:
    """A network of dense layers with the given widths, trained with NumPy.

    Features are f32[rows, widths[0]], outputs f32[rows, widths[-1]].

    Args:
        widths: number of inputs, of units in each hidden layer, and of outputs.
        hidden: activation of the hidden layers: relu, tanh, sigmoid or identity.
        loss: cross_entropy (softmax outputs; labels are class indices, or a share for each class)
            or squared_error (linear outputs).
        updater: the optimizer; by default ``Sgd(0.1)``.
        seed: equal seeds give equal initial parameters.
        l2: factor of the l2 penalty, which is half the squared norm of the weight matrices.

    Raises:
        UsageError: an option is invalid.
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
            raise UsageError(f"widths={shown(widths)}: {_WIDTHS_REMEDY}")
        widths = [WIDTH[KEY].read(f"widths[{i}]", width) for i, width in enumerate(widths)]
        size = sum((n_in + 1) * n_out for n_in, n_out in pairwise(widths))
        if size > PARAMS_MAX:
            raise UsageError(
                f"widths={shown(widths)}: {size:,} parameters are more than the maximum of"
                f" {PARAMS_MAX:,}; make the layers smaller"
            )
        hidden = one_of(tuple(ACTIVATIONS))[KEY].read("hidden", hidden)
        loss = one_of(tuple(LOSSES))[KEY].read("loss", loss)
        if loss == "cross_entropy" and widths[-1] < 2:
            raise UsageError(
                f"widths={widths!r}: cross_entropy over one output is always 0; give two outputs"
            )
        l2, seed = L2[KEY].read("l2", l2), whole(0)[KEY].read("seed", seed)
        updater = OPTIMIZER_OPTION[KEY].read("updater", updater)
        self._widths, self._hidden, self._loss = tuple(widths), hidden, loss
        self._updater: Updater = updater if updater is not None else Sgd(0.1)
        self._scaled_optimizer, self._workers = self._updater, 1
        self._seed, self._l2 = seed, l2
        self._layout = Layout.from_shapes(_name_shapes(self._widths))
        self._params: Flat | None = None
        self._gradient: Flat | None = None
        self._state: State = self._updater.init(self.n_params)

    def __repr__(self) -> str:
        return (
            f"DenseNetwork({list(self._widths)}, hidden={self._hidden!r}, loss={self._loss!r},"
            f" updater={self._updater!r}, seed={self._seed}, l2={self._l2})"
        )

    @property
    def n_params(self) -> int:
        """The number of parameters."""
        return self._layout.size

    def initial(self) -> Flat:
        """Return new parameters f32[n_params]: He (relu) or Glorot uniform weights, zero biases."""
        rng = np.random.default_rng(self._seed)
        flat = np.zeros(self.n_params, np.float32)
        for weights, _ in self._views(flat):
            n_in, n_out = weights.shape
            fan = n_in if self._hidden == "relu" else (n_in + n_out) / 2
            limit = np.sqrt(6 / fan) if self._hidden == "relu" else np.sqrt(3 / fan)
            weights[:] = rng.uniform(-limit, limit, weights.shape)
        return flat

    def bind(self, params: Flat) -> None:
        """Use this memory, f32[n_params], for the parameters; keep the optimizer's state."""
        self._params = check_bindable(params, self.n_params)

    def step(self, batch: Batch) -> float:
        """Train on one minibatch in place; return the mean loss without the l2 penalty."""
        if not batch.total_weight:
            return 0.0
        if self._gradient is None:
            self._gradient = np.zeros(self.n_params, np.float32)
        params, gradient = self._require_bound(), self._gradient
        features, labels = require_single_array(batch.features), require_single_array(batch.labels)
        layers, gradients = self._views(params), self._views(gradient)
        activations = self._forward(features, layers)
        loss, upstream = LOSSES[self._loss].gradient(activations[-1], labels, batch.weights)
        for i in reversed(range(len(layers))):
            np.matmul(activations[i].T, upstream, out=gradients[i][0])
            np.sum(upstream, axis=0, out=gradients[i][1])
            if i:
                upstream = upstream @ layers[i][0].T
                ACTIVATIONS[self._hidden].backward(activations[i], upstream)
        if self._l2:
            for (weights, _), (gradient_part, _) in zip(layers, gradients, strict=True):
                gradient_part += np.float32(self._l2) * weights
        params += self._scaled_optimizer.update(gradient, self._state)
        return loss

    def keep_pace(self, workers: int, minibatches: int, counted: int) -> None:
        """Scale momentum to ``workers``; ignore the fit's position, as there is no schedule."""
        if workers != self._workers:
            self._scaled_optimizer, self._workers = scale_optimizer(self._updater, workers), workers

    def horizons(self, workers: int) -> dict[str, str]:
        """Return how each momentum changes with this many workers: name -> text."""
        return {
            name: describe_change(value, workers)
            for name, value in get_momenta(self._updater).items()
        }

    def has_adaptive_optimizer(self) -> bool:
        """Return whether steps are divided by the size of past gradients, as in Adam."""
        return hasattr(self._updater, "epsilon")  # keeps the divisor above 0

    def predict(self, features: Columns) -> F32:
        """Return outputs f32[rows, outputs]: probabilities, or values for squared_error.

        They are computed in float64 and rounded once. In float32, a row's result could depend on
        its position, because on some processors matrix products round rows differently.
        """
        rows = require_single_array(features)
        self._check_width(rows)
        layers = [(w.astype(np.float64), b) for w, b in self._views(self._require_bound())]
        outputs = self._forward(rows, layers)[-1]
        return LOSSES[self._loss].output(outputs).astype(np.float32)

    @property
    def outputs(self) -> str:
        """What ``predict`` returns: probabilities or values."""
        return "probabilities" if self._loss == "cross_entropy" else "values"

    def loss(self, batch: Batch) -> tuple[float, float]:
        """Return (sum of weight x loss, sum of weights), without the l2 penalty."""
        outputs = self._forward(
            require_single_array(batch.features), self._views(self._require_bound())
        )[-1]
        labels = require_single_array(batch.labels)
        mean, _ = LOSSES[self._loss].gradient(outputs, labels, batch.weights)
        return mean * batch.total_weight, batch.total_weight

    def penalty(self) -> float:
        """Return the l2 penalty: ``l2`` times half the squared norm of the weights."""
        squares = [
            np.square(w, dtype=np.float64).sum() for w, _ in self._views(self._require_bound())
        ]
        return float(self._l2 * sum(squares) / 2)

    def check(self, features: Columns, labels: Columns) -> None:
        """Raise UsageError, with row and value, if rows do not fit this network."""
        features, labels = require_single_array(features), require_single_array(labels, "labels")
        self._check_width(features)
        refuse_non_finite(FEATURES, features)
        if len(labels) != len(features):
            raise UsageError(f"{len(features)} rows of features, but {len(labels)} labels")
        LOSSES[self._loss].check(labels, self._widths[-1])

    def updater_state(self) -> State:
        """Return the optimizer's state by name: arrays (not copied) and scalars."""
        return self._state

    def load_updater_state(self, state: State) -> None:
        """Copy a state from ``updater_state``; raise UsageError if names or shapes differ."""
        fresh = self._updater.init(self.n_params)
        if set(state) != set(fresh):
            raise UsageError(
                f"optimizer state has {sorted(state)}, {self._updater.name} needs {sorted(fresh)}"
            )
        for name, value in state.items():
            if np.shape(value) != np.shape(fresh[name]):
                raise UsageError(
                    f"{name} of the optimizer state has shape {np.shape(value)},"
                    f" this network needs {np.shape(fresh[name])}"
                )
            fresh[name] = np.array(value, np.float32) if np.ndim(value) else value
        self._state = fresh

    def layer_of(self, index: int) -> str:
        """Return the name of parameter ``index``'s array, such as ``layer 2 weights``."""
        return self._layout.name_at(index)

    def describe(self) -> dict[str, Any]:
        """Return options and array shapes, from which ``from_description`` makes the network."""
        return {
            "kind": "dense",
            "widths": list(self._widths),
            "hidden": self._hidden,
            "loss": self._loss,
            "updater": {"name": self._updater.name, **asdict(self._updater)},  # type: ignore[call-overload]
            "seed": self._seed,
            "l2": self._l2,
            "parameters": [[name, list(shape)] for name, shape in _name_shapes(self._widths)],
        }

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> DenseNetwork:
        """Make the network that ``describe`` described."""
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

    def _require_bound(self) -> Flat:
        """Return the bound parameters; fail if ``bind`` has not been called."""
        assert self._params is not None, "bind parameters first"
        return self._params

    def _views(self, flat: Flat) -> list[tuple[F32, F32]]:
        """Return views of each layer's (weights [inputs, outputs], biases [outputs])."""
        arrays = [array for _, array in self._layout.views(flat)]
        return list(zip(arrays[::2], arrays[1::2], strict=True))

    def _check_width(self, features: NDArray[Any]) -> None:
        """Raise UsageError unless each row has as many features as the network has inputs."""
        width = math.prod(features.shape[1:])
        if width != self._widths[0]:
            raise UsageError(
                f"rows have {width} features, the network takes {self._widths[0]}: "
                "change the first of its widths or the data"
            )

    def _forward(self, features: NDArray[Any], layers: list[tuple[Any, F32]]) -> list[Any]:
        """Return the inputs followed by each layer's output, in the precision of the weights.

        ``layers`` are (weights, biases) of each layer. The last output is taken before the loss's
        output activation, so that it consists of logits for cross_entropy.
        """
        # The width is computed, because reshape cannot infer -1 for zero rows.
        shape = len(features), math.prod(features.shape[1:])
        inputs = np.ascontiguousarray(features.reshape(shape), np.float32)
        activations = [inputs]
        for i, (weights, biases) in enumerate(layers):
            z = activations[-1] @ weights
            z += biases
            activations.append(ACTIVATIONS[self._hidden].forward(z) if i + 1 < len(layers) else z)
        return activations

    def __getstate__(self) -> dict[str, Any]:
        """Return the description only: no parameters, gradient or optimizer state."""
        return self.describe()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Recreate the network from its description, with a new optimizer state."""
        self.__dict__.update(DenseNetwork.from_description(state).__dict__)


def _name_shapes(widths: Sequence[int]) -> Iterator[tuple[str, Shape]]:
    """Yield (name, shape) of the arrays in the flat vector: weights, then biases, by layer."""
    for layer, shape in enumerate(pairwise(widths), 1):
        yield f"layer {layer} weights", shape
        yield f"layer {layer} biases", shape[1:]
