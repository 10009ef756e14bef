"""KerasModel: a Keras 3 model on the JAX backend behind the flat-parameter protocol.

Keras' stateless calls make a step a pure function, jitted like JaxModel's. Trainable variables are
the flat vector. What is not trainable is of three kinds: statistics that layers keep (BatchNorm)
are buffers, averaged over the workers; seeds are each worker's own; frozen weights stay.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import Batch, Columns, Flat, Share, State
from sparkstrom.models.buffers import averaged, packed, unpacked
from sparkstrom.models.flat import Layout, bindable
from sparkstrom.models.keras_objects import (
    adapted_layers,
    all_layers,
    buffers_of,
    excluded_from_decay,
    foreign,
    frozen_of,
    is_own,
    is_seed,
    keras,
    name_of,
    named_loss,
    need_equal,
    need_jax,
    need_model,
    need_safe_keras,
    optimizer_of,
    outputs_of,
    plain_errors,
    refuse_other_modules,
    revived,
    rows_loss_of,
    schedule_of,
)
from sparkstrom.models.keras_pacing import paced, remembering, told
from sparkstrom.models.xla import (
    Trial,
    first_rows,
    keep_to_task,
    leaves_of,
    mean_loss,
    state_of,
)

__all__ = ["KerasModel"]

PARTS = ("model", "optimizer")
# Trainable variables without weight decay: their places, and a pattern of their names.
Excluded = tuple[list[int], str | None]
NONE_EXCLUDED: Excluded = ([], None)
NUMBER = re.compile(r"_\d+(?=/)")  # Keras counts what has no name over the whole process


class KerasModel:
    """A built Keras model with its loss and optimizer.

    ``loss`` is Keras' name of one, a ``keras.losses.Loss``, or a function (labels, outputs) -> one
    loss per row, in Keras' order; for several outputs a list of these, or a dict by the outputs'
    names, which add up. ``optimizer`` is a ``keras.optimizers.Optimizer`` or its name, with
    its schedule inside. What ``compile`` was told is not used. ``outputs`` says what the model puts
    out, for metrics: logits, probabilities or values; by default what the loss says. Custom layers
    travel by their class and ``get_config``. Initial parameters are those the model has now.

    A new number of rows compiles anew, so a worker compiles twice: a full and the last minibatch.
    """

    class_axis = -1  # of outputs with steps or pixels

    def __init__(
        self,
        model: Any,
        loss: Any,
        optimizer: Any,
        *,
        outputs: str | None = None,
    ) -> None:
        need_jax()
        need_model(model)
        need_equal(model, revived(keras.saving.serialize_keras_object(model), classes_of(model)))
        excluded = excluded_from_decay(optimizer, model.trainable_variables)
        self._set_up(model, loss, optimizer, outputs_of(outputs, loss), excluded)
        self._initial: Flat | None = flat_of(model.trainable_variables)

    def _set_up(
        self, model: Any, loss: Any, optimizer: Any, outputs: str, excluded: Excluded
    ) -> None:
        """What follows from its parts, here and where it is unpickled."""
        self._model, self._loss, self._outputs = model, loss, outputs
        names = getattr(model, "output_names", None) or ()
        self._rows_loss, self._optimizer = rows_loss_of(loss, names), optimizer_of(optimizer)
        variables = model.trainable_variables
        self._layout = Layout.of((name_of(v), tuple(v.shape)) for v in variables)
        self._excluded = excluded
        places, pattern = excluded
        if places or pattern is not None:
            self._optimizer.exclude_from_weight_decay(
                [variables[i] for i in places], None if pattern is None else [pattern]
            )
        self._optimizer.build(variables)
        self._fixed = [jnp.array(v.value) for v in model.non_trainable_variables]
        self._buffers, self._frozen = buffers_of(model), frozen_of(model)
        self._updater = [jnp.array(v.value) for v in self._optimizer.variables]
        self._pace: tuple[int | None, int] | None = None  # workers (None: always one), position
        self._params: Flat | None = None
        self._initial = None
        self._compile()

    def _compile(self) -> None:
        self._jit_step = jax.jit(self._next, donate_argnums=1)
        self._trial = Trial(
            self._tried,
            "jax",
            "keras",
            of_classes="sparse" in named_loss(self._loss),
            ignored=self.ignored_label,
        )
        self._jit_predict = jax.jit(self._predicted)
        self._jit_loss = jax.jit(self._measured)

    def _finalize_adapted(self) -> None:
        """Have adapted layers compute with the values that this model holds for their variables.

        Keras takes what ``adapt`` measured as constants of the compiled functions.
        """
        if layers := adapted_layers(self._model):
            self._assign_fixed()
            for layer in layers:
                layer.finalize_state()
            self._compile()

    def _assign_fixed(self) -> None:
        for value, variable in zip(self._fixed, self._model.non_trainable_variables, strict=True):
            variable.assign(value)

    def __repr__(self) -> str:
        loss = self._loss if isinstance(self._loss, str) else type(self._loss).__name__
        config = self._optimizer.get_config()
        rate = config["learning_rate"]
        told = f"{float(rate):.6g}" if np.ndim(rate) == 0 and not isinstance(rate, dict) else rate
        optimizer = f"{type(self._optimizer).__name__}(learning_rate={told})"
        size = f"{self.n_params:,} parameters"
        return f"KerasModel({self._model.name}, {size}, loss={loss}, optimizer={optimizer})"

    # -- the flat-parameter protocol -------------------------------------------------------------

    @property
    def n_params(self) -> int:
        """How many trainable parameters."""
        return self._layout.size

    @property
    def outputs(self) -> str:
        """What ``predict`` returns: logits, probabilities or values."""
        return self._outputs

    @property
    def per_label(self) -> bool:
        """Whether the loss takes each of several outputs for a label that is true or false."""
        return "binary" in named_loss(self._loss)

    @property
    def ignored_label(self) -> int | None:
        """The label whose places the loss leaves out; None: it counts all."""
        found = getattr(self._loss, "ignore_class", None)
        return found if isinstance(found, int) else None

    @property
    def module(self) -> Any:
        """The user's model; the bound parameters and what is not trainable are copied into it."""
        for (_, view), variable in zip(
            self._layout.views(self._bound()), self._model.trainable_variables, strict=True
        ):
            variable.assign(view)
        self._assign_fixed()
        return self._model

    def initial(self) -> Flat:
        """The values that the model had when it was passed, f32[n_params]. They do not travel."""
        if self._initial is None:
            raise UsageError(
                "this KerasModel was pickled, and a model travels without its parameters: bind the"
                " ones it should have, or copy it with copy.deepcopy"
            )
        return self._initial.copy()

    def start_from(self, params: Flat) -> None:
        """Have these initial parameters, f32[n_params], in place of the model's own."""
        self._initial = bindable(params, self.n_params).copy()

    def place(self, share: Share) -> None:
        """Draw this worker's own random numbers. Threads were told to XLA at the import."""
        keep_to_task(share.threads)
        for i, variable in enumerate(self._model.non_trainable_variables):
            if is_seed(variable):
                self._fixed[i] = jnp.array([share.seed % 2**32, i], variable.dtype)

    def bind(self, params: Flat) -> None:
        """Read from and write into this memory from now on, f32[n_params]."""
        self._params = bindable(params, self.n_params)

    def step(self, batch: Batch) -> float:
        """One minibatch: change the bound parameters and the buffers; return the mean loss."""
        params = self._bound()
        changed, self._updater, self._fixed, loss = self._jit_step(
            params, self._updater, self._fixed, *batch, self._pace
        )
        np.copyto(params, changed)
        return float(loss)

    def keep_pace(self, workers: int, minibatches: int, counted: int) -> None:
        """Momentum counts the minibatches of so many workers; schedules are where the fit is.

        It compiles once anew when there is more than one; not each time there are others.
        """
        alone = workers == 1 and (self._pace is None or self._pace[0] is None)
        self._pace = None if alone else workers, minibatches

    def horizons(self, workers: int) -> dict[str, str]:
        """What is changed where so many train, for people."""
        return told(self._optimizer, self._model, workers)

    def predict(self, features: Columns) -> Any:
        """What the model puts out in inference, as NumPy arrays [rows, ...]."""
        outputs = self._jit_predict(self._bound(), self._fixed, features)
        return jax.tree_util.tree_map(np.asarray, outputs)

    def loss(self, batch: Batch) -> tuple[float, float]:
        """(sum of weight x loss, sum of weights) in inference and without penalties."""
        mean = float(self._jit_loss(self._bound(), self._fixed, *batch))
        weight = batch.rows if batch.weights is None else batch.weights.sum(dtype=np.float64)
        return mean * float(weight), float(weight)

    def check(self, features: Columns, labels: Columns) -> None:
        """Raise UsageError naming row and value, or what Keras says about the shapes."""
        self._trial.check(features, labels)

    def updater_state(self) -> State:
        """The optimizer's variables, numbered; copies."""
        return state_of(zip(self._updater_names(), self._updater, strict=True))

    def load_updater_state(self, state: State) -> None:
        """Take a state that ``updater_state`` of an equal model returned."""
        wanted = list(zip(self._updater_names(), self._updater, strict=True))
        numberless = {NUMBER.sub("", name): value for name, value in state.items()}
        self._updater = leaves_of(numberless, wanted)

    def layer_of(self, index: int) -> str:
        """Layer and variable that parameter ``index`` is in, like ``dense_1/kernel``."""
        return self._layout.name_of(index)

    def exported(self) -> tuple[str, bytes]:
        """``.keras``, which ``keras.saving.load_model`` opens, with what is bound now."""
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "model.keras"
            keras.saving.save_model(self.module, path)
            return path.suffix, path.read_bytes()

    # -- buffers ---------------------------------------------------------------------------------

    def buffers_bytes(self) -> bytes:
        """BatchNorm's statistics and their like, as they are now."""
        return packed(self._buffer_values())

    def load_buffers_bytes(self, buffers: bytes) -> None:
        """Take what ``buffers_bytes`` or ``saved_buffers_bytes`` of an equal model returned."""
        places = self._buffers
        if len(buffers) != sum(self._fixed[i].nbytes for i in places):
            places = [*self._buffers, *self._frozen]
        like = [np.asarray(self._fixed[i]) for i in places]
        values = unpacked(like, buffers)
        for i, value in zip(places, values, strict=True):
            self._fixed[i] = jnp.array(value)
        if any(not np.array_equal(a, b) for a, b in zip(like, values, strict=True)):
            self._finalize_adapted()

    def saved_buffers_bytes(self) -> bytes:
        """Return the buffers and behind them the frozen layers' weights, for a saved network."""
        return packed([np.asarray(self._fixed[i]) for i in (*self._buffers, *self._frozen)])

    def average_buffers(self, reports: list[bytes]) -> bytes:
        """Means in float64, in the given order; whole numbers take the largest."""
        return averaged(self._buffer_values(), reports)

    def weighed_buffers(self, reports: list[bytes], weights: Sequence[float]) -> bytes:
        """The same where each report counts so much."""
        return averaged(self._buffer_values(), reports, weights)

    def _buffer_values(self) -> list[Any]:
        return [np.asarray(self._fixed[i]) for i in self._buffers]

    # -- pure functions --------------------------------------------------------------------------

    def _next(
        self,
        flat: Any,
        updater: Any,
        fixed: Any,
        features: Any,
        labels: Any,
        weights: Any,
        pace: Any = None,
    ) -> tuple[Any, Any, Any, Any]:
        """One step: (flat, updater, fixed) -> (flat, updater, fixed, loss)."""

        def objective(variables: Any) -> Any:
            outputs, after, penalties = self._model.stateless_call(
                variables, fixed, features, training=True, return_losses=True
            )
            losses = self._rows_loss(labels, outputs)
            loss = mean_loss(losses, first_rows(features), weights)
            return loss + sum(penalties), (loss, after)

        variables = self._variables(flat)
        with remembering(self._model, pace):
            slopes, (loss, fixed) = jax.grad(objective, has_aux=True)(variables)
        with paced(self._optimizer, pace):
            variables, updater = self._optimizer.stateless_apply(updater, slopes, variables)
        flat = jnp.concatenate([variable.reshape(-1) for variable in variables])
        return flat, list(updater), list(fixed), loss

    def _tried(self, features: Any, labels: Any) -> tuple[Any, Any]:
        """A step and a prediction from zeros: outputs and losses."""
        flat = jnp.zeros(self.n_params, jnp.float32)
        with plain_errors():
            self._next(flat, self._updater, self._fixed, features, labels, None)
            outputs = self._predicted(flat, self._fixed, features)
            return outputs, self._rows_loss(labels, outputs)

    def _predicted(self, flat: Any, fixed: Any, features: Any) -> Any:
        return self._model.stateless_call(self._variables(flat), fixed, features, training=False)[0]

    def _measured(self, flat: Any, fixed: Any, features: Any, labels: Any, weights: Any) -> Any:
        losses = self._rows_loss(labels, self._predicted(flat, fixed, features))
        return mean_loss(losses, first_rows(features), weights)

    def _variables(self, flat: Any) -> list[Any]:
        return [view for _, view in self._layout.views(flat)]

    # -- inside ----------------------------------------------------------------------------------

    def _updater_names(self) -> list[str]:
        """Keras counts optimizers without a name, too: in another program it has another number."""
        return [NUMBER.sub("", f"{self._optimizer.name}/{i}") for i in range(len(self._updater))]

    def _bound(self) -> Flat:
        assert self._params is not None, "bind parameters first"
        return self._params

    # -- travelling ------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """What ships: configurations, classes of your own, what is not trainable."""
        return {
            "model": keras.saving.serialize_keras_object(self._model),
            "loss": self._loss,
            "optimizer": keras.saving.serialize_keras_object(self._optimizer),
            "outputs": self._outputs,
            "classes": classes_of(self._model)
            | foreign([self._optimizer, schedule_of(self._optimizer)]),
            "excluded": self._excluded,
            "fixed": [np.asarray(value) for value in self._fixed],
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        need_jax()
        model, optimizer = (revived(state[part], state["classes"]) for part in PARTS)
        excluded = state.get("excluded", NONE_EXCLUDED)  # missing in pickles of earlier versions
        self._set_up(model, state["loss"], optimizer, state["outputs"], excluded)
        self._fixed = [jnp.array(value) for value in state["fixed"]]
        self._finalize_adapted()

    def __deepcopy__(self, memo: dict[int, Any]) -> KerasModel:
        """A model of its own for another fit, with the same initial parameters."""
        twin = object.__new__(type(self))
        twin.__setstate__(self.__getstate__())
        twin._initial = self._initial
        return twin

    def describe(self) -> dict[str, Any]:
        """Names and shapes, and Keras' own configurations where nothing else is in the model."""
        arrays = zip(self._layout.names, self._layout.shapes, strict=True)
        described: dict[str, Any] = {
            "kind": "keras",
            "outputs": self._outputs,
            "parameters": [[NUMBER.sub("", name), list(shape)] for name, shape in arrays],
        }
        parts_of_code = [*all_layers(self._model), self._optimizer, schedule_of(self._optimizer)]
        if foreign(parts_of_code) or is_own(self._loss):
            return described
        loss = getattr(self._loss, "__name__", self._loss)  # of a function: Keras knows it by name
        parts = {"model": self._model, "optimizer": self._optimizer, "loss": loss}
        if self._excluded != NONE_EXCLUDED:
            described["excluded_from_weight_decay"] = list(self._excluded)
        return described | {
            name: keras.saving.serialize_keras_object(part) for name, part in parts.items()
        }

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> KerasModel:
        """The model that ``describe`` described; nothing of another package than Keras is made."""
        if "model" not in description:
            raise UsageError(
                "this model has layers or a loss of your own, whose code was not saved: make the"
                " model as before, and load it with SparkNetwork.load(path, spark,"
                " model=KerasModel(...))"
            )
        need_safe_keras()
        parts = [description[part] for part in (*PARTS, "loss")]
        refuse_other_modules(parts)
        model, optimizer, loss = (
            part if isinstance(part, str) else revived(part, {}) for part in parts
        )
        made = cls(model, loss, optimizer, outputs=description["outputs"])
        if (excluded := description.get("excluded_from_weight_decay")) is not None:
            initial = made._initial
            made._set_up(model, loss, optimizer, made.outputs, (list(excluded[0]), excluded[1]))
            made._initial = initial
        return made


def classes_of(model: Any) -> dict[str, Any]:
    """What Keras needs to make this model again: classes of your own, and what you registered."""
    return {**keras.saving.get_custom_objects(), **foreign(all_layers(model))}


def flat_of(variables: Any) -> Flat:
    """Their values, one behind the other."""
    return np.concatenate([np.asarray(v.value, np.float32).reshape(-1) for v in variables])
