"""KerasModel: a Keras 3 model on the JAX backend, with its parameters in one flat vector.

A step is a pure function, built from Keras' stateless calls and jitted. The flat vector contains
the trainable variables. There are three kinds of non-trainable variables: layer statistics
(BatchNorm's) are buffers, which are averaged over the workers; seeds of random generators differ
between workers; weights of frozen layers do not change.
"""

from __future__ import annotations

import re
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import is_whole
from sparkstrom.models.activations_and_losses import loss_name
from sparkstrom.models.base import Batch, Flat, Layout, Share, State, check_bindable
from sparkstrom.models.jax_common import (
    FlatJaxModel,
    ShapeCheck,
    jax,
    jnp,
    leaves_from_state,
    limit_to_task_cpus,
    mean_loss,
    pack_buffers,
    state_from_leaves,
    unpack_buffers,
)
from sparkstrom.models.keras_support import (
    copy_optimizer,
    describe_loss,
    describe_scaling,
    deserialize,
    find_adapted_layers,
    find_buffer_variables,
    find_custom_classes,
    find_frozen_variables,
    get_decay_exclusions,
    get_schedule,
    get_variable_name,
    is_seed,
    is_user_defined,
    keras,
    list_layers,
    list_losses,
    list_output_names,
    loss_options,
    normalize_loss_name,
    refuse_foreign_code,
    require_built_model,
    require_equal_copy,
    require_jax_backend,
    require_safe_keras,
    resolve_outputs,
    resolve_row_loss,
    scaled_optimizer,
    scaled_statistics,
    takes_class_indices,
    unfiltered_tracebacks,
)

__all__ = ["KerasModel"]

SERIALIZED_PARTS = ("model", "optimizer")
# Trainable variables excluded from weight decay: those with these indices, and those whose names
# match this pattern.
DecayExclusions = tuple[list[int], str | None]
NO_EXCLUSIONS: DecayExclusions = ([], None)
NAME_COUNTER = re.compile(r"_\d+(?=/)")  # the number that Keras adds to names, unique in a process


class KerasModel(FlatJaxModel):
    """A built Keras model with its loss and optimizer.

    The initial parameters are the values that the Keras model has when this object is created.
    Arguments of Keras' ``compile`` are not used. Custom layers are sent to executors as their class
    and the result of ``get_config``. JAX compiles the step for each new number of rows, so a worker
    compiles it twice: for a full minibatch and for the last one.

    Args:
        model: a ``keras.Model`` that has been built.
        loss: the name of a Keras loss, a ``keras.losses.Loss``, or a function (labels, outputs) ->
            one loss per row. For several outputs, a list of losses or a dict by output name; they
            are summed. Outputs that are a dict are named by its keys; a list is in the order of the
            sorted keys, as in Keras.
        optimizer: a ``keras.optimizers.Optimizer``, whose learning rate may be a schedule, or an
            optimizer's name. The model trains with a copy of it.
        outputs: what the model returns, for metrics: logits, probabilities or values; by default
            determined by the loss.

    Raises:
        UsageError: model, loss or optimizer cannot be trained here or sent to executors.
    """

    step_weight: float | None = None  # see ``models.base.get_step_weight``

    def __init__(
        self, model: Any, loss: Any, optimizer: Any, *, outputs: str | None = None
    ) -> None:
        require_jax_backend()
        require_built_model(model)
        require_equal_copy(
            model,
            deserialize(keras.saving.serialize_keras_object(model), collect_custom_objects(model)),
        )
        exclusions = get_decay_exclusions(optimizer, model.trainable_variables)
        self._set_up(model, loss, optimizer, resolve_outputs(outputs, loss), exclusions)
        self._initial: Flat | None = flatten_variables(model.trainable_variables)

    def _set_up(
        self, model: Any, loss: Any, optimizer: Any, outputs: str, exclusions: DecayExclusions
    ) -> None:
        """Initialize all attributes from these arguments; also called after unpickling.

        ``outputs`` is the output kind; ``exclusions`` are variables without weight decay.
        """
        self._model, self._loss, self._outputs = model, loss, outputs
        self._row_loss = resolve_row_loss(loss, list_output_names(model))
        self._optimizer = copy_optimizer(optimizer)
        variables = model.trainable_variables
        self._layout = Layout.from_shapes((get_variable_name(v), tuple(v.shape)) for v in variables)
        self._decay_exclusions = exclusions
        indices, pattern = exclusions
        if indices or pattern is not None:
            self._optimizer.exclude_from_weight_decay(
                [variables[i] for i in indices], None if pattern is None else [pattern]
            )
        self._optimizer.build(variables)
        self._non_trainable = [jnp.array(v.value) for v in model.non_trainable_variables]
        self._buffers, self._frozen = find_buffer_variables(model), find_frozen_variables(model)
        self._optimizer_state = [jnp.array(v.value) for v in self._optimizer.variables]
        self._initial = None
        self._compile_functions()

    def _compile_functions(self) -> None:
        """Create the jitted functions; each is compiled in its first call."""
        self._jit_step = jax.jit(self._train_step, donate_argnums=1)
        self._shape_check = ShapeCheck(
            self._trace_step,
            "jax",
            "keras",
            takes_classes=takes_class_indices(self._loss),
            ignored_label=self.ignored_label,
        )
        self._jit_predict = jax.jit(self._compute_outputs)
        self._jit_loss = jax.jit(self._compute_loss)

    def _finalize_adapted_layers(self) -> None:
        """Make layers fitted by Keras' ``adapt`` use this model's values of their variables.

        This is needed because Keras compiles the results of ``adapt`` into functions as constants.
        """
        if layers := find_adapted_layers(self._model):
            self._assign_non_trainable()
            for layer in layers:
                layer.finalize_state()
            self._compile_functions()

    def _assign_non_trainable(self) -> None:
        """Copy the current non-trainable values into the variables of the Keras model."""
        for value, variable in zip(
            self._non_trainable, self._model.non_trainable_variables, strict=True
        ):
            variable.assign(value)

    def __repr__(self) -> str:
        loss = self._loss if isinstance(self._loss, str) else loss_name(self._loss)
        config = self._optimizer.get_config()
        rate = config["learning_rate"]
        rate_text = (
            f"{float(rate):.6g}" if np.ndim(rate) == 0 and not isinstance(rate, dict) else rate
        )
        optimizer = f"{type(self._optimizer).__name__}(learning_rate={rate_text})"
        size = f"{self.n_params:,} parameters"
        return f"KerasModel({self._model.name}, {size}, loss={loss}, optimizer={optimizer})"

    @property
    def per_label(self) -> bool:
        """Whether the loss treats each output as a separate label that is true or false."""
        return "binary" in normalize_loss_name(self._loss)

    @property
    def ignored_label(self) -> int | None:
        """The label that the loss ignores, or None."""
        label = getattr(self._loss, "ignore_class", loss_options(self._loss).get("ignore_class"))
        return int(label) if is_whole(label) else None

    @property
    def module(self) -> Any:
        """The Keras model; each access copies the bound parameters and other values into it."""
        for (_, view), variable in zip(
            self._layout.views(self._require_bound()), self._model.trainable_variables, strict=True
        ):
            variable.assign(view)
        self._assign_non_trainable()
        return self._model

    def initial(self) -> Flat:
        """Return the initial parameters, f32[n_params].

        They are those given to ``start_from``, else the Keras model's at the creation of this
        object. Raise UsageError if it was unpickled without ``start_from``.
        """
        if self._initial is None:
            raise UsageError(
                "this KerasModel was pickled, and pickles contain no parameters: bind parameters,"
                " or copy the model with copy.deepcopy"
            )
        return self._initial.copy()

    def start_from(self, params: Flat) -> None:
        """Make later calls of ``initial`` return a copy of these parameters, f32[n_params]."""
        self._initial = check_bindable(params, self.n_params).copy()

    def place(self, share: Share) -> None:
        """Set this worker's random seeds. XLA's threads were already limited at Keras' import."""
        limit_to_task_cpus(share.threads)
        for i, variable in enumerate(self._model.non_trainable_variables):
            if is_seed(variable):
                self._non_trainable[i] = jnp.array([share.seed % 2**32, i], variable.dtype)

    def step(self, batch: Batch) -> float:
        """Train on one minibatch: change the bound parameters and buffers; return the mean loss.

        If no row or label counts, change nothing and return 0.
        """
        self.step_weight = self._weigh(batch)
        if not self.step_weight:
            return 0.0
        params = self._require_bound()
        changed, self._optimizer_state, self._non_trainable, loss = self._jit_step(
            params, self._optimizer_state, self._non_trainable, *batch, self._fit_position
        )
        np.copyto(params, changed)
        return float(loss)

    def loss(self, batch: Batch) -> tuple[float, float]:
        """Return (sum of weight x loss, sum of weights) in inference mode, without penalties."""
        total, rows = super().loss(batch)
        weight = self._weigh(batch)
        return (total * weight / rows if rows else 0.0), weight

    def _weigh(self, batch: Batch) -> float:
        """Return the weight of the batch's mean loss.

        It is the sum of each row's weight times the share of its labels that are not ignored.
        """
        if self.ignored_label is None or not isinstance(batch.labels, np.ndarray):
            return batch.total_weight
        shares = (batch.labels != self.ignored_label).reshape(batch.rows, -1).mean(axis=1)
        return float(shares.sum() if batch.weights is None else batch.weights @ shares)

    def _mean_loss(self, outputs: Any, features: Any, labels: Any, weights: Any) -> Any:
        """Return the mean loss over labels that are not ignored, each with its row's weight.

        This is a pure function. The losses of rows are already divided by the share of counted
        labels in the batch, in which rows do not have weights.
        """
        mean = mean_loss(self._compute_losses(outputs, labels), features, weights)
        if self.ignored_label is None or weights is None or not hasattr(labels, "reshape"):
            return mean
        counted = (labels.astype(jnp.float32) != self.ignored_label).reshape(len(weights), -1)
        shares = counted.mean(axis=1)
        total = (weights * shares).sum()
        return mean * shares.mean() * weights.sum() / jnp.where(total > 0, total, 1.0)

    def _compute_loss(
        self, flat: Any, non_trainable: Any, features: Any, labels: Any, weights: Any
    ) -> Any:
        """Return the mean loss in inference mode. This is a pure function of its arguments."""
        outputs = self._compute_outputs(flat, non_trainable, features)
        return self._mean_loss(outputs, features, labels, weights)

    def horizons(self, workers: int) -> dict[str, str]:
        """Return what this many workers change in optimizer and BatchNorm: name -> text."""
        return describe_scaling(self._optimizer, self._model, workers)

    def has_adaptive_optimizer(self) -> bool:
        """Return whether steps are divided by the size of past gradients, as in Adam."""
        # What keeps the divisor above 0: Adafactor has two; Ftrl's sum starts from it.
        names = self._optimizer.get_config()
        return any(n.startswith("epsilon") or n == "initial_accumulator_value" for n in names)

    def updater_state(self) -> State:
        """Return copies of the optimizer's variables, named by optimizer and number."""
        return state_from_leaves(
            zip(self._optimizer_state_names(), self._optimizer_state, strict=True)
        )

    def load_updater_state(self, state: State) -> None:
        """Restore a state from ``updater_state``; raise UsageError if names or shapes differ."""
        wanted = list(zip(self._optimizer_state_names(), self._optimizer_state, strict=True))
        unnumbered = {NAME_COUNTER.sub("", name): value for name, value in state.items()}
        self._optimizer_state = leaves_from_state(unnumbered, wanted)

    def exported(self) -> tuple[str, bytes]:
        """Return (".keras", content): a file with the bound values for Keras' ``load_model``."""
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "model.keras"
            keras.saving.save_model(self.module, path)
            return path.suffix, path.read_bytes()

    def load_buffers_bytes(self, buffers: bytes) -> None:
        """Restore the result of ``buffers_bytes`` or ``saved_buffers_bytes`` of an equal model.

        The size of ``buffers`` tells which of them it is. Raise UsageError if it is neither.
        """
        indices = self._buffers
        if len(buffers) != sum(self._non_trainable[i].nbytes for i in indices):
            indices = [*self._buffers, *self._frozen]
        like = [np.asarray(self._non_trainable[i]) for i in indices]
        values = unpack_buffers(like, buffers)
        for i, value in zip(indices, values, strict=True):
            self._non_trainable[i] = jnp.array(value)
        if any(not np.array_equal(a, b) for a, b in zip(like, values, strict=True)):
            self._finalize_adapted_layers()

    def saved_buffers_bytes(self) -> bytes:
        """Return the buffers followed by the frozen layers' weights, for a saved network."""
        return pack_buffers(
            [np.asarray(self._non_trainable[i]) for i in (*self._buffers, *self._frozen)]
        )

    def _buffer_values(self) -> list[Any]:
        """Return the current buffers as NumPy arrays."""
        return [np.asarray(self._non_trainable[i]) for i in self._buffers]

    def _train_step(
        self,
        flat: Any,
        optimizer_state: Any,
        non_trainable: Any,
        features: Any,
        labels: Any,
        weights: Any,
        fit_position: Any = None,
    ) -> tuple[Any, Any, Any, Any]:
        """Compute a step; return the new (flat vector, optimizer state, other variables, loss).

        This is a pure function, because JAX compiles it. ``non_trainable`` are the other variables,
        ``weights`` those of the rows, or None. ``fit_position`` is (number of workers, minibatches
        of the fit so far), as set by ``keep_pace``, or None. The loss is a mean without penalties.
        """

        def objective(variables: Any) -> Any:
            """Return the loss with penalties, and (loss without penalties, changed variables)."""
            outputs, changed, penalties = self._model.stateless_call(
                variables, non_trainable, features, training=True, return_losses=True
            )
            loss = self._mean_loss(outputs, features, labels, weights)
            return loss + sum(penalties), (loss, changed)

        variables = self._split_params(flat)
        with scaled_statistics(self._model, fit_position):
            gradients, (loss, non_trainable) = jax.grad(objective, has_aux=True)(variables)
        with scaled_optimizer(self._optimizer, fit_position):
            variables, optimizer_state = self._optimizer.stateless_apply(
                optimizer_state, gradients, variables
            )
        flat = jnp.concatenate([variable.reshape(-1) for variable in variables])
        return flat, list(optimizer_state), list(non_trainable), loss

    def _trace_step(self, features: Any, labels: Any) -> tuple[Any, Any]:
        """Train and predict with all parameters 0, to trace shapes; return (outputs, losses)."""
        flat = jnp.zeros(self.n_params, jnp.float32)
        with unfiltered_tracebacks():
            self._train_step(
                flat, self._optimizer_state, self._non_trainable, features, labels, None
            )
            outputs = self._compute_outputs(flat, self._non_trainable, features)
            return outputs, self._compute_losses(outputs, labels)

    def _compute_outputs(self, flat: Any, non_trainable: Any, features: Any) -> Any:
        """Return the outputs in inference mode. This is a pure function of its arguments."""
        return self._model.stateless_call(
            self._split_params(flat), non_trainable, features, training=False
        )[0]

    def _compute_losses(self, outputs: Any, labels: Any) -> Any:
        """Return the losses [rows, ...]. This is a pure function of its arguments."""
        return self._row_loss(labels, outputs)

    def _split_params(self, flat: Any) -> list[Any]:
        """Return the values of the trainable variables as parts of the flat vector."""
        return [view for _, view in self._layout.views(flat)]

    def _optimizer_state_names(self) -> list[str]:
        """Return a name for each of the optimizer's variables, without Keras' object counter."""
        return [
            NAME_COUNTER.sub("", f"{self._optimizer.name}/{i}")
            for i in range(len(self._optimizer_state))
        ]

    def __getstate__(self) -> dict[str, Any]:
        """Return the parts of a pickle: configurations, custom classes and non-trainable values.

        Parameters and the optimizer's state are not included.
        """
        return {
            "model": keras.saving.serialize_keras_object(self._model),
            "loss": self._loss,
            "optimizer": keras.saving.serialize_keras_object(self._optimizer),
            "outputs": self._outputs,
            "classes": collect_custom_objects(self._model)
            | find_custom_classes([self._optimizer, get_schedule(self._optimizer)]),
            "excluded": self._decay_exclusions,
            "fixed": [np.asarray(value) for value in self._non_trainable],
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Recreate the model from its configuration, without initial parameters."""
        require_jax_backend()
        model, optimizer = (deserialize(state[part], state["classes"]) for part in SERIALIZED_PARTS)
        exclusions = state.get("excluded", NO_EXCLUSIONS)  # pickles of earlier versions lack this
        self._set_up(model, state["loss"], optimizer, state["outputs"], exclusions)
        self._non_trainable = [jnp.array(value) for value in state["fixed"]]
        self._finalize_adapted_layers()

    def __deepcopy__(self, memo: dict[int, Any]) -> KerasModel:
        """Return a separate model for another fit, with the same initial parameters."""
        copied = object.__new__(type(self))
        copied.__setstate__(self.__getstate__())
        copied._initial = self._initial
        return copied

    def describe(self) -> dict[str, Any]:
        """Return the parameters' names and shapes, and what is needed to make the model again.

        That is Keras' configurations of model, optimizer and loss if all their classes are
        Keras' own; otherwise ``code_of`` contains the names of the user's classes and losses.
        """
        arrays = zip(self._layout.names, self._layout.shapes, strict=True)
        described: dict[str, Any] = {
            "kind": "keras",
            "outputs": self._outputs,
            "parameters": [[NAME_COUNTER.sub("", name), list(shape)] for name, shape in arrays],
        }
        parts_of_code = [*list_layers(self._model), self._optimizer, get_schedule(self._optimizer)]
        own_losses = [loss for loss in list_losses(self._loss) if is_user_defined(loss)]
        if code := [*find_custom_classes(parts_of_code), *map(_format_custom_loss, own_losses)]:
            return described | {"code_of": code}
        described["loss"] = describe_loss(self._loss)
        parts = {"model": self._model, "optimizer": self._optimizer}
        if self._decay_exclusions != NO_EXCLUSIONS:
            described["excluded_from_weight_decay"] = list(self._decay_exclusions)
        return described | {
            name: keras.saving.serialize_keras_object(part) for name, part in parts.items()
        }

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> KerasModel:
        """Make the model that ``describe`` described, using only Keras' own classes.

        Raise UsageError if the model contains classes or losses of the user's own, or if the
        description names code of other packages.
        """
        if "model" not in description:
            raise UsageError(
                f"this model has layers or a loss of your own{_format_missing_code(description)},"
                " whose code was not saved: create the model as before, and load it with"
                " SparkNetwork.load(path, spark, model=KerasModel(...))"
            )
        require_safe_keras()
        parts = [description[part] for part in (*SERIALIZED_PARTS, "loss")]
        refuse_foreign_code(parts)
        model, optimizer, loss = (
            part if isinstance(part, str) else deserialize(part, {}) for part in parts
        )
        instance = cls(model, loss, optimizer, outputs=description["outputs"])
        if (exclusions := description.get("excluded_from_weight_decay")) is not None:
            initial = instance._initial
            instance._set_up(
                model, loss, optimizer, instance.outputs, (list(exclusions[0]), exclusions[1])
            )
            instance._initial = initial
        return instance


def collect_custom_objects(model: Any) -> dict[str, Any]:
    """Return all objects registered with Keras and the model's custom classes, by Keras' names."""
    return {**keras.saving.get_custom_objects(), **find_custom_classes(list_layers(model))}


def _format_custom_loss(loss: Any) -> str:
    """Return the text for a user's loss in the list ``code_of`` of a description."""
    kind = "functools.partial of " if isinstance(loss, partial) else ""
    return f"loss {kind}{loss_name(loss)}"


def _format_missing_code(description: dict[str, Any]) -> str:
    """Return the names in the description's ``code_of``, in parentheses; "" if there are none."""
    names = description.get("code_of")
    return f" ({', '.join(map(str, names))})" if isinstance(names, list) and names else ""


def flatten_variables(variables: Any) -> Flat:
    """Return a copy of the variables' values as one vector, f32[n_params]."""
    return np.concatenate([np.asarray(v.value, np.float32).reshape(-1) for v in variables])
