"""Common parts of models on JAX: buffers, thread limits, named pytree leaves, losses, row checks.

JAX arrays cannot be changed in place, whereas the flat vector of all parameters is NumPy memory to
which other workers' updates are added between two steps. A step on JAX therefore copies the vector
once in each direction. Buffers are model state other than parameters, such as BatchNorm's
statistics.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import (
    Batch,
    Columns,
    Flat,
    Layout,
    State,
    arrays_of,
    check_bindable,
    count_rows,
)
from sparkstrom.models.row_checks import (
    FEATURES,
    LABELS,
    describe_error,
    is_raised_by_user_code,
    refuse_invalid_values,
    refuse_non_finite,
    refuse_unknown_classes,
)

Arrays = list[Any]


def pack_buffers(arrays: Arrays) -> bytes:
    """Return the bytes of the arrays in little endian, one after the other."""
    return b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)


def unpack_buffers(templates: Arrays, data: bytes) -> Arrays:
    """Convert packed bytes to arrays like ``templates``; raise UsageError if the size differs."""
    wanted = sum(array.nbytes for array in templates)
    if len(data) != wanted:
        raise UsageError(
            f"{len(data)} bytes of buffers, this model has {wanted} (of {len(templates)} buffers):"
            " they belong to another model"
        )
    arrays, offset = [], 0
    for array in templates:
        part = np.frombuffer(data, array.dtype, array.size, offset)
        arrays.append(part.reshape(array.shape))
        offset += array.nbytes
    return arrays


def average_buffers(
    templates: Arrays, reports: list[bytes], weights: Sequence[float] | None = None
) -> bytes:
    """Return the mean of packed buffers, packed again; for integer arrays the maximum.

    Sums are computed in float64 and in the given order, so equal reports give equal bytes.

    Args:
        templates: arrays with the dtypes and shapes of the buffers.
        reports: packed buffers of each worker.
        weights: weight of each report; None: all reports weigh the same.
    """
    columns = [unpack_buffers(templates, report) for report in reports]
    counts = [1.0] * len(reports) if weights is None else weights
    return pack_buffers(
        [_weighted_mean([column[i] for column in columns], counts) for i in range(len(templates))]
    )


def _weighted_mean(values: Arrays, weights: Sequence[float]) -> Any:
    """Return the weighted mean of arrays, computed in float64; for integers the maximum."""
    first = values[0]
    if first.dtype.kind in "biu":
        return np.maximum.reduce(values)
    total = np.zeros(first.shape, np.float64)
    for value, weight in zip(values, weights, strict=True):
        total += value.astype(np.float64) * weight
    return (total / sum(weights)).astype(first.dtype)


try:
    import jax as jax
except ImportError as missing:
    raise UsageError(
        f"{missing}: models on JAX need it here and on every executor; do pip install"
        " 'sparkstrom[jax]' or 'sparkstrom[keras]'"
    ) from missing

jnp = jax.numpy
INT32_RANGE = np.iinfo(np.int32)
TASK_CPUS = "OMP_NUM_THREADS"  # Spark sets it to spark.task.cpus in its Python workers


def limit_to_task_cpus(threads: int | None = None) -> None:
    """Limit XLA to ``threads`` threads, and make it use the CPU even if there is a GPU.

    Without ``threads``, the number of the Spark task's CPUs is used; outside a Spark task, nothing
    is done. XLA reads ``NPROC`` and selects the platform in a process's first computation, so later
    calls have no effect. A user's ``JAX_PLATFORMS`` takes precedence.
    """
    cpus = threads or os.environ.get(TASK_CPUS)
    if cpus is None:
        return  # not in a Spark task
    os.environ["NPROC"] = str(cpus)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Return (path, value) of each leaf in ``ravel_pytree``'s order.

    A path looks like ``layers/0/kernel``; if the tree is a single leaf, it is ``value``.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [("/".join(map(_key_name, path)) or "value", leaf) for path, leaf in leaves]


def _key_name(key: Any) -> str:
    """Return one key of a leaf's path as text."""
    for field in ("key", "name", "idx"):  # of a mapping, an attribute, a sequence
        if hasattr(key, field):
            return str(getattr(key, field))
    return str(key)


def state_from_leaves(leaves: Iterable[tuple[str, Any]]) -> State:
    """Convert named JAX arrays to an optimizer state of NumPy copies and plain scalars."""
    return {name: _to_numpy(leaf) for name, leaf in leaves}


def _to_numpy(leaf: Any) -> Any:
    """Convert a JAX leaf to a NumPy array or a plain scalar."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = _to_numpy_array(leaf)
    return array.item() if array.ndim == 0 else array


def _to_numpy_array(leaf: Any) -> NDArray[Any]:
    """Return a copy of a JAX array as a NumPy array; floats narrower than float32 become float32.

    NumPy has no bfloat16. Converting back is exact.
    """
    is_narrow = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4
    return np.array(leaf, np.float32 if is_narrow else None)


def leaves_from_state(state: State, templates: list[tuple[str, Any]]) -> list[Any]:
    """Convert a state's values to JAX arrays, in the order of ``templates``.

    Args:
        state: result of ``state_from_leaves``.
        templates: (name, array) of each leaf; a ``ShapeDtypeStruct`` may replace the array.

    Raises:
        UsageError: names or shapes differ.
    """
    if set(state) != {name for name, _ in templates}:
        raise UsageError(
            f"optimizer state has {sorted(state)}, this optimizer needs"
            f" {sorted(name for name, _ in templates)}: it belongs to another model or optimizer"
        )
    return [_leaf_from_state(name, state[name], template) for name, template in templates]


def _leaf_from_state(name: str, value: Any, template: Any) -> Any:
    """Convert a state's value to a JAX array like ``template``, or raise UsageError."""
    if jnp.issubdtype(template.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.asarray(value, jnp.uint32))
    if np.shape(value) != template.shape:
        raise UsageError(
            f"{name} of the optimizer state has shape {np.shape(value)}, this model needs"
            f" {template.shape}"
        )
    return jnp.array(value, template.dtype)


def reduce_to_row_losses(losses: Any, rows: int) -> Any:
    """Return one loss per row, f32[rows]: the mean over all other dimensions."""
    return losses.astype(jnp.float32).reshape(rows, -1).mean(axis=1)


def mean_loss(losses: Any, features: Any, weights: Any) -> Any:
    """Return sum(weight * loss) / sum(weight), or the plain mean if ``weights`` is None.

    ``losses`` is either one loss per row, [rows, ...], or already their mean, which is returned
    unchanged. ``features`` only provide the number of rows. Raise UsageError if ``losses`` is a
    mean and the rows have weights.
    """
    if jnp.ndim(losses) == 0:
        if weights is not None:
            raise UsageError(
                "the loss returns one number, but rows have weights: return one loss per row, as"
                " optax's losses do"
            )
        return losses
    rows = jax.tree_util.tree_leaves(features)[0].shape[0]
    row_losses = reduce_to_row_losses(losses, rows)
    if weights is None:
        return row_losses.mean()
    total = weights.sum()
    return (row_losses * weights).sum() / jnp.where(total > 0, total, 1.0)  # 0 if all weights are 0


INTEGER_ERROR = "numpy.integer"  # occurs in optax's error for labels that are not integers
INTEGER_REMEDY = (
    "; labels are doubles, as Spark ML's are, and are converted only for losses whose name contains"
    " integer_labels, such as optax's: in yours, call labels.astype(int), or cast the column,"
    " df.withColumn('label', col('label').cast('int'))"
)
FLOAT_REMEDY = ", or cast them to float32 if they are not classes"
TRIAL_ROWS = 7  # number of rows when tracing: an unlikely size for a model's own dimensions


class ShapeCheck:
    """Checks rows before training; traces the model once for each combination of shapes and dtypes.

    Args:
        run: (features, labels) -> (outputs, losses); it is only traced, never computed.
        libraries: packages of which errors become UsageErrors; errors that other code raises on
            purpose are not changed.
        takes_classes: whether the loss takes class indices, which may be stored as doubles.
        ignored_label: the label that the loss ignores, or None.
        every_label_counts: whether each label of [rows, steps, ...] must be a class; False if the
            loss may ignore some of them.
    """

    def __init__(
        self,
        run: Callable[[Any, Any], tuple[Any, Any]],
        *libraries: str,
        takes_classes: bool = False,
        ignored_label: int | None = None,
        every_label_counts: bool = False,
    ) -> None:
        self._run, self._libraries = run, libraries
        self._takes_classes, self._ignored_label = takes_classes, ignored_label
        self._every_label_counts = every_label_counts
        self._checked_shapes: dict[Any, Any] = {}  # shapes, dtypes of rows -> shapes of outputs

    def check(self, features: Columns, labels: Columns) -> None:
        """Raise UsageError, with row and value, for rows that the model cannot train on."""
        rows = count_rows(features)
        for role, columns in ((FEATURES, features), (LABELS, labels)):
            for array in arrays_of(columns):
                if len(array) != rows:
                    raise UsageError(f"{rows} rows of features, but {len(array)} of {role}")
            refuse_non_finite(role, columns)
            _refuse_beyond_int32(role, columns)
        outputs = self._trace_outputs(features, labels)
        if isinstance(labels, np.ndarray) and hasattr(outputs, "shape"):
            self._check_class_labels(labels, outputs.shape)

    def _check_class_labels(self, labels: Any, outputs: tuple[int, ...]) -> None:
        """Raise BadValue for a label out of range, which JAX would treat as another class.

        Labels are class indices if ``outputs``, the shape of the outputs, has one dimension more,
        of a size above 1, and either the labels are integers or the loss takes class indices.
        """
        has_classes = len(outputs) == labels.ndim + 1 and outputs[-1] > 1
        are_classes = self._takes_classes or np.issubdtype(labels.dtype, np.integer)
        if has_classes and are_classes and (labels.ndim == 1 or self._every_label_counts):
            remedy = "" if self._takes_classes else FLOAT_REMEDY
            refuse_unknown_classes(labels, outputs[-1], self._ignored_label, remedy)

    def _trace_outputs(self, features: Columns, labels: Columns) -> Any:
        """Return the shapes of the outputs for rows like these.

        Raise UsageError if a library rejects the shapes or the loss's shape is wrong.
        """
        kinds = [f"{a.dtype}{list(a.shape[1:])}" for a in arrays_of(features)]
        try:
            like = jax.tree_util.tree_map(_make_trial_rows, (features, labels))
            leaves, tree = jax.tree_util.tree_flatten(like)
            key = (*leaves, tree)
            if key not in self._checked_shapes:
                outputs, losses = jax.eval_shape(self._run, *like)
                _check_loss_shape(losses)
                self._checked_shapes[key] = outputs
        except UsageError:
            raise
        except Exception as error:
            if is_raised_by_user_code(error, *self._libraries):
                raise
            hint = (
                INTEGER_REMEDY
                if INTEGER_ERROR in str(error) and _has_floating_labels(labels)
                else ""
            )
            raise UsageError(
                f"the model cannot be trained on rows of {', '.join(kinds)}:"
                f" {describe_error(error)}{hint}"
            ) from error
        return self._checked_shapes[key]


def _make_trial_rows(array: Any) -> Any:
    """Return a ShapeDtypeStruct for ``TRIAL_ROWS`` rows like those of the array."""
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    return jax.ShapeDtypeStruct((TRIAL_ROWS, *array.shape[1:]), dtype)


def _refuse_beyond_int32(role: str, columns: Columns) -> None:
    """Raise BadValue for the first 64-bit integer that does not fit into an int32."""
    for i, array in enumerate(arrays_of(columns)):
        if array.dtype.kind not in "iu" or array.dtype.itemsize < 8 or not array.size:
            continue
        if array.min() < INT32_RANGE.min or array.max() > INT32_RANGE.max:
            fits = (array >= INT32_RANGE.min) & (array <= INT32_RANGE.max)
            refuse_invalid_values(
                role, columns, i, fits, "JAX computes with 32 bits; renumber such keys"
            )


def _check_loss_shape(losses: Any) -> None:
    """Raise UsageError unless ``losses`` is a scalar or has an entry for each row.

    The shape [rows, rows] is also an error, because outputs and labels were broadcast.
    """
    rows = TRIAL_ROWS
    if losses.shape and losses.shape[0] != rows:
        raise UsageError(
            f"the loss of {rows} rows has shape {list(losses.shape)}: return one loss per row, or"
            " their mean"
        )
    if losses.shape == (rows, rows):
        raise UsageError(
            f"the loss of {rows} rows has shape {list(losses.shape)}, every output against every"
            " label: outputs [rows, 1] and labels [rows] were broadcast; reshape one of them"
        )


def _has_floating_labels(labels: Columns) -> bool:
    """Return whether at least one label array has a floating-point dtype."""
    return any(array.dtype.kind == "f" for array in arrays_of(labels))


class FlatJaxModel:
    """Base class of models that JAX computes and whose parameters are one flat vector.

    A subclass sets the attributes that have no value here, and defines ``_compute_outputs``,
    ``_compute_losses`` and ``_buffer_values``.
    """

    class_axis = -1  # axis of the classes in the outputs for sequences and images
    _layout: Layout  # positions of the parameters in the flat vector
    _outputs: str  # what ``predict`` returns
    _shape_check: ShapeCheck
    _jit_predict: Any  # ``_compute_outputs``, compiled
    _jit_loss: Any  # ``_compute_loss``, compiled
    _non_trainable: Any  # current values that the computation needs besides the parameters
    _params: Flat | None = None
    # (workers, minibatches of the fit); workers is None while there has only been one.
    _fit_position: tuple[int | None, int] | None = None

    def _compute_outputs(self, flat: Any, non_trainable: Any, features: Any) -> Any:
        """Return the outputs in inference mode. This is a pure function of its arguments."""
        raise NotImplementedError

    def _compute_losses(self, outputs: Any, labels: Any) -> Any:
        """Return one loss per row, or their mean. This is a pure function of its arguments."""
        raise NotImplementedError

    def _buffer_values(self) -> list[Any]:
        """Return the current buffers as NumPy arrays."""
        raise NotImplementedError

    @property
    def n_params(self) -> int:
        """The number of trainable parameters."""
        return self._layout.size

    @property
    def outputs(self) -> str:
        """What ``predict`` returns: logits, probabilities or values."""
        return self._outputs

    def bind(self, params: Flat) -> None:
        """Use this memory, f32[n_params], for the parameters; each step changes it in place."""
        self._params = check_bindable(params, self.n_params)

    def keep_pace(self, workers: int, minibatches: int, counted: int) -> None:
        """Make later steps scale momentum to ``workers`` and set schedules to ``minibatches``.

        ``counted`` is not used. The step is recompiled once, when a second worker joins. Later
        changes need no compilation, because both numbers are inputs of the compiled function.
        """
        alone = workers == 1 and (self._fit_position is None or self._fit_position[0] is None)
        self._fit_position = None if alone else workers, minibatches

    def predict(self, features: Columns) -> Any:
        """Return the outputs for the bound parameters as new NumPy arrays [rows, ...].

        Floats narrower than float32 become float32.

        Raise BadValue for a 64-bit integer that JAX would change.
        """
        _refuse_beyond_int32(FEATURES, features)
        outputs = self._jit_predict(self._require_bound(), self._get_non_trainable(), features)
        return jax.tree_util.tree_map(_to_numpy_array, outputs)

    def loss(self, batch: Batch) -> tuple[float, float]:
        """Return (sum of weight x loss, sum of weights) in inference mode, without penalties."""
        mean = float(self._jit_loss(self._require_bound(), self._get_non_trainable(), *batch))
        return mean * batch.total_weight, batch.total_weight

    def check(self, features: Columns, labels: Columns) -> None:
        """Raise UsageError for rows that do not fit, naming row and value, or the wrong shapes."""
        self._shape_check.check(features, labels)

    def layer_of(self, index: int) -> str:
        """Return the name of parameter ``index``'s array, like ``params/Dense_0/kernel``."""
        return self._layout.name_at(index)

    def buffers_bytes(self) -> bytes:
        """Return the buffers (such as BatchNorm's statistics) as bytes; b"" if there are none."""
        return pack_buffers(self._buffer_values())

    def average_buffers(self, reports: list[bytes]) -> bytes:
        """Return the mean of ``reports``, each a worker's buffers; for integers the maximum."""
        return average_buffers(self._buffer_values(), reports)

    def weighed_buffers(self, reports: list[bytes], weights: Sequence[float]) -> bytes:
        """Return the mean as ``average_buffers`` does, with a weight for each report."""
        return average_buffers(self._buffer_values(), reports, weights)

    def _get_non_trainable(self) -> Any:
        """Return the current values that the computation needs besides the parameters."""
        return self._non_trainable

    def _compute_loss(
        self, flat: Any, non_trainable: Any, features: Any, labels: Any, weights: Any
    ) -> Any:
        """Return the mean loss in inference mode. This is a pure function of its arguments."""
        outputs = self._compute_outputs(flat, non_trainable, features)
        return mean_loss(self._compute_losses(outputs, labels), features, weights)

    def _require_bound(self) -> Flat:
        """Return the bound parameters; fail if ``bind`` has not been called."""
        assert self._params is not None, "bind parameters first"
        return self._params
