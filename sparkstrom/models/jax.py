"""JaxModel: pure functions and an optax optimizer as a model whose parameters are one flat vector.

The parameters are a pytree, flattened into the vector in the order of ``ravel_pytree``. A step is
one jitted function from a flat vector to the next vector, which is then copied back into the memory
given to ``bind``, because JAX arrays cannot be changed in place.

To scale momentum to the number of workers, the optax transformation is copied. optax keeps
hyperparameters only in closures, so its functions are copied with changed closure variables. optax
evaluates a schedule at a count in the optimizer's state. Before each step, this count is set to the
fit's position, the number of minibatches that all workers have trained.
"""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable, Mapping
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import KEY, whole
from sparkstrom.models.activations_and_losses import loss_name
from sparkstrom.models.base import Batch, Flat, Layout, Share, State
from sparkstrom.models.jax_common import (
    FlatJaxModel,
    ShapeCheck,
    jax,
    jnp,
    leaves_from_state,
    limit_to_task_cpus,
    mean_loss,
    named_leaves,
    state_from_leaves,
    unpack_buffers,
)
from sparkstrom.models.momentum_scaling import (
    BY_FIT,
    OPTAX_MOMENTA,
    OPTAX_SHARED_MOMENTUM,
    UNINSPECTABLE,
    describe_change,
    join_changes_by_name,
    scale_momentum,
)
from sparkstrom.models.output_interpretation import LOGITS, OUTPUTS_OPTION, VALUES

try:
    import optax
    from jax.flatten_util import ravel_pytree
except ImportError as missing:
    raise UsageError(
        f"{missing}: JaxModel needs it here and on every executor; do pip install 'sparkstrom[jax]'"
    ) from missing

__all__ = ["JaxModel"]

# Closure variables of optax.inject_hyperparams: the function that creates the transformation in
# each step, and the user's numeric hyperparameters.
INNER_FACTORY, NUMERIC_HYPERPARAMETERS = "inner_factory", "numeric_hps"
EMPTY_CELL = CellType()  # equals the closure cell of a variable without a value
INJECTED_MOMENTA = (OPTAX_SHARED_MOMENTUM, "momentum")
# Names of optax's losses of logits that are not cross entropies: with one class per row, and with
# a label of 0 or 1 per output.
CLASS_LOSSES = ("multiclass_hinge_loss", "multiclass_perceptron_loss", "multiclass_sparsemax_loss")
LABEL_LOSSES = ("sigmoid_focal_loss",)
SCHEDULE_STATES = ("ScaleByScheduleState", "WrappedScheduleState")
# Fields of optax's states in which adaptive optimizers keep the size of past gradients.
GRADIENT_SIZES = {
    "nu",  # Adam, RMSProp
    "sum_of_squares",  # Adagrad
    "e_g",  # Adadelta
    "v_row",  # Adafactor
    "n",  # Adan
    "exp_avg_sq",  # Prodigy
    "grad_sum_sq",  # MADGRAD
    "sum_sq_norm_grads",  # DoG
    "weighted_sq_norm_grads",  # DoWG
    "grad_sum_of_squares",  # DoG of each layer
}


class MomentumScaler:
    """Copies optax transformations, with their momenta scaled to a number of workers.

    In the copies, the schedules inside ``optax.MultiSteps`` also follow the fit's number of
    minibatches. For all other schedules, ``advance_schedules`` does this.

    Attributes:
        momenta_found: (name, original value) of each momentum.
        uninspectable: class names of callables whose closures cannot be inspected.
    """

    def __init__(self, workers: Any, minibatches: Any = None) -> None:
        self._workers = workers  # None: scale no momentum
        self._minibatches = minibatches  # None: leave schedules as they are
        self.momenta_found: list[tuple[str, Any]] = []
        self.uninspectable: set[str] = set()
        self._scaled: dict[int, tuple[Any, Any]] = {}  # id -> (original, copy)

    def scale(self, value: Any) -> Any:
        """Return a copy of ``value`` with all momenta scaled; always the same for one object."""
        if id(value) not in self._scaled:
            self._scaled[id(value)] = value, value
            self._scaled[id(value)] = value, self._scale_in_value(value)
        return self._scaled[id(value)][1]

    def _scale_in_value(self, value: Any) -> Any:
        """Return a scaled copy, as the type requires; record callables that cannot be inspected."""
        if isinstance(value, FunctionType):
            return self._scale_in_function(value) if value.__closure__ else value
        if isinstance(value, MethodType):
            return getattr(self.scale(value.__self__), value.__name__)
        if isinstance(value, functools.partial):
            return functools.partial(self.scale(value.func), *value.args, **value.keywords)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self.scale, value))
        if isinstance(value, tuple | list):
            return type(value)(map(self.scale, value))
        if isinstance(value, dict):
            return type(value)((key, self.scale(v)) for key, v in value.items())
        if isinstance(value, optax.MultiSteps):
            copied = copy.copy(value)
            copied.__dict__.update({name: self.scale(v) for name, v in vars(value).items()})
            if self._minibatches is not None:
                copied.update = functools.partial(self._update_multi_steps, copied, copied.update)
            return copied
        if callable(value) and not isinstance(value, type):
            self.uninspectable.add(type(value).__name__)
        return value

    def _update_multi_steps(
        self, steps: optax.MultiSteps, update: Any, updates: Any, state: Any, *args: Any, **kw: Any
    ) -> Any:
        """Call ``update`` of a MultiSteps, with its inner schedules advanced to the fit's position.

        These schedules count gradient steps, each of which takes several minibatches. The position
        is divided by the number of minibatches of the first or of the current gradient step,
        whichever is larger, so that a schedule is never ahead of the fit.
        """
        every = steps._every_k_schedule
        size = jnp.maximum(every(jnp.zeros_like(state.gradient_step)), every(state.gradient_step))
        inner = advance_schedules(state.inner_opt_state, self._minibatches // size)
        return update(updates, state._replace(inner_opt_state=inner), *args, **kw)

    def _scale_in_function(self, function: FunctionType) -> FunctionType:
        """Return a copy of the function with new closure variables, in which momenta are scaled.

        The function and the objects in its closure stay unchanged.
        """
        assert function.__closure__ is not None
        cells = tuple(CellType() for _ in function.__closure__)
        copied = FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
        )
        copied.__kwdefaults__ = function.__kwdefaults__
        copied.__qualname__, copied.__module__ = function.__qualname__, function.__module__
        self._scaled[id(function)] = function, copied  # a function may refer to itself
        for name, old, new in zip(
            function.__code__.co_freevars, function.__closure__, cells, strict=True
        ):
            if old != EMPTY_CELL:
                new.cell_contents = self._scale_in_variable(function, name, old.cell_contents)
        return copied

    def _scale_in_variable(self, function: FunctionType, name: str, value: Any) -> Any:
        """Return the new value of a closure variable, scaled if it is one of optax's momenta."""
        maker = function.__qualname__.partition(".")[0]
        if not function.__module__.startswith("optax"):
            return self.scale(value)
        if maker == "inject_hyperparams" and name == INNER_FACTORY:
            return lambda *given, **named: MomentumScaler(self._workers, self._minibatches).scale(
                value(*given, **named)
            )
        if maker == "inject_hyperparams" and name == NUMERIC_HYPERPARAMETERS:
            # Reported here, but scaled in each step, when the inner factory makes the values.
            self.momenta_found += [(key, value[key]) for key in INJECTED_MOMENTA if value.get(key)]
        is_momentum = name in (OPTAX_SHARED_MOMENTUM, OPTAX_MOMENTA.get(maker))
        is_momentum = is_momentum and self._workers is not None
        if not is_momentum or value is None or (isinstance(value, float | int) and not value):
            return self.scale(value)
        self.momenta_found.append((name, value))
        return scale_momentum(value, self._workers)


def adapt_optimizer(optimizer: Any, state: Any, workers: Any, minibatches: Any) -> tuple[Any, Any]:
    """Return the optax optimizer and its state, adapted for one step.

    Momenta are scaled to this many workers, unless ``workers`` is None. Schedules are evaluated at
    ``minibatches``, those of the whole fit so far, or at their own count if it is higher.
    """
    leaves = jax.tree_util.tree_leaves(state, is_leaf=_is_multi_steps_state)
    if workers is not None or any(map(_is_multi_steps_state, leaves)):
        optimizer = MomentumScaler(workers, minibatches).scale(optimizer)
    return optimizer, advance_schedules(state, minibatches)


def _is_multi_steps_state(part: Any) -> bool:
    """Return whether this part of a state is that of an ``optax.MultiSteps``."""
    return isinstance(part, optax.MultiStepsState)


def advance_schedules(state: Any, minibatches: Any) -> Any:
    """Return the optimizer state with each schedule's count raised to at least ``minibatches``.

    Schedules inside ``optax.MultiSteps`` do not change.
    """

    def advance(part: Any) -> Any:
        """Return a schedule's state with the new count; return other values unchanged."""
        if not _is_schedule_state(part):
            return part
        return part._replace(count=jnp.maximum(part.count, minibatches))

    return jax.tree_util.tree_map(
        advance, state, is_leaf=lambda part: _is_schedule_state(part) or _is_multi_steps_state(part)
    )


def _is_schedule_state(part: Any) -> bool:
    """Return whether this part of a state is that of a schedule."""
    return type(part).__name__ in SCHEDULE_STATES


def describe_scaling(optimizer: Any, state: Any, workers: int) -> dict[str, str]:
    """Return what changes in the optimizer with this many workers: hyperparameter -> text.

    ``state`` is the optimizer's state; its leaves may be shapes instead of arrays. The key
    ``UNINSPECTABLE`` lists the classes whose momenta, if they have any, cannot be found.
    """
    scaler = MomentumScaler(workers)
    scaler.scale(optimizer)
    parts = jax.tree_util.tree_leaves(state, is_leaf=_is_schedule_state)
    changes: dict[str, str] = {"scheduler": BY_FIT} if any(map(_is_schedule_state, parts)) else {}
    changes |= join_changes_by_name(
        (name, describe_change(value, workers)) for name, value in scaler.momenta_found
    )
    if scaler.uninspectable:
        changes[UNINSPECTABLE] = ", ".join(sorted(scaler.uninspectable))
    return changes


def explain_invalid_optimizer(value: Any) -> str:
    """Return an error message, if possible with the code to write, for an invalid optimizer."""
    if isinstance(value, functools.partial):
        options = [*map(repr, value.args), *(f"{k}={v!r}" for k, v in value.keywords.items())]
        code = f"optax.{value.func.__name__}({', '.join(options)})"
        return f"pass optimizer={code} instead of a functools.partial that makes one"
    if callable(value):
        code = f"optax.{getattr(value, '__name__', type(value).__name__)}(1e-3)"
        return f"pass optimizer={code} instead of the function that makes one: call it"
    return f"optimizer is a {type(value).__name__}: pass one of optax, such as optax.adam(1e-3)"


OPTIONS = ("init", "apply", "loss", "optimizer", "apply_train", "outputs", "seed")
SEED = whole(-(2**63))[KEY]  # range of jax.random.key


class JaxModel(FlatJaxModel):
    """A model defined by pure functions.

    If ``init`` returns a dict with other collections besides ``params``, as Flax does for
    BatchNorm, these are the model's buffers. ``apply`` then gets them together with the parameters,
    and ``apply_train`` must return (outputs, changed collections), like Flax's
    ``module.apply(..., mutable=["batch_stats"])``.

    JAX compiles the step for each new number of rows, so a worker compiles it twice: for a full
    minibatch and for the last one.

    Args:
        init: ``init(key)`` returns the initial parameters, a pytree of float32 arrays.
        apply: ``apply(params, features)`` returns the outputs. Features and labels are one array,
            or a tuple or dict of arrays.
        loss: ``loss(outputs, labels)`` returns one loss per row [rows, ...], like optax's losses,
            or the mean of these losses; if rows have weights, it must be one loss per row.
        optimizer: an optax ``GradientTransformation``.
        apply_train: ``apply_train(params, features, key)`` replaces ``apply`` in training and gets
            a new random key in each step, for dropout.
        outputs: what ``apply`` returns, for metrics: logits, probabilities or values; by default
            logits if the loss's name contains cross_entropy, and for optax's other losses of
            classes, else values.
        seed: equal seeds give equal initial parameters and random keys.

    Raises:
        UsageError: an option is invalid, or parameters are not float32.
    """

    def __init__(
        self,
        init: Callable[[Any], Any],
        apply: Callable[[Any, Any], Any],
        loss: Callable[[Any, Any], Any],
        optimizer: optax.GradientTransformation,
        *,
        apply_train: Callable[[Any, Any, Any], Any] | None = None,
        outputs: str | None = None,
        seed: int = 0,
    ) -> None:
        require_callables(init=init, apply=apply, loss=loss)
        if apply_train is not None:
            require_callables(apply_train=apply_train)
        self._outputs, seed = resolve_outputs(outputs, loss), SEED.read("seed", seed)
        if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
            raise UsageError(explain_invalid_optimizer(optimizer))
        self._init, self._apply, self._loss = init, apply, loss
        self._optimizer, self._apply_train, self._seed = optimizer, apply_train, seed
        shapes = jax.eval_shape(lambda: init(jax.random.key(seed)))
        shapes, buffers = split_collections(shapes)
        require_float32_parameters(shapes)
        require_apply_train(buffers, apply_train)
        self._tree = jax.tree_util.tree_structure(shapes)
        self._layout = Layout.from_shapes((name, leaf.shape) for name, leaf in named_leaves(shapes))
        self._has_buffers = bool(buffers)
        self._non_trainable: Any = None  # buffers, created when first needed
        self._state: Any = None  # the optimizer's state, created by the first step
        self._key_seed = [0, 0]  # this worker's seed and its step number, for random keys
        self._jit_step = jax.jit(self._train_step, donate_argnums=1)
        name = loss_name(loss)
        self._takes_class_indices = "integer_labels" in name or name in CLASS_LOSSES
        self._shape_check = ShapeCheck(
            self._trace_step,
            "jax",
            "optax",
            takes_classes=self._takes_class_indices,
            every_label_counts=loss is optax.softmax_cross_entropy_with_integer_labels,
        )
        self._jit_predict = jax.jit(self._compute_outputs)
        self._jit_loss = jax.jit(self._compute_loss)
        self._jit_init = jax.jit(lambda flat: self._optimizer.init(self._unravel_params(flat)))

    def __repr__(self) -> str:
        rates = "".join(
            f", learning_rate={rate:.6g}" for rate in find_learning_rates(self._optimizer)
        )
        return f"JaxModel({self.n_params:,} parameters{rates}, seed={self._seed})"

    def initial(self) -> Flat:
        """Return new initial parameters f32[n_params], made by ``init``."""
        tree, _ = split_collections(self._init(jax.random.key(self._seed)))
        return np.array(ravel_pytree(tree)[0], np.float32)

    def place(self, share: Share) -> None:
        """Limit XLA's threads, if XLA is not in use yet; seed this worker's random keys."""
        limit_to_task_cpus(share.threads)
        self._key_seed = [share.seed % 2**32, 0]

    def step(self, batch: Batch) -> float:
        """Train on one minibatch: change the bound parameters and buffers; return the mean loss."""
        if not batch.total_weight:
            return 0.0
        params, key_seed = self._require_bound(), np.array(self._key_seed, np.uint32)
        changed, self._state, self._non_trainable, loss = self._jit_step(
            params,
            self._optimizer_state(),
            self._get_non_trainable(),
            *batch,
            key_seed,
            self._fit_position,
        )
        np.copyto(params, changed)
        self._key_seed[1] += 1
        return float(loss)

    def horizons(self, workers: int) -> dict[str, str]:
        """Return what changes in the optimizer with this many workers: hyperparameter -> text."""
        state = jax.eval_shape(self._jit_init, np.zeros(self.n_params, np.float32))
        return describe_scaling(self._optimizer, state, workers)

    def has_adaptive_optimizer(self) -> bool:
        """Return whether steps are divided by the size of past gradients, as in Adam."""
        state = jax.eval_shape(self._jit_init, np.zeros(self.n_params, np.float32))
        return bool(find_state_fields(state) & GRADIENT_SIZES)

    @property
    def per_label(self) -> bool:
        """Whether the loss treats each output as a separate label that is true or false."""
        name = loss_name(self._loss)
        return "sigmoid_binary" in name or name in LABEL_LOSSES

    def updater_state(self) -> State:
        """Return copies of the optimizer's arrays and scalars, named by path in optax's state."""
        return state_from_leaves(named_leaves(self._optimizer_state()))

    def load_updater_state(self, state: State) -> None:
        """Restore an optimizer state returned by ``updater_state`` of an equal model."""
        like = jax.eval_shape(self._jit_init, np.zeros(self.n_params, np.float32))
        leaves = leaves_from_state(state, named_leaves(like))
        self._state = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(like), leaves)

    def describe(self) -> dict[str, Any]:
        """Return names and shapes of the parameters; the functions are not included."""
        arrays = zip(self._layout.names, self._layout.shapes, strict=True)
        return {"kind": "jax", "parameters": [[name, list(shape)] for name, shape in arrays]}

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> JaxModel:
        """Raise UsageError, because a description does not contain the model's functions."""
        raise UsageError(
            "a JaxModel is made of functions, which are not in a saved file: create the model as"
            " before, and load it with SparkNetwork.load(path, spark, model=JaxModel(...))"
        )

    def exported(self) -> tuple[str, bytes]:
        """Return (".arrays.npz", content): a NumPy file of parameters and buffers by path."""
        file = io.BytesIO()
        arrays = {
            **dict(self._layout.views(self._require_bound())),
            **state_from_leaves(self._named_buffers()),
        }
        np.savez(file, **arrays)  # type: ignore[arg-type]
        return ".arrays.npz", file.getvalue()

    def parameters(self, flat: Any) -> Any:
        """Return the parameters ``flat``, f32[n_params], as a pytree like the result of ``init``.

        If ``flat`` is a NumPy array, the parameters are views of it. Buffers are included with
        their current values.
        """
        return self._merge_buffers(self._unravel_params(flat), self._get_non_trainable())

    def load_buffers_bytes(self, buffers: bytes) -> None:
        """Restore buffers from ``buffers_bytes``; raise UsageError if the size differs."""
        values = [jnp.array(value) for value in unpack_buffers(self._buffer_values(), buffers)]
        tree = jax.tree_util.tree_structure(self._get_non_trainable())
        self._non_trainable = jax.tree_util.tree_unflatten(tree, values)

    def _buffer_values(self) -> list[Any]:
        """Return the current buffers as NumPy arrays."""
        return [np.asarray(leaf) for _, leaf in self._named_buffers()]

    def _named_buffers(self) -> list[tuple[str, Any]]:
        """Return (path, value) of each buffer."""
        return named_leaves(self._get_non_trainable())

    def _get_non_trainable(self) -> Any:
        """Return the current buffers; the first call creates them."""
        if self._non_trainable is None:
            self._non_trainable = self._make_buffers()
        return self._non_trainable

    def _make_buffers(self) -> Any:
        """Return the collections besides ``params`` that ``init`` creates; {} if there are none."""
        return (
            split_collections(self._init(jax.random.key(self._seed)))[1]
            if self._has_buffers
            else {}
        )

    def _train_step(
        self,
        flat: Any,
        state: Any,
        buffers: Any,
        features: Any,
        labels: Any,
        weights: Any,
        key_seed: Any,
        fit_position: Any = None,
    ) -> tuple[Any, Any, Any, Any]:
        """Compute a step; return the new (flat vector, optimizer state, buffers, mean loss).

        This is a pure function, because JAX compiles it. ``weights`` are those of the rows, or
        None. Random keys are derived from ``key_seed``, (the worker's seed, its step number).
        ``fit_position`` is (number of workers, minibatches of the fit so far), as set by
        ``keep_pace``, or None to leave the optimizer as it is.
        """

        def objective(params: Any) -> Any:
            """Return (loss, changed buffers)."""
            outputs, changed = self._forward(params, buffers, features, key_seed)
            return mean_loss(self._compute_losses(outputs, labels), features, weights), changed

        params = self._unravel_params(flat)
        (loss, buffers), gradients = jax.value_and_grad(objective, has_aux=True)(params)
        optimizer = self._optimizer
        if fit_position is not None:
            optimizer, state = adapt_optimizer(optimizer, state, *fit_position)
        optimizer = optax.with_extra_args_support(optimizer)
        updates, state = optimizer.update(gradients, state, params, value=loss)
        params = optax.apply_updates(params, updates)
        return ravel_pytree(params)[0], state, buffers, loss

    def _trace_step(self, features: Any, labels: Any) -> tuple[Any, Any]:
        """Train and predict with all parameters 0, to trace shapes; return (outputs, losses)."""
        flat, buffers = jnp.zeros(self.n_params, jnp.float32), self._make_buffers()
        key_seed = np.zeros(2, np.uint32)
        self._train_step(flat, self._jit_init(flat), buffers, features, labels, None, key_seed)
        outputs = self._compute_outputs(flat, buffers, features)
        return outputs, self._compute_losses(outputs, labels)

    def _compute_losses(self, outputs: Any, labels: Any) -> Any:
        """Return the user's loss; convert float labels to integers if it takes class indices."""
        is_array = hasattr(labels, "dtype")
        if self._takes_class_indices and is_array and jnp.issubdtype(labels.dtype, jnp.floating):
            labels = labels.astype(jnp.int32)
        return self._loss(outputs, labels)

    def _compute_outputs(self, flat: Any, buffers: Any, features: Any) -> Any:
        """Return the outputs of ``apply``. This is a pure function of its arguments."""
        return self._apply(self._merge_buffers(self._unravel_params(flat), buffers), features)

    def _forward(self, params: Any, buffers: Any, features: Any, key_seed: Any) -> tuple[Any, Any]:
        """Return (outputs in training mode, new buffers); see ``_train_step`` for ``key_seed``."""
        variables = self._merge_buffers(params, buffers)
        if self._apply_train is None:
            return self._apply(variables, features), buffers
        key = jax.random.key(self._seed)
        for i in range(2):
            key = jax.random.fold_in(key, key_seed[i])
        result = self._apply_train(variables, features, key)
        return split_train_result(result, buffers) if buffers else (result, buffers)

    def _unravel_params(self, flat: Any) -> Any:
        """Return the pytree of parameters; its leaves are parts of the flat vector."""
        return jax.tree_util.tree_unflatten(
            self._tree, [view for _, view in self._layout.views(flat)]
        )

    def _merge_buffers(self, params: Any, buffers: Any) -> Any:
        """Return parameters and buffers as one pytree, the first argument of ``apply``."""
        return {**params, **buffers} if buffers else params

    def _optimizer_state(self) -> Any:
        """Return the optimizer's state; the first call creates it."""
        if self._state is None:
            self._state = self._jit_init(self._require_bound())
        return self._state

    def __getstate__(self) -> dict[str, Any]:
        """Return functions and options only: no parameters or optimizer state."""
        return {name: getattr(self, f"_{name}") for name in OPTIONS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Recreate the model; in a Spark task, limit XLA's threads before it computes."""
        limit_to_task_cpus()
        self.__init__(**state)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> JaxModel:
        """Return a separate model with the same functions and buffers."""
        twin = type(self)(**self.__getstate__())
        twin._non_trainable = self._non_trainable
        return twin


def require_callables(**functions: Any) -> None:
    """Raise UsageError if one of these options, given by name, is not callable."""
    for name, function in functions.items():
        if not callable(function):
            raise UsageError(f"{name} is a {type(function).__name__}: pass a function")


def resolve_outputs(outputs: str | None, loss: Any) -> str:
    """Return the valid output kind ``outputs``, or for None the one that the loss implies."""
    if outputs is None:
        name = loss_name(loss)
        is_of_classes = "cross_entropy" in name or name in (*CLASS_LOSSES, *LABEL_LOSSES)
        return LOGITS if is_of_classes else VALUES
    return str(OUTPUTS_OPTION.read("outputs", outputs))


def split_collections(tree: Any) -> tuple[Any, dict[str, Any]]:
    """Split ``init``'s result into (parameters, dict of the collections besides ``params``)."""
    if not (isinstance(tree, Mapping) and "params" in tree):
        return tree, {}
    return {"params": tree["params"]}, {name: tree[name] for name in tree if name != "params"}


def require_apply_train(buffers: dict[str, Any], apply_train: Any) -> None:
    """Raise UsageError if there are buffers but no ``apply_train`` to update them."""
    if buffers and apply_train is None:
        names = ", ".join(sorted(buffers))
        raise UsageError(
            f"init makes {names} besides params, and these have no gradient: pass"
            " apply_train(variables, features, key) -> (outputs, changed collections), as Flax's"
            f" module.apply(..., mutable={sorted(buffers)}) returns them; to have {names} trained,"
            " put them into params"
        )


def split_train_result(result: Any, buffers: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Split ``apply_train``'s result into (outputs, new buffers).

    Raise UsageError if the result is not such a pair, or if the buffers' names, shapes or dtypes
    have changed.
    """
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
        raise UsageError(
            f"apply_train returned a {type(result).__name__}: with {', '.join(buffers)} besides"
            " params it must return (outputs, changed collections), as Flax does with mutable=[...]"
        )
    outputs, changed = result
    after = {name: changed.get(name, buffers[name]) for name in buffers}
    kinds = [
        [(name, jnp.shape(leaf), str(jnp.result_type(leaf))) for name, leaf in named_leaves(tree)]
        for tree in (buffers, after)
    ]
    if kinds[0] != kinds[1]:
        raise UsageError(
            f"apply_train changed the names, shapes or types of {', '.join(buffers)} from"
            f" {kinds[0]} to {kinds[1]}; return them as init makes them"
        )
    tree = jax.tree_util.tree_structure(buffers)
    return outputs, jax.tree_util.tree_unflatten(tree, jax.tree_util.tree_leaves(after))


def require_float32_parameters(tree: Any) -> None:
    """Raise UsageError unless the tree has leaves and all of them are float32."""
    leaves = named_leaves(tree)
    if not leaves:
        raise UsageError("init makes no arrays: return the pytree of parameters")
    for name, leaf in leaves:
        if leaf.dtype != jnp.float32:
            raise UsageError(
                f"parameter {name} is {leaf.dtype}: parameters are float32; convert it in init, and"
                " compute in other types inside apply"
            )


def find_state_fields(state: Any) -> set[str]:
    """Return the names of all fields of optax's named tuples in an optimizer state."""
    fields: set[str] = set()

    def collect_fields(node: Any) -> bool:
        """Record the fields of a node; return False, so that JAX also visits its children."""
        if type(node).__module__.startswith("optax"):
            fields.update(getattr(node, "_fields", ()))
        return False  # visit what the node contains

    jax.tree_util.tree_leaves(state, is_leaf=collect_fields)
    return fields


def find_learning_rates(part: Any, depth: int = 12) -> list[float]:
    """Return the constant learning rates in an optax transformation, in the order of its parts.

    optax keeps a rate only in the closure of ``scale_by_learning_rate``, as the negative variable
    ``step_size``. ``depth`` limits the recursion.
    """
    if depth == 0:
        return []
    if isinstance(part, tuple):
        return [rate for each in part for rate in find_learning_rates(each, depth - 1)]
    found: list[float] = []
    if isinstance(part, FunctionType):
        cells = zip(part.__code__.co_freevars, part.__closure__ or (), strict=False)
        for name, cell in cells:
            value = None if cell == EMPTY_CELL else cell.cell_contents
            if name == "step_size" and isinstance(value, int | float):
                found.append(-float(value))
            else:
                found += find_learning_rates(value, depth - 1)
    return found
