"""Keras' objects: which of them can be trained here, what travels, and what a file may name.

Keras is imported here, on its JAX backend and with a Spark task's threads: it computes while it is
imported, so both must be said before.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from sparkstrom.base.errors import UsageError, first_line
from sparkstrom.models.outputs import KINDS, LOGITS, PROBABILITIES, VALUES
from sparkstrom.models.xla import keep_to_task, row_losses

os.environ.setdefault("KERAS_BACKEND", "jax")
keep_to_task()
try:
    import keras as keras
except ImportError as missing:
    raise UsageError(
        f"{missing}: KerasModel needs it here and on every executor; do pip install"
        " 'sparkstrom[keras]'"
    ) from missing

SAFE_KERAS = (3, 11, 3)  # unsafe deserialization was closed by then: CVE-2025-8747, -9905, -9906
SEED = "seed_generator_state"
RowsLoss = Callable[[Any, Any], Any]  # labels, outputs -> one loss per row
mask_of = importlib.import_module("keras.src.backend").get_keras_mask  # None where there is none
RATE = "_learning_rate"  # a schedule, a variable, or a function without arguments
MEANS = (None, "none", "sum_over_batch_size", "mean", "mean_with_sample_weight")


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """What layers raise keeps its own words; Keras puts lists of arguments around them."""
    was = keras.config.is_traceback_filtering_enabled()
    keras.config.disable_traceback_filtering()
    try:
        yield
    finally:
        if was:
            keras.config.enable_traceback_filtering()


# -- what can be trained ---------------------------------------------------------------------------


def need_jax() -> None:
    """Raise UsageError where Keras runs on another backend."""
    if (backend := keras.backend.backend()) != "jax":
        raise UsageError(
            f"Keras runs on {backend} here: set KERAS_BACKEND=jax in the environment before Keras"
            " is imported, on the driver and for executors (spark.executorEnv.KERAS_BACKEND)"
        )


def need_model(model: Any) -> None:
    """Raise UsageError unless this is a built model of float32 parameters."""
    if not isinstance(model, keras.Model):
        raise UsageError(f"model is a {type(model).__name__}: pass a keras.Model")
    if not (model.built and model.trainable_variables):
        raise UsageError(
            f"{model.name} has no trainable variables yet: give it a keras.Input, call it once, or"
            " thaw some layers"
        )
    _refuse_own_steps(model)
    _refuse_scaled_losses(model)
    _refuse_tensorflow(all_layers(model))
    for variable in model.trainable_variables:
        if variable.dtype != "float32":
            raise UsageError(
                f"parameter {variable.path} is {variable.dtype}: parameters are float32; to"
                " compute in another type take the dtype policy mixed_bfloat16"
            )


OWN_STEPS = ("train_step", "compute_loss", "compute_loss_and_updates", "test_step", "predict_step")


def _refuse_own_steps(model: Any) -> None:
    """Raise UsageError for methods of the user's that Keras' trainer calls and a step here not."""
    for name in OWN_STEPS:
        owner = next((kind for kind in type(model).__mro__ if name in vars(kind)), None)
        if name in vars(model) or (owner is not None and is_own(owner)):
            raise UsageError(
                f"{type(model).__name__} has a {name} of its own, which would not be called: a step"
                " here is call(training=True), the loss that is passed, and the optimizer; put the"
                " computation into call, add_loss and the loss, and leave the method out"
            )


def _refuse_scaled_losses(model: Any) -> None:
    """Raise UsageError if Keras' trainer would scale or weight the loss.

    A step here uses the loss that was passed to KerasModel, unchanged.
    """
    if getattr(model.dtype_policy, "name", None) == "mixed_float16":
        raise UsageError(
            f"{model.name} has the dtype policy mixed_float16, for which Keras scales the loss, but"
            " losses are not scaled here: use the dtype policy mixed_bfloat16, which needs no"
            " scaling"
        )
    compiled = getattr(model, "_compile_config", None)  # absent if compile was not called
    weights = None if compiled is None else compiled.config.get("loss_weights")
    if weights is not None:
        raise UsageError(
            f"{model.name} was compiled with loss_weights={weights!r}, but the arguments of"
            " compile are not used here: pass losses that are functions (labels, outputs) and"
            " multiply by these weights, and compile the model without loss_weights"
        )


BY_TENSORFLOW = ("StringLookup", "IntegerLookup", "TextVectorization", "Hashing", "HashedCrossing")


def _refuse_tensorflow(layers: Iterable[Any]) -> None:
    """Raise UsageError for a layer that uses TensorFlow's operations, which JAX cannot compile."""
    kinds = tuple(getattr(keras.layers, name) for name in BY_TENSORFLOW)
    for layer in layers:
        if isinstance(layer, kinds):
            raise UsageError(
                f"the layer {layer.name} is a {type(layer).__name__}, which computes with"
                " TensorFlow and not with JAX: compute its output in the DataFrame (Spark ML's"
                " StringIndexer, HashingTF), and remove the layer from the model"
            )


def excluded_from_decay(optimizer: Any, variables: Sequence[Any]) -> tuple[list[int], str | None]:
    """Return what ``exclude_from_weight_decay`` was told: places of variables, a pattern of names.

    Neither is in an optimizer's configuration. Raise UsageError for variables of another model.
    """
    keys = getattr(optimizer, "_exclude_from_weight_decay", None) or set()
    places = [i for i, v in enumerate(variables) if keys and optimizer._var_key(v) in keys]
    if len(places) != len(keys):
        raise UsageError(
            f"{optimizer.name}.exclude_from_weight_decay names {len(keys) - len(places)} variables"
            " that the model does not train: pass trainable variables of this model, or var_names"
        )
    pattern = getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
    return places, None if pattern is None else pattern.pattern


def optimizer_of(optimizer: Any) -> Any:
    """An optimizer of our own with these options. Raise UsageError for what cannot step here."""
    if isinstance(optimizer, type | partial):
        kind: Any = getattr(optimizer, "func", optimizer)
        options = getattr(optimizer, "keywords", {}) or {"learning_rate": 0.001}
        said = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise UsageError(
            f"optimizer=keras.optimizers.{kind.__name__}({said}) is what to pass, not the"
            f" {'class' if kind is optimizer else 'functools.partial'} that makes one: call it"
        )
    try:
        made = keras.optimizers.get(optimizer)
    except (TypeError, ValueError) as error:
        raise UsageError(f"optimizer={optimizer!r}: {first_line(error)}") from error
    if made.built and (steps := int(made.iterations)) > 0:
        raise UsageError(
            f"the optimizer {made.name} has taken {steps} steps already, and a fit begins with a"
            " new optimizer: pass one that has not trained, such as"
            " type(optimizer).from_config(optimizer.get_config())"
        )
    if isinstance(made, keras.optimizers.LossScaleOptimizer):
        raise UsageError(
            "LossScaleOptimizer is for float16: take the dtype policy mixed_bfloat16, which needs"
            " no scaled loss"
        )
    if made.use_ema:
        raise UsageError(
            f"{made.name} has use_ema=True: its averages would lack what other workers learn;"
            " pass use_ema=False"
        )
    if made.loss_scale_factor is not None:
        raise UsageError(
            f"{made.name} has loss_scale_factor={made.loss_scale_factor}: losses are not scaled"
            " here; leave it out, bfloat16 (the dtype policy mixed_bfloat16) needs none"
        )
    schedule = schedule_of(made)
    if schedule is None and callable(getattr(made, RATE, None)):
        raise UsageError(
            f"{made.name} has a function as its learning rate, which cannot be saved: pass a number"
            " or a keras.optimizers.schedules.LearningRateSchedule"
        )
    with keras.saving.custom_object_scope(foreign([made, schedule])):
        return type(made).from_config(made.get_config())


def schedule_of(optimizer: Any) -> Any:
    """Return the optimizer's learning rate schedule, or None."""
    rate = getattr(optimizer, RATE, None)
    is_schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
    return rate if is_schedule else None


def rows_loss_of(loss: Any, names: Sequence[str] = ()) -> RowsLoss:
    """The function of labels and outputs that is not yet reduced to one number.

    A list, or a dict by the ``names`` of outputs, has a loss for each output; they add up.
    """
    if isinstance(loss, list | tuple | dict):
        return _sum_of(loss, names)
    if isinstance(loss, str):
        try:
            return rows_loss_of(keras.losses.get(loss))
        except ValueError as error:
            raise UsageError(f"loss={loss!r}: Keras knows no such loss") from error
    if isinstance(loss, keras.losses.Loss):
        if loss.reduction not in MEANS:
            raise UsageError(
                f"{loss.name} has reduction={loss.reduction!r}: a minibatch's loss is the mean over"
                " its rows here; leave the reduction out"
            )
        owner = next(kind for kind in type(loss).__mro__ if "__call__" in vars(kind))
        if is_own(owner):
            raise UsageError(
                f"{type(loss).__name__} has a __call__ of its own, which would not be called:"
                " override call(y_true, y_pred), which returns a loss for each row, instead"
            )
        return _cast_and_masked(loss.call, loss.dtype)
    if not callable(loss):
        raise UsageError(
            f"loss is a {type(loss).__name__}: pass a name, a Loss, a function, or a list or dict"
            " of these for several outputs"
        )
    return _cast_and_masked(loss, keras.config.floatx())


def _sum_of(losses: Any, names: Sequence[str]) -> RowsLoss:
    keys = list(losses) if isinstance(losses, dict) else list(names)
    if sorted(keys) != sorted(names) or len(losses) != len(names):
        given = ", ".join(losses) if isinstance(losses, dict) else len(losses)
        raise UsageError(
            f"losses for the outputs {given}, but the model puts out {', '.join(names)}: give each"
            " output a loss, or pass a function (labels, outputs) that uses some of them"
        )
    by_name = losses if isinstance(losses, dict) else dict(zip(names, losses, strict=True))
    calls = [rows_loss_of(by_name[name]) for name in names]

    def of_row(labels: Any, outputs: Any) -> Any:
        if len(labels) != len(names):
            raise UsageError(f"{len(labels)} arrays of labels for {len(names)} outputs: one each")
        total: Any = 0.0
        for i, (name, call) in enumerate(zip(names, calls, strict=True)):
            label, output = (t[name] if isinstance(t, dict) else t[i] for t in (labels, outputs))
            total = total + row_losses(call(label, output), label.shape[0])
        return total

    return of_row


def _cast_and_masked(call: RowsLoss, dtype: str) -> RowsLoss:
    """Return ``call`` with Keras' casts and masks: masked places are left out of the mean.

    Labels and outputs are cast to ``dtype``, the loss's own. Layers attach masks to outputs, and
    losses with ``ignore_class`` to their results.
    """

    def losses(labels: Any, outputs: Any) -> Any:
        values = call(_floating(labels, dtype), _floating(outputs, dtype))
        masks = [
            mask
            for mask in (mask_of(outputs), mask_of(values))
            if mask is not None and mask.shape == values.shape
        ]
        if not masks:
            return values
        counted = functools.reduce(operator.and_, masks).astype(values.dtype)
        return values * counted * (counted.size / counted.sum().clip(1.0))

    return losses


def _floating(tree: Any, dtype: str) -> Any:
    """Return the tree with floating arrays cast to ``dtype`` and integers, maybe classes, kept."""

    def cast(each: Any) -> Any:
        kind = keras.backend.standardize_dtype(each.dtype)
        return each.astype(dtype) if keras.backend.is_float_dtype(kind) else each

    return keras.tree.map_structure(cast, tree)


def outputs_of(outputs: str | None, loss: Any) -> str:
    """What the model puts out. Raise UsageError for a word that says nothing."""
    if outputs is not None:
        if outputs not in KINDS:
            raise UsageError(f"outputs={outputs!r}: must be one of {', '.join(KINDS)}")
        return outputs
    if "crossentropy" not in named_loss(loss):
        return VALUES
    options = loss.get_config() if isinstance(loss, keras.losses.Loss) else {}
    return LOGITS if options.get("from_logits") else PROBABILITIES


def named_loss(loss: Any) -> str:
    """Its name in small letters, without underscores."""
    called = loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)
    return str(called).lower().replace("_", "")


def name_of(variable: Any) -> str:
    """Its layer's name and its own; the rest of Keras' path depends on who built the layer."""
    return SEED if is_seed(variable) else "/".join(variable.path.split("/")[-2:])


# -- what is not trainable -------------------------------------------------------------------------


def all_layers(model: Any) -> list[Any]:
    """The model and every layer inside."""
    return list(model._flatten_layers())


def is_seed(variable: Any) -> bool:
    """The state of a random generator: a worker's own."""
    return bool(variable.name == SEED)


def buffers_of(model: Any) -> list[int]:
    """Which non-trainable variables layers change in training; frozen layers change none."""
    frozen = set(frozen_of(model))
    return [
        i
        for i, variable in enumerate(model.non_trainable_variables)
        if not is_seed(variable) and i not in frozen
    ]


def frozen_of(model: Any) -> list[int]:
    """Return which non-trainable variables are frozen layers' own, without seeds."""
    still = {
        id(variable)
        for layer in all_layers(model)
        if not layer.trainable
        for variable in layer.variables
    }
    return [
        i
        for i, variable in enumerate(model.non_trainable_variables)
        if id(variable) in still and not is_seed(variable)
    ]


def adapted_layers(model: Any) -> list[Any]:
    """Return the layers that compute with what ``adapt`` measured, not with their variables."""
    return [each for each in all_layers(model) if isinstance(each, keras.layers.Normalization)]


# -- what travels, and what is saved ---------------------------------------------------------------


def is_own(thing: Any) -> bool:
    """Whether this is the user's, not Keras' own: a name, an object, a function."""
    if isinstance(thing, str):
        return False
    where = getattr(thing, "__module__", None) or type(thing).__module__
    return str(where).partition(".")[0] != "keras"


def foreign(objects: Iterable[Any]) -> dict[str, type]:
    """The users' own classes among those of these objects, as Keras calls them."""
    classes = {type(thing) for thing in objects if thing is not None and is_own(type(thing))}
    return {keras.saving.get_registered_name(own): own for own in classes}


def revived(configuration: Any, classes: dict[str, Any]) -> Any:
    """What ``serialize_keras_object`` described. Raise UsageError where Keras cannot make it."""
    try:
        return keras.saving.deserialize_keras_object(configuration, classes)
    except (TypeError, ValueError, ImportError) as error:
        raise UsageError(
            f"a {configuration['class_name']} cannot travel, as Keras does not make it again from"
            " its configuration: give its layers get_config (and build), or register what they use"
            f" with keras.saving.register_keras_serializable; {first_line(error)}"
        ) from error


def need_equal(model: Any, again: Any) -> None:
    """Raise UsageError where a model came back with other variables."""
    had, has = (
        [(name_of(v), tuple(v.shape)) for v in made.trainable_variables + made.variables]
        for made in (model, again)
    )
    for own, other in zip(model.variables, again.variables, strict=False):
        if (name_of(own), tuple(own.shape)) != (name_of(other), tuple(other.shape)):
            break  # the comparison of all names below reports it
        _need_same_options(model, own, other)
    if had != has:
        lacking = [name for name, _ in had if name not in dict(has)] or ["others"]
        raise UsageError(
            f"{model.name} cannot travel: made again from its configuration it lacks"
            f" {', '.join(lacking[:3])}; implement build() so that it makes all variables, or use"
            " keras.Sequential or keras.Model(inputs, outputs)"
        )


OPTIONS_OF_VARIABLES = ("trainable", "regularizer", "constraint")


def _need_same_options(model: Any, own: Any, other: Any) -> None:
    """Raise UsageError if an option of the variable ``own`` is lost in the copy ``other``."""
    for option in OPTIONS_OF_VARIABLES:
        had, has = (
            keras.saving.serialize_keras_object(getattr(v, option, None)) for v in (own, other)
        )
        if had != has:
            remedy = (
                "set trainable of its layer instead"
                if option == "trainable"
                else f"pass it to its layer ({own.name}_{option}=...)"
            )
            raise UsageError(
                f"{model.name} cannot be copied to executors: the {option} of its variable"
                f" {own.path} was set on the variable itself, so its layer's configuration does not"
                f" contain it; {remedy}"
            )


VALUES_OF_KERAS = ("__tensor__", "__numpy__", "__keras_tensor__", "__tuple__", "__slice__")
KINDS_OF_KERAS = (
    *("Layer", "Loss", "Optimizer", "Initializer", "Regularizer", "DTypePolicy"),
    *("Constraint", "LearningRateSchedule", "DTypePolicyMap", "Operation"),
)
UNSAFE = ("Lambda", "TorchModuleWrapper", "TFSMLayer", "JaxLayer", "FlaxLayer")


def _is_safe(module: Any, name: Any, registered: Any) -> bool:
    """Whether a saved description may name this: a value, or a public class of Keras' own.

    Names of functions, of losses and activations, are no class names, and stand as plain text.
    """
    if module is None:
        return name in VALUES_OF_KERAS
    if registered not in (None, name) or str(module).partition(".")[0] != "keras" or name in UNSAFE:
        return False
    with contextlib.suppress(ImportError, AttributeError, TypeError, ValueError):
        found = getattr(importlib.import_module(str(module)), str(name))
        bases = {base.__name__ for base in found.__mro__ if not is_own(base)}
        return isinstance(found, type) and not is_own(found) and bool(bases & set(KINDS_OF_KERAS))
    return False


def need_safe_keras() -> None:
    """Raise UsageError for a Keras that runs code while it makes a model from a description."""
    version = tuple(int(part) for part in re.findall(r"\d+", keras.__version__)[:3])
    if version < SAFE_KERAS:
        raise UsageError(
            f"Keras {keras.__version__} may run code that a saved description names: install"
            f" keras>={'.'.join(map(str, SAFE_KERAS))}, or make the model yourself and pass it:"
            " SparkNetwork.load(path, spark, model=KerasModel(...))"
        )


def refuse_other_modules(configuration: Any) -> None:
    """Raise UsageError where a saved description names code that is not Keras' own."""
    if isinstance(configuration, dict):
        module, name = configuration.get("module"), configuration.get("class_name")
        if name is not None and not _is_safe(module, name, configuration.get("registered_name")):
            raise UsageError(
                f"the description names {module}.{name}: only Keras' own layers, models, losses,"
                " optimizers and their like are made from a file, no functions and no Lambda; make"
                " the model yourself, and pass it to load"
            )
        configuration = list(configuration.values())
    if isinstance(configuration, list):
        for part in configuration:
            refuse_other_modules(part)
