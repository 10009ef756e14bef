"""Helpers of KerasModel: check and convert models, losses and optimizers; scale momentum.

Other modules import Keras only from here. Because importing Keras already runs a computation, this
module first selects the JAX backend and, in a Spark task, limits the number of XLA's threads.
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
from sparkstrom.base.option_types import shown
from sparkstrom.models.activations_and_losses import loss_name
from sparkstrom.models.jax_common import limit_to_task_cpus, reduce_to_row_losses
from sparkstrom.models.momentum_scaling import (
    BY_FIT,
    KERAS_MOMENTA,
    describe_change,
    join_changes,
    scale_momentum,
)
from sparkstrom.models.output_interpretation import LOGITS, OUTPUTS_OPTION, PROBABILITIES, VALUES

os.environ.setdefault("KERAS_BACKEND", "jax")
limit_to_task_cpus()
try:
    import keras as keras
except ImportError as missing:
    raise UsageError(
        f"{missing}: KerasModel needs it here and on every executor; do pip install"
        " 'sparkstrom[keras]'"
    ) from missing

# The first version without unsafe deserialization: CVE-2025-8747, -9905, -9906.
SAFE_KERAS_VERSION = (3, 11, 3)
SEED_STATE = "seed_generator_state"
RowLoss = Callable[[Any, Any], Any]  # labels, outputs -> one loss per row
get_keras_mask = importlib.import_module("keras.src.backend").get_keras_mask
squeeze_or_expand = importlib.import_module("keras.src.losses.loss").squeeze_or_expand_to_same_rank
LossFunctionWrapper = importlib.import_module("keras.src.losses.losses").LossFunctionWrapper
RATE_ATTRIBUTE = "_learning_rate"  # holds a schedule, a variable, or a function
MEAN_REDUCTIONS = (None, "none", "sum_over_batch_size", "mean", "mean_with_sample_weight")


@contextlib.contextmanager
def unfiltered_tracebacks() -> Iterator[None]:
    """Disable Keras' traceback filter, which adds arguments to errors, within the context."""
    was_enabled = keras.config.is_traceback_filtering_enabled()
    keras.config.disable_traceback_filtering()
    try:
        yield
    finally:
        if was_enabled:
            keras.config.enable_traceback_filtering()


def require_jax_backend() -> None:
    """Raise UsageError unless Keras runs on JAX."""
    if (backend := keras.backend.backend()) != "jax":
        raise UsageError(
            f"Keras runs on {backend} here: set KERAS_BACKEND=jax in the environment before Keras"
            " is imported, on the driver and for executors (spark.executorEnv.KERAS_BACKEND)"
        )


def require_built_model(model: Any) -> None:
    """Raise UsageError unless ``model`` is a built Keras model that can be trained here."""
    if not isinstance(model, keras.Model):
        raise UsageError(f"model is a {type(model).__name__}: pass a keras.Model")
    if not (model.built and model.trainable_variables):
        raise UsageError(
            f"{model.name} has no trainable variables yet: give it a keras.Input, call it once, or"
            " unfreeze some layers"
        )
    _refuse_custom_steps(model)
    _refuse_scaled_losses(model)
    _refuse_tensorflow_layers(list_layers(model))
    for variable in model.trainable_variables:
        if variable.dtype != "float32":
            raise UsageError(
                f"parameter {variable.path} is {variable.dtype}: parameters are float32; to"
                " compute in another type use the dtype policy mixed_bfloat16"
            )


TRAINER_METHODS = (  # called only by Keras' own trainer
    "train_step",
    "compute_loss",
    "compute_loss_and_updates",
    "test_step",
    "predict_step",
)


def _refuse_custom_steps(model: Any) -> None:
    """Raise UsageError if a model overrides a method that only Keras' own trainer would call."""
    for name in TRAINER_METHODS:
        owner = next((kind for kind in type(model).__mro__ if name in vars(kind)), None)
        if name in vars(model) or (owner is not None and is_user_defined(owner)):
            raise UsageError(
                f"{type(model).__name__} overrides {name}, which would not be called: a step here"
                " is call(training=True), the loss that is passed, and the optimizer; move the"
                " computation into call, add_loss and the loss, and remove the method"
            )


def _refuse_scaled_losses(model: Any) -> None:
    """Raise UsageError if Keras' own trainer would scale or weight the loss.

    A step here uses the loss exactly as it was passed to KerasModel.
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


TENSORFLOW_LAYERS = (
    "StringLookup",
    "IntegerLookup",
    "TextVectorization",
    "Hashing",
    "HashedCrossing",
)


def _refuse_tensorflow_layers(layers: Iterable[Any]) -> None:
    """Raise UsageError for a layer that uses TensorFlow operations, which JAX cannot compile."""
    kinds = tuple(getattr(keras.layers, name) for name in TENSORFLOW_LAYERS)
    for layer in layers:
        if isinstance(layer, kinds):
            raise UsageError(
                f"the layer {layer.name} is a {type(layer).__name__}, which computes with"
                " TensorFlow and not with JAX: compute its output in the DataFrame (Spark ML's"
                " StringIndexer, HashingTF), and remove the layer from the model"
            )


def get_decay_exclusions(optimizer: Any, variables: Sequence[Any]) -> tuple[list[int], str | None]:
    """Return the variables excluded from weight decay: (variable indices, name pattern or None).

    These arguments of ``exclude_from_weight_decay`` are not part of an optimizer's configuration.
    Raise UsageError for variables of another model.
    """
    keys = getattr(optimizer, "_exclude_from_weight_decay", None) or set()
    indices = [i for i, v in enumerate(variables) if keys and optimizer._var_key(v) in keys]
    if len(indices) != len(keys):
        raise UsageError(
            f"{optimizer.name}.exclude_from_weight_decay names {len(keys) - len(indices)} variables"
            " that the model does not train: pass trainable variables of this model, or var_names"
        )
    pattern = getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
    return indices, None if pattern is None else pattern.pattern


def copy_optimizer(optimizer: Any) -> Any:
    """Return a new, unbuilt copy of an optimizer, which may be given by name, such as "adam".

    Raise UsageError for a value that is not an optimizer, an optimizer that has already trained, or
    one with features that are not available here: loss scaling, averages of the parameters
    (``use_ema``), or a function as its learning rate.
    """
    if isinstance(optimizer, type | partial):
        kind: Any = getattr(optimizer, "func", optimizer)
        options = getattr(optimizer, "keywords", {}) or {"learning_rate": 0.001}
        arguments = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise UsageError(
            f"pass optimizer=keras.optimizers.{kind.__name__}({arguments}) instead of the"
            f" {'class' if kind is optimizer else 'functools.partial'} that makes one: call it"
        )
    try:
        template = keras.optimizers.get(optimizer)
    except (TypeError, ValueError, KeyError) as error:
        why = first_line(error)[:200]
        raise UsageError(
            f"optimizer={shown(optimizer)}: Keras cannot create an optimizer from it"
            f" ({type(error).__name__}: {why})"
        ) from error
    if template is None:
        raise UsageError("optimizer=None: pass an optimizer of Keras, or its name, such as 'adam'")
    if template.built and (steps := int(template.iterations)) > 0:
        raise UsageError(
            f"the optimizer {template.name} has taken {steps} steps already, and a fit starts with"
            " a new optimizer: pass one that has not trained, such as"
            " type(optimizer).from_config(optimizer.get_config())"
        )
    if isinstance(template, keras.optimizers.LossScaleOptimizer):
        raise UsageError(
            "LossScaleOptimizer is for float16: use the dtype policy mixed_bfloat16, which needs"
            " no scaled loss"
        )
    if template.use_ema:
        raise UsageError(
            f"{template.name} has use_ema=True: its averages would not include other workers'"
            " updates; pass use_ema=False"
        )
    if template.loss_scale_factor is not None:
        raise UsageError(
            f"{template.name} has loss_scale_factor={template.loss_scale_factor}: losses are not"
            " scaled here; remove it, bfloat16 (the dtype policy mixed_bfloat16) needs none"
        )
    schedule = get_schedule(template)
    if schedule is None and callable(getattr(template, RATE_ATTRIBUTE, None)):
        raise UsageError(
            f"{template.name} has a function as its learning rate, which cannot be saved: pass a"
            " number or a keras.optimizers.schedules.LearningRateSchedule"
        )
    with keras.saving.custom_object_scope(find_custom_classes([template, schedule])):
        return type(template).from_config(template.get_config())


def get_schedule(optimizer: Any) -> Any:
    """Return the optimizer's learning-rate schedule, or None."""
    rate = getattr(optimizer, RATE_ATTRIBUTE, None)
    is_schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
    return rate if is_schedule else None


def resolve_row_loss(loss: Any, output_names: Sequence[str] = ()) -> RowLoss:
    """Return a function (labels, outputs) -> losses [rows, ...], not reduced to a single number.

    Args:
        loss: a name, ``Loss`` or function; for several outputs a list, or a dict by output name,
            of losses to sum.
        output_names: names of the model's outputs.

    Raises:
        UsageError: the loss is unknown or not a mean over rows, or an output has no loss.
    """
    if isinstance(loss, list | tuple | dict):
        return _sum_losses(loss, output_names)
    if isinstance(loss, str):
        try:
            return resolve_row_loss(keras.losses.get(loss))
        except ValueError as error:
            raise UsageError(f"loss={shown(loss)}: Keras has no such loss") from error
    if isinstance(loss, keras.losses.Loss):
        if loss.reduction not in MEAN_REDUCTIONS:
            raise UsageError(
                f"{loss.name} has reduction={loss.reduction!r}: a minibatch's loss is the mean over"
                " its rows here; remove the reduction"
            )
        owner = next(kind for kind in type(loss).__mro__ if "__call__" in vars(kind))
        if is_user_defined(owner):
            raise UsageError(
                f"{type(loss).__name__} overrides __call__, which would not be called:"
                " override call(y_true, y_pred), which returns a loss for each row, instead"
            )
        return _with_casts_and_masks(loss.call, loss.dtype)
    if not callable(loss):
        raise UsageError(
            f"loss is a {type(loss).__name__}: pass a name, a Loss, a function, or a list or dict"
            " of these for several outputs"
        )
    return _with_casts_and_masks(_with_equal_ranks(loss), keras.config.floatx())


def list_output_names(model: Any) -> list[str]:
    """Return the names of a model's outputs, in the order of Keras' lists of losses and labels.

    They are the sorted keys of a dict of outputs, otherwise the names of the outputs' layers; [] if
    Keras does not know the outputs before the model is called.
    """
    names = list(getattr(model, "output_names", None) or ())
    outputs: Any = model.output if names else None
    is_flat = isinstance(outputs, dict) and len(outputs) == len(names)
    return sorted(map(str, outputs)) if is_flat else names


def _with_equal_ranks(function: RowLoss) -> RowLoss:
    """Return a loss function that calls ``function`` with labels and outputs of the same rank.

    As after Keras' ``compile``, labels [rows] become [rows, 1] for outputs [rows, 1], with which
    they would otherwise be broadcast. Tuples and dicts are passed unchanged.
    """

    def losses(labels: Any, outputs: Any) -> Any:
        """Return the losses of ``function``."""
        if hasattr(labels, "shape") and hasattr(outputs, "shape"):
            labels, outputs = squeeze_or_expand(labels, outputs)
        return function(labels, outputs)

    return losses


def _sum_losses(losses: Any, output_names: Sequence[str]) -> RowLoss:
    """Return a function that sums the losses of all outputs, one sum per row.

    Raise UsageError unless ``losses``, a list or a dict by name, has one loss for each output.
    """
    if not losses:
        raise UsageError(f"loss={losses!r}: give each output a loss")
    keys = list(losses) if isinstance(losses, dict) else list(output_names)
    if sorted(map(str, keys)) != sorted(output_names) or len(losses) != len(output_names):
        given = ", ".join(map(str, losses)) if isinstance(losses, dict) else len(losses)
        raise UsageError(
            f"losses for the outputs {given}, but the model returns {', '.join(output_names)}: give"
            " each output a loss, or pass a function (labels, outputs) that uses some of them"
        )
    by_name = losses if isinstance(losses, dict) else dict(zip(output_names, losses, strict=True))
    calls = [resolve_row_loss(by_name[name]) for name in output_names]

    def sum_row_losses(labels: Any, outputs: Any) -> Any:
        """Return the sum of the outputs' losses, one per row."""
        if len(labels) != len(output_names):
            raise UsageError(
                f"{len(labels)} arrays of labels for {len(output_names)} outputs: pass one for each"
            )
        total: Any = 0.0
        for i, (name, call) in enumerate(zip(output_names, calls, strict=True)):
            label, output = (t[name] if isinstance(t, dict) else t[i] for t in (labels, outputs))
            total = total + reduce_to_row_losses(call(label, output), label.shape[0])
        return total

    return sum_row_losses


def _with_casts_and_masks(call: RowLoss, dtype: str) -> RowLoss:
    """Return the loss function ``call`` with Keras' casts and masks added.

    Labels and outputs are cast to ``dtype``. Masked positions are excluded from the mean; layers
    attach masks to outputs, and losses with ``ignore_class`` attach them to their results.
    """

    def losses(labels: Any, outputs: Any) -> Any:
        """Return the losses of ``call``, scaled so that masked positions do not count."""
        values = call(_cast_floats(labels, dtype), _cast_floats(outputs, dtype))
        masks = [
            mask
            for mask in (get_keras_mask(outputs), get_keras_mask(values))
            if mask is not None and mask.shape == values.shape
        ]
        if not masks:
            return values
        counted = functools.reduce(operator.and_, masks).astype(values.dtype)
        return values * counted * (counted.size / counted.sum().clip(1.0))

    return losses


def _cast_floats(tree: Any, dtype: str) -> Any:
    """Return the tree with floating-point arrays cast to ``dtype``; other arrays are unchanged."""

    def cast(each: Any) -> Any:
        """Return one array, cast if it is floating-point."""
        kind = keras.backend.standardize_dtype(each.dtype)
        return each.astype(dtype) if keras.backend.is_float_dtype(kind) else each

    return keras.tree.map_structure(cast, tree)


def resolve_outputs(outputs: str | None, loss: Any) -> str:
    """Return the valid output kind ``outputs``, or for None the one that the loss implies."""
    if outputs is not None:
        return str(OUTPUTS_OPTION.read("outputs", outputs))
    if "crossentropy" not in normalize_loss_name(loss):
        return VALUES
    return LOGITS if loss_options(loss).get("from_logits") else PROBABILITIES


def loss_options(loss: Any) -> dict[str, Any]:
    """Return a Loss's configuration, or a functools.partial's keyword arguments; {} for others."""
    if isinstance(loss, partial):
        return loss.keywords
    return loss.get_config() if isinstance(loss, keras.losses.Loss) else {}


def normalize_loss_name(loss: Any) -> str:
    """Return the loss's name in lower case, without underscores.

    For an alias, such as "bce", and for a class derived from one of Keras' losses, return the name
    of Keras' loss.
    """
    if isinstance(loss, str):
        with contextlib.suppress(ValueError):  # an unknown name is refused elsewhere
            loss = keras.losses.get(loss)
    base = _get_keras_class(loss)
    name = loss if isinstance(loss, str) else base.__name__ if base else loss_name(loss)
    return name.lower().replace("_", "")


def _get_keras_class(loss: Any) -> type | None:
    """Return the class among Keras' losses that the loss is an instance of, or None."""
    general = (keras.losses.Loss, *keras.losses.Loss.__mro__, LossFunctionWrapper)
    kinds = type(loss).__mro__ if isinstance(loss, keras.losses.Loss) else ()
    return next((k for k in kinds if not is_user_defined(k) and k not in general), None)


def takes_class_indices(loss: Any) -> bool:
    """Return whether the loss takes class indices as labels."""
    name = normalize_loss_name(loss)
    return "sparse" in name or "categoricalgeneralized" in name


def list_losses(loss: Any) -> list[Any]:
    """Return all losses as a list, whether given as one loss, a list or a dict."""
    if isinstance(loss, dict):
        return list(loss.values())
    return list(loss) if isinstance(loss, list | tuple) else [loss]


def describe_loss(loss: Any) -> Any:
    """Return ``loss`` with each of its losses, which must be Keras' own, serialized for JSON."""
    if isinstance(loss, dict):
        return {name: describe_loss(each) for name, each in loss.items()}
    if isinstance(loss, list | tuple):
        return [describe_loss(each) for each in loss]
    # Keras serializes a loss function as its name.
    return keras.saving.serialize_keras_object(getattr(loss, "__name__", loss))


def get_variable_name(variable: Any) -> str:
    """Return a name of a variable that is equal in all processes.

    This is the end of its path, "layer/variable". All states of random generators have one name,
    ``SEED_STATE``.
    """
    return SEED_STATE if is_seed(variable) else "/".join(variable.path.split("/")[-2:])


def list_layers(model: Any) -> list[Any]:
    """Return the model and all layers inside it."""
    return list(model._flatten_layers())


def is_seed(variable: Any) -> bool:
    """Return whether the variable is the state of a random generator."""
    return bool(variable.name == SEED_STATE)


def find_buffer_variables(model: Any) -> list[int]:
    """Return the indices, among non-trainable variables, of those that layers update."""
    frozen = set(find_frozen_variables(model))
    return [
        i
        for i, variable in enumerate(model.non_trainable_variables)
        if not is_seed(variable) and i not in frozen
    ]


def find_frozen_variables(model: Any) -> list[int]:
    """Return the indices, among non-trainable variables, of those that belong to frozen layers."""
    frozen_ids = {
        id(variable)
        for layer in list_layers(model)
        if not layer.trainable
        for variable in layer.variables
    }
    return [
        i
        for i, variable in enumerate(model.non_trainable_variables)
        if id(variable) in frozen_ids and not is_seed(variable)
    ]


def find_adapted_layers(model: Any) -> list[Any]:
    """Return the Normalization layers, which use the results of ``adapt`` as constants."""
    return [each for each in list_layers(model) if isinstance(each, keras.layers.Normalization)]


def is_user_defined(value: Any) -> bool:
    """Return whether an object, class or function is defined outside Keras; False for a name."""
    if isinstance(value, str):
        return False
    module = getattr(value, "__module__", None) or type(value).__module__
    return str(module).partition(".")[0] != "keras"


def find_custom_classes(objects: Iterable[Any]) -> dict[str, type]:
    """Return the classes of these objects that are not Keras' own, by their registered name."""
    classes = {
        type(value) for value in objects if value is not None and is_user_defined(type(value))
    }
    return {keras.saving.get_registered_name(each): each for each in classes}


def deserialize(configuration: Any, classes: dict[str, Any]) -> Any:
    """Make an object from its configuration and custom classes; raise UsageError if Keras fails."""
    try:
        return keras.saving.deserialize_keras_object(configuration, classes)
    except (TypeError, ValueError, ImportError) as error:
        named = configuration if isinstance(configuration, dict) else {}
        kind = named.get("class_name", "loss")
        raise UsageError(
            f"a {kind} cannot be sent to executors, as Keras cannot create it again from"
            " its configuration: give its layers get_config (and build), or register what they use"
            f" with keras.saving.register_keras_serializable; {first_line(error)}"
        ) from error


def require_equal_copy(model: Any, copied: Any) -> None:
    """Raise UsageError if ``copied``, made from the model's configuration, differs in variables.

    Names, shapes and the options ``VARIABLE_OPTIONS`` of the variables are compared.
    """
    expected, actual = (
        [
            (get_variable_name(v), tuple(v.shape))
            for v in each_model.trainable_variables + each_model.variables
        ]
        for each_model in (model, copied)
    )
    for own, other in zip(model.variables, copied.variables, strict=False):
        if (get_variable_name(own), tuple(own.shape)) != (
            get_variable_name(other),
            tuple(other.shape),
        ):
            break  # the comparison of all names below reports it
        _require_same_options(model, own, other)
    if expected != actual:
        missing = [name for name, _ in expected if name not in dict(actual)] or ["others"]
        raise UsageError(
            f"{model.name} cannot be sent to executors: created again from its configuration, it"
            f" lacks {', '.join(missing[:3])}; implement build() so that it makes all variables,"
            " or use keras.Sequential or keras.Model(inputs, outputs)"
        )


VARIABLE_OPTIONS = ("trainable", "regularizer", "constraint")


def _require_same_options(model: Any, own: Any, other: Any) -> None:
    """Raise UsageError if an option of the variable ``own`` differs in its copy ``other``."""
    for option in VARIABLE_OPTIONS:
        expected, actual = (
            keras.saving.serialize_keras_object(getattr(v, option, None)) for v in (own, other)
        )
        if expected != actual:
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


SAFE_VALUE_NAMES = ("__tensor__", "__numpy__", "__keras_tensor__", "__tuple__", "__slice__")
SAFE_BASES = (
    *("Layer", "Loss", "Optimizer", "Initializer", "Regularizer", "DTypePolicy"),
    *("Constraint", "LearningRateSchedule", "DTypePolicyMap", "Operation"),
)
UNSAFE_CLASSES = ("Lambda", "TorchModuleWrapper", "TFSMLayer", "JaxLayer", "FlaxLayer")


def _is_safe_class(module: Any, name: Any, registered: Any) -> bool:
    """Return whether it is safe to make an instance of a class that a saved description names.

    This is so for plain values, and for Keras' own public classes whose configuration contains no
    code. Functions, such as losses and activations, occur in a description only as plain names.
    ``module``, ``name`` and ``registered`` are Keras' serialized reference to the class.
    """
    if module is None:
        return name in SAFE_VALUE_NAMES
    if (
        registered not in (None, name)
        or str(module).partition(".")[0] != "keras"
        or name in UNSAFE_CLASSES
    ):
        return False
    with contextlib.suppress(ImportError, AttributeError, TypeError, ValueError):
        kind = getattr(importlib.import_module(str(module)), str(name))
        bases = {base.__name__ for base in kind.__mro__ if not is_user_defined(base)}
        return (
            isinstance(kind, type) and not is_user_defined(kind) and bool(bases & set(SAFE_BASES))
        )
    return False


def require_safe_keras() -> None:
    """Raise UsageError if this version of Keras might run code that a description names."""
    version = tuple(int(part) for part in re.findall(r"\d+", keras.__version__)[:3])
    if version < SAFE_KERAS_VERSION:
        raise UsageError(
            f"Keras {keras.__version__} may run code that a saved description names: install"
            f" keras>={'.'.join(map(str, SAFE_KERAS_VERSION))}, or create the model yourself and"
            " pass it: SparkNetwork.load(path, spark, model=KerasModel(...))"
        )


def refuse_foreign_code(configuration: Any) -> None:
    """Raise UsageError if a saved description, at any depth, names code that is not Keras' own."""
    if isinstance(configuration, dict):
        module, name = configuration.get("module"), configuration.get("class_name")
        if name is not None and not _is_safe_class(
            module, name, configuration.get("registered_name")
        ):
            raise UsageError(
                f"the description names {module}.{name}: only Keras' own layers, models, losses,"
                " optimizers and the like are made from a file, no functions and no Lambda; create"
                " the model yourself, and pass it to load"
            )
        configuration = list(configuration.values())
    if isinstance(configuration, list):
        for part in configuration:
            refuse_foreign_code(part)


class PositiveTracer:
    """A number traced by JAX that claims to be above 0, as a replacement for a momentum.

    Keras compares momentum with 0 in Python, which JAX does not allow for traced numbers.
    """

    def __init__(self, value: Any) -> None:
        self._value = value
        self.dtype, self.shape = value.dtype, value.shape

    def __jax_array__(self) -> Any:
        """Return the traced number, for JAX functions."""
        return self._value

    def __gt__(self, other: float) -> bool:
        """Return True; Keras only compares with 0."""
        return True

    def __ne__(self, other: object) -> bool:
        """Return True; Keras only compares with 0."""
        return True

    def __rsub__(self, other: Any) -> Any:
        """Return ``other`` minus the traced number."""
        return other - self._value

    def __mul__(self, other: Any) -> Any:
        """Return the product with the traced number."""
        return self._value * other

    __rmul__ = __mul__
    __hash__ = None  # type: ignore[assignment]


@contextlib.contextmanager
def scaled_optimizer(optimizer: Any, fit_position: tuple[Any, Any] | None) -> Iterator[None]:
    """Adapt the optimizer, in place, to the fit's position within the context.

    ``fit_position`` is (number of workers, minibatches of the whole fit so far), or None to change
    nothing. Momenta are scaled to the number of workers, or not if that is None, as while only one
    worker has trained. A schedule is evaluated at the number of minibatches. Both numbers are
    traced values, so the step is not recompiled when they change.
    """
    if fit_position is None:
        yield
        return
    workers, position = fit_position
    originals = {name: getattr(optimizer, name) for name in list_momentum_attributes(optimizer)}
    scaled: dict[str, Any] = {}
    if workers is not None:
        scaled = {
            name: PositiveTracer(scale_momentum(value, workers))
            for name, value in originals.items()
        }
    schedule = get_schedule(optimizer)
    if schedule is not None:
        originals[RATE_ATTRIBUTE], scaled[RATE_ATTRIBUTE] = schedule, lambda: schedule(position)
    try:
        for name, value in scaled.items():
            setattr(optimizer, name, value)
        yield
    finally:
        for name, value in originals.items():
            setattr(optimizer, name, value)


@contextlib.contextmanager
def scaled_statistics(model: Any, fit_position: tuple[Any, Any] | None) -> Iterator[None]:
    """Scale the momentum of BatchNormalization layers to the number of workers within the context.

    ``fit_position`` is as in ``scaled_optimizer``. Nothing is scaled if it, or its number of
    workers, is None.
    """
    workers = None if fit_position is None else fit_position[0]
    originals = (
        [] if workers is None else [(layer, layer.momentum) for layer in find_batch_norms(model)]
    )
    try:
        for layer, momentum in originals:
            layer.momentum = PositiveTracer(scale_momentum(momentum, workers))
        yield
    finally:
        for layer, momentum in originals:
            layer.momentum = momentum


def find_batch_norms(model: Any) -> list[Any]:
    """Return the BatchNormalization layers whose momentum is above 0."""
    kind = keras.layers.BatchNormalization
    return [each for each in list_layers(model) if isinstance(each, kind) and each.momentum]


def list_momentum_attributes(optimizer: Any) -> list[str]:
    """Return the names of the optimizer's momentum attributes, without those that are 0."""
    return [name for name in KERAS_MOMENTA if getattr(optimizer, name, None)]


def describe_scaling(optimizer: Any, model: Any, workers: int) -> dict[str, str]:
    """Return what this many workers change in the optimizer and in layers: name -> text.

    The key "statistics" is for BatchNormalization layers, "scheduler" for a learning-rate schedule.
    """
    changes: dict[str, str] = {
        name: describe_change(getattr(optimizer, name), workers)
        for name in list_momentum_attributes(optimizer)
    }
    momenta = sorted({layer.momentum for layer in find_batch_norms(model)})
    if momenta:
        changes["statistics"] = join_changes(describe_change(each, workers) for each in momenta)
    return changes if get_schedule(optimizer) is None else changes | {"scheduler": BY_FIT}
