"""JaxModel: pure functions and an optax optimizer behind the flat-parameter protocol.

Parameters are a pytree, raveled into the one flat vector in ``ravel_pytree``'s order. A step is
one jitted function from the flat vector to the next one; what it returns is copied back into the
bound memory, because JAX arrays cannot be changed in place.
"""

from __future__ import annotations

import io
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import Batch, Columns, Flat, Share, State
from sparkstrom.models.buffers import averaged, packed, unpacked
from sparkstrom.models.flat import Layout, bindable
from sparkstrom.models.losses import loss_name
from sparkstrom.models.optax_pacing import at_position, no_optimizer, paced, told
from sparkstrom.models.outputs import KINDS, LOGITS, VALUES
from sparkstrom.models.xla import (
    Trial,
    first_rows,
    keep_to_task,
    leaves_of,
    mean_loss,
    named_leaves,
    state_of,
)

try:
    import jax
    import jax.numpy as jnp
    import optax
    from jax.flatten_util import ravel_pytree
except ImportError as missing:
    raise UsageError(
        f"{missing}: JaxModel needs it here and on every executor; do pip install 'sparkstrom[jax]'"
    ) from missing

__all__ = ["JaxModel"]

OPTIONS = ("init", "apply", "loss", "optimizer", "apply_train", "outputs", "seed")


class JaxModel:
    """A model of pure functions.

    ``init(key)`` makes the parameters, a pytree of float32 arrays. ``apply(params, features)``
    makes the outputs. ``loss(outputs, labels)`` returns one loss per row [rows, ...], as optax's
    losses do, or their mean; weighted rows need the former. ``optimizer`` is an optax
    GradientTransformation. ``apply_train(params, features, key)``, where given, is applied in
    training instead, with a fresh random key in each step: dropout. ``outputs`` says what ``apply``
    returns, for metrics: logits, probabilities or values; by default logits if the loss is called
    something with cross_entropy, else values. Features and labels come as one array, or a tuple
    or dict of them. Same ``seed``, same initial parameters and keys.

    Where ``init`` makes other collections beside ``params``, as Flax does for BatchNorm, these are
    buffers: ``apply`` gets them with the parameters, and ``apply_train`` returns (outputs, changed
    collections), as Flax's ``module.apply(..., mutable=["batch_stats"])`` does.

    A new number of rows compiles anew, so a worker compiles twice: a full and the last minibatch.
    """

    class_axis = -1  # of outputs with steps or pixels

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
        need_callables(init=init, apply=apply, loss=loss)
        self._outputs = outputs_of(outputs, loss)
        if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
            raise UsageError(no_optimizer(optimizer))
        self._init, self._apply, self._loss = init, apply, loss
        self._optimizer, self._apply_train, self._seed = optimizer, apply_train, seed
        shapes = jax.eval_shape(lambda: init(jax.random.key(seed)))
        shapes, fixed = parted(shapes)
        need_parameters(shapes)
        need_changing(fixed, apply_train)
        self._tree = jax.tree_util.tree_structure(shapes)
        self._layout = Layout.of((name, leaf.shape) for name, leaf in named_leaves(shapes))
        self._has_buffers = bool(fixed)
        self._fixed: Any = None  # the buffers, made when they are needed first
        self._params: Flat | None = None
        self._state: Any = None  # the optimizer's, a pytree; made at the first step
        self._pace: tuple[int | None, int] | None = None  # workers (None: always one), position
        self._draw = [0, 0]  # this worker's seed and step, for random keys
        self._jit_step = jax.jit(self._next, donate_argnums=1)
        self._of_classes = "integer_labels" in loss_name(loss)
        self._trial = Trial(self._tried, "jax", "optax", of_classes=self._of_classes)
        self._jit_predict = jax.jit(self._applied)
        self._jit_loss = jax.jit(self._measure)
        self._jit_init = jax.jit(lambda flat: self._optimizer.init(self._params_of(flat)))

    def __repr__(self) -> str:
        rates = "".join(f", learning_rate={rate:.6g}" for rate in rates_of(self._optimizer))
        return f"JaxModel({self.n_params:,} parameters{rates}, seed={self._seed})"

    # -- the flat-parameter protocol -------------------------------------------------------------

    @property
    def n_params(self) -> int:
        """How many parameters."""
        return self._layout.size

    def initial(self) -> Flat:
        """Fresh parameters f32[n_params] from ``init``."""
        tree, _ = parted(self._init(jax.random.key(self._seed)))
        return np.array(ravel_pytree(tree)[0], np.float32)

    def bind(self, params: Flat) -> None:
        """Read from and write into this memory from now on, f32[n_params]."""
        self._params = bindable(params, self.n_params)

    def place(self, share: Share) -> None:
        """Keep XLA to these threads, if it has not begun; draw this worker's own keys."""
        keep_to_task(share.threads)
        self._draw = [share.seed % 2**32, 0]

    def step(self, batch: Batch) -> float:
        """One minibatch: change the bound parameters and the buffers; return the mean loss."""
        params, draw = self._bound(), np.array(self._draw, np.uint32)
        changed, self._state, self._fixed, loss = self._jit_step(
            params, self._optimizer_state(), self._buffers(), *batch, draw, self._pace
        )
        np.copyto(params, changed)
        self._draw[1] += 1
        return float(loss)

    def keep_pace(self, workers: int, minibatches: int, counted: int) -> None:
        """Momentum counts the minibatches of so many workers; schedules are where the fit is.

        How many there are compiles once anew, when there is more than one; not each time.
        """
        alone = workers == 1 and (self._pace is None or self._pace[0] is None)
        self._pace = None if alone else workers, minibatches

    def horizons(self, workers: int) -> dict[str, str]:
        """What is changed where so many train, for people."""
        state = jax.eval_shape(self._jit_init, np.zeros(self.n_params, np.float32))
        return told(self._optimizer, state, workers)

    def predict(self, features: Columns) -> Any:
        """What ``apply`` puts out under the bound parameters, as NumPy arrays."""
        outputs = self._jit_predict(self._bound(), self._buffers(), features)
        return jax.tree_util.tree_map(np.asarray, outputs)

    @property
    def outputs(self) -> str:
        """What ``predict`` returns: logits, probabilities or values."""
        return self._outputs

    @property
    def per_label(self) -> bool:
        """Whether the loss takes each of several outputs for a label that is true or false."""
        return "sigmoid_binary" in loss_name(self._loss)

    def loss(self, batch: Batch) -> tuple[float, float]:
        """(sum of weight x loss, sum of weights), with ``apply``; nothing changes."""
        mean = float(self._jit_loss(self._bound(), self._buffers(), *batch))
        weight = batch.rows if batch.weights is None else batch.weights.sum(dtype=np.float64)
        return mean * float(weight), float(weight)

    def check(self, features: Columns, labels: Columns) -> None:
        """Raise UsageError naming row and value, or what JAX says about the shapes."""
        self._trial.check(features, labels)

    def updater_state(self) -> State:
        """The optimizer's arrays and scalars, by their path in optax's state; copies."""
        return state_of(named_leaves(self._optimizer_state()))

    def load_updater_state(self, state: State) -> None:
        """Take a state that ``updater_state`` of an equal model returned."""
        like = jax.eval_shape(self._jit_init, np.zeros(self.n_params, np.float32))
        leaves = leaves_of(state, named_leaves(like))
        self._state = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(like), leaves)

    def layer_of(self, index: int) -> str:
        """The array that parameter ``index`` is in, by its path, like ``params/Dense_0/kernel``."""
        return self._layout.name_of(index)

    def describe(self) -> dict[str, Any]:
        """Names and shapes, for readers; functions are not described."""
        arrays = zip(self._layout.names, self._layout.shapes, strict=True)
        return {"kind": "jax", "parameters": [[name, list(shape)] for name, shape in arrays]}

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> JaxModel:
        """Raise UsageError: functions are not in a description."""
        raise UsageError(
            "a JaxModel is made of functions, which are not in a saved file: make the model as"
            " before, and load it with SparkNetwork.load(path, spark, model=JaxModel(...))"
        )

    def exported(self) -> tuple[str, bytes]:
        """``.arrays.npz``: bound parameters and buffers by their paths, for plain NumPy."""
        file = io.BytesIO()
        arrays = {**dict(self._layout.views(self._bound())), **state_of(self._named_buffers())}
        np.savez(file, **arrays)  # type: ignore[arg-type]
        return ".arrays.npz", file.getvalue()

    def parameters(self, flat: Any) -> Any:
        """The pytree that ``init`` makes, with the values of f32[n_params]; views where NumPy's.

        Buffers, where it makes some, are as they are now.
        """
        return self._variables(self._params_of(flat), self._buffers())

    # -- buffers ---------------------------------------------------------------------------------

    def buffers_bytes(self) -> bytes:
        """Collections beside the parameters, as they are now; empty where there are none."""
        return packed(self._buffer_values())

    def load_buffers_bytes(self, buffers: bytes) -> None:
        """Take what ``buffers_bytes`` of an equal model returned."""
        values = [jnp.array(value) for value in unpacked(self._buffer_values(), buffers)]
        tree = jax.tree_util.tree_structure(self._buffers())
        self._fixed = jax.tree_util.tree_unflatten(tree, values)

    def average_buffers(self, reports: list[bytes]) -> bytes:
        """Means in float64, in the given order; whole numbers take the largest."""
        return averaged(self._buffer_values(), reports)

    def weighed_buffers(self, reports: list[bytes], weights: Sequence[float]) -> bytes:
        """The same where each report counts so much."""
        return averaged(self._buffer_values(), reports, weights)

    def _buffer_values(self) -> list[Any]:
        return [np.asarray(leaf) for _, leaf in self._named_buffers()]

    def _named_buffers(self) -> list[tuple[str, Any]]:
        return named_leaves(self._buffers())

    def _buffers(self) -> Any:
        if self._fixed is None:
            self._fixed = self._fresh_buffers()
        return self._fixed

    def _fresh_buffers(self) -> Any:
        return parted(self._init(jax.random.key(self._seed)))[1] if self._has_buffers else {}

    # -- inside ----------------------------------------------------------------------------------

    def _next(
        self,
        flat: Any,
        state: Any,
        fixed: Any,
        features: Any,
        labels: Any,
        weights: Any,
        draw: Any,
        pace: Any = None,
    ) -> tuple[Any, Any, Any, Any]:
        """One step as a pure function: (flat, state, fixed) -> (flat, state, fixed, loss)."""

        def objective(params: Any) -> Any:
            outputs, after = self._forward(params, fixed, features, draw)
            loss = mean_loss(self._losses(outputs, labels), first_rows(features), weights)
            return loss, after

        params = self._params_of(flat)
        (loss, fixed), slopes = jax.value_and_grad(objective, has_aux=True)(params)
        workers, position = (None, None) if pace is None else pace
        optimizer = self._optimizer if workers is None else paced(self._optimizer, workers)
        optimizer = optax.with_extra_args_support(optimizer)
        state = state if position is None else at_position(state, position)
        steps, state = optimizer.update(slopes, state, params, value=loss)
        params = optax.apply_updates(params, steps)
        return ravel_pytree(params)[0], state, fixed, loss

    def _tried(self, features: Any, labels: Any) -> tuple[Any, Any]:
        """A step and a prediction from zeros: outputs and losses."""
        flat, fixed = jnp.zeros(self.n_params, jnp.float32), self._fresh_buffers()
        draw = np.zeros(2, np.uint32)
        self._next(flat, self._jit_init(flat), fixed, features, labels, None, draw)
        outputs = self._applied(flat, fixed, features)
        return outputs, self._losses(outputs, labels)

    def _measure(self, flat: Any, fixed: Any, features: Any, labels: Any, weights: Any) -> Any:
        """The mean loss as a pure function, without anything random."""
        outputs = self._applied(flat, fixed, features)
        return mean_loss(self._losses(outputs, labels), first_rows(features), weights)

    def _losses(self, outputs: Any, labels: Any) -> Any:
        """Return the losses. A loss of classes needs integers; Spark ML's labels are doubles."""
        is_array = hasattr(labels, "dtype")
        if self._of_classes and is_array and jnp.issubdtype(labels.dtype, jnp.floating):
            labels = labels.astype(jnp.int32)
        return self._loss(outputs, labels)

    def _applied(self, flat: Any, fixed: Any, features: Any) -> Any:
        return self._apply(self._variables(self._params_of(flat), fixed), features)

    def _forward(self, params: Any, fixed: Any, features: Any, draw: Any) -> tuple[Any, Any]:
        """Outputs in training, and the buffers after it."""
        variables = self._variables(params, fixed)
        if self._apply_train is None:
            return self._apply(variables, features), fixed
        key = jax.random.key(self._seed)
        for i in range(2):
            key = jax.random.fold_in(key, draw[i])
        made = self._apply_train(variables, features, key)
        return changed_by(made, fixed) if fixed else (made, fixed)

    def _params_of(self, flat: Any) -> Any:
        return jax.tree_util.tree_unflatten(
            self._tree, [view for _, view in self._layout.views(flat)]
        )

    def _variables(self, params: Any, fixed: Any) -> Any:
        return {**params, **fixed} if fixed else params

    def _optimizer_state(self) -> Any:
        if self._state is None:
            self._state = self._jit_init(self._bound())
        return self._state

    def _bound(self) -> Flat:
        assert self._params is not None, "bind parameters first"
        return self._params

    def __getstate__(self) -> dict[str, Any]:
        """What ships: functions and options; no parameters, no optimizer state."""
        return {name: getattr(self, f"_{name}") for name in OPTIONS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        keep_to_task()
        self.__init__(**state)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> JaxModel:
        """A model of its own with the same buffers; functions hold nothing, and are the same."""
        twin = type(self)(**self.__getstate__())
        twin._fixed = self._fixed
        return twin


def need_callables(**functions: Any) -> None:
    """Raise UsageError naming what cannot be called."""
    for name, function in functions.items():
        if not callable(function):
            raise UsageError(f"{name} is a {type(function).__name__}: pass a function")


def outputs_of(outputs: str | None, loss: Any) -> str:
    """What the model puts out. Raise UsageError for a word that says nothing."""
    if outputs is None:
        return LOGITS if "cross_entropy" in loss_name(loss) else VALUES
    if outputs not in KINDS:
        raise UsageError(f"outputs={outputs!r}: must be one of {', '.join(KINDS)}")
    return outputs


def parted(tree: Any) -> tuple[Any, dict[str, Any]]:
    """What is trained, and the collections beside ``params``, if there are any."""
    if not (isinstance(tree, Mapping) and "params" in tree):
        return tree, {}
    return {"params": tree["params"]}, {name: tree[name] for name in tree if name != "params"}


def need_changing(fixed: dict[str, Any], apply_train: Any) -> None:
    """Raise UsageError where nothing says how training changes the collections beside params."""
    if fixed and apply_train is None:
        names = ", ".join(sorted(fixed))
        raise UsageError(
            f"init makes {names} beside params, which no gradient changes: pass"
            " apply_train(variables, features, key) -> (outputs, changed collections), as Flax's"
            f" module.apply(..., mutable={sorted(fixed)}) returns them; to have {names} trained,"
            " put them into params"
        )


def changed_by(made: Any, fixed: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Outputs and buffers out of what ``apply_train`` returned. Raise UsageError for others."""
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], Mapping)):
        raise UsageError(
            f"apply_train returned a {type(made).__name__}: with {', '.join(fixed)} beside params"
            " it must return (outputs, changed collections), as Flax does with mutable=[...]"
        )
    outputs, changed = made
    after = {name: changed.get(name, fixed[name]) for name in fixed}
    kinds = [
        [(name, jnp.shape(leaf), str(jnp.result_type(leaf))) for name, leaf in named_leaves(tree)]
        for tree in (fixed, after)
    ]
    if kinds[0] != kinds[1]:
        raise UsageError(
            f"apply_train changed the names, shapes or types of {', '.join(fixed)}: it had"
            f" {kinds[0]}, now {kinds[1]}; return them as init makes them"
        )
    tree = jax.tree_util.tree_structure(fixed)
    return outputs, jax.tree_util.tree_unflatten(tree, jax.tree_util.tree_leaves(after))


def need_parameters(tree: Any) -> None:
    """Raise UsageError unless these are float32 arrays, all of them to be trained."""
    leaves = named_leaves(tree)
    if not leaves:
        raise UsageError("init makes no arrays: return the pytree of parameters")
    for name, leaf in leaves:
        if leaf.dtype != jnp.float32:
            raise UsageError(
                f"parameter {name} is {leaf.dtype}: parameters are float32; convert it in init, and"
                " compute in other types inside apply"
            )


def rates_of(part: Any, depth: int = 12) -> list[float]:
    """Return the constant learning rates of an optax transformation, in order.

    optax holds them in closures alone: ``scale_by_learning_rate`` has minus the rate as step_size.
    """
    if depth == 0:
        return []
    if isinstance(part, tuple):
        return [rate for each in part for rate in rates_of(each, depth - 1)]
    found: list[float] = []
    if isinstance(part, types.FunctionType):
        cells = zip(part.__code__.co_freevars, part.__closure__ or (), strict=False)
        for name, cell in cells:
            value = cell.cell_contents
            if name == "step_size" and isinstance(value, int | float):
                found.append(-float(value))
            else:
                found += rates_of(value, depth - 1)
    return found
