"""What models on JAX share: pytrees as named arrays, rows' mean loss, XLA within a task's CPUs.

JAX arrays cannot be changed in place, and the flat vector is NumPy memory that the mesh works on
between two steps: one copy of it each way is the price of a step on JAX.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import Columns, State, arrays_of, rows_of
from sparkstrom.models.own_words import is_users_own, said_by
from sparkstrom.models.row_checks import (
    FEATURES,
    LABELS,
    refuse_bad,
    refuse_not_finite,
    refuse_strange_classes,
)

try:
    import jax
    import jax.numpy as jnp
except ImportError as missing:
    raise UsageError(
        f"{missing}: models on JAX need it here and on every executor; do pip install"
        " 'sparkstrom[jax]' or 'sparkstrom[keras]'"
    ) from missing

INT32 = np.iinfo(np.int32)
TASK_CPUS = "OMP_NUM_THREADS"  # Spark tells its Python workers spark.task.cpus by this


def keep_to_task(threads: int | None = None) -> None:
    """In a Spark task: as many XLA threads as it has CPUs, and the CPU unless told otherwise.

    XLA reads ``NPROC`` and takes the platform when it computes for the first time in a process,
    so this comes before that, and does nothing afterwards. ``JAX_PLATFORMS`` stays as it is.
    """
    cpus = threads or os.environ.get(TASK_CPUS)
    if cpus is None:
        return  # no task
    os.environ["NPROC"] = str(cpus)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")


# -- pytrees ---------------------------------------------------------------------------------------


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Each leaf and its path, like ``layers/0/kernel``, in the order of ``ravel_pytree``."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [("/".join(map(_word, path)) or "value", leaf) for path, leaf in leaves]


def _word(key: Any) -> str:
    for field in ("key", "name", "idx"):  # of a mapping, an attribute, a sequence
        if hasattr(key, field):
            return str(getattr(key, field))
    return str(key)


def state_of(leaves: Iterable[tuple[str, Any]]) -> State:
    """JAX arrays by name as NumPy copies and plain scalars."""
    return {name: _out(leaf) for name, leaf in leaves}


def _out(leaf: Any) -> Any:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4:
        leaf = leaf.astype(jnp.float32)  # NumPy files know no bfloat16; the way back is exact
    return leaf.item() if leaf.ndim == 0 else np.array(leaf)


def leaves_of(state: State, wanted: list[tuple[str, Any]]) -> list[Any]:
    """The arrays of a state in the order, shapes and dtypes wanted. Raise UsageError if others."""
    if set(state) != {name for name, _ in wanted}:
        raise UsageError(
            f"updater state has {sorted(state)}, this optimizer needs"
            f" {sorted(name for name, _ in wanted)}: it is of another model or optimizer"
        )
    return [_in(name, state[name], like) for name, like in wanted]


def _in(name: str, value: Any, like: Any) -> Any:
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.asarray(value, jnp.uint32))
    if np.shape(value) != like.shape:
        raise UsageError(
            f"{name} of the updater state has shape {np.shape(value)}, this model needs"
            f" {like.shape}"
        )
    return jnp.array(value, like.dtype)


# -- loss ------------------------------------------------------------------------------------------


def first_rows(columns: Any) -> int:
    """How many rows traced columns have."""
    return int(jax.tree_util.tree_leaves(columns)[0].shape[0])


def row_losses(losses: Any, rows: int) -> Any:
    """One loss per row, f32[rows]: the mean over whatever more dimensions there are."""
    return losses.astype(jnp.float32).reshape(rows, -1).mean(axis=1)


def mean_loss(losses: Any, rows: int, weights: Any) -> Any:
    """The minibatch's loss: sum(weight * loss) / sum(weight), or the plain mean, or what it is.

    A loss that is a scalar already cannot be weighted: raise UsageError.
    """
    if jnp.ndim(losses) == 0:
        if weights is not None:
            raise UsageError(
                "the loss returns one number, but rows have weights: return one loss per row, as"
                " optax's losses do"
            )
        return losses
    each = row_losses(losses, rows)
    if weights is None:
        return each.mean()
    total = weights.sum()
    return (each * weights).sum() / jnp.where(total > 0, total, 1.0)  # no weight teaches nothing


# -- rows ------------------------------------------------------------------------------------------

NO_INTEGER = "numpy.integer"  # in optax's error for labels that are no integers
AS_INTEGERS = (
    "; labels are doubles, as Spark ML's are, and are converted only for losses whose name contains"
    " integer_labels, such as optax's: in yours, call labels.astype(int), or cast the column,"
    " df.withColumn('label', col('label').cast('int'))"
)
ROWS_TRIED = 7  # a size that no dimension of a model is likely to have


class Trial:
    """A trial of the model on the shapes of a minibatch alone, made once per kind of rows."""

    def __init__(
        self,
        run: Callable[[Any, Any], tuple[Any, Any]],
        *libraries: str,
        of_classes: bool = False,
        ignored: int | None = None,
    ) -> None:
        self._run = run  # features, labels -> outputs, losses
        self._libraries = libraries  # whose errors are not the user's own
        self._of_classes = of_classes  # the loss takes class indices, also as whole doubles
        self._ignored = ignored  # the label that it leaves out
        self._passed: dict[Any, Any] = {}  # kinds of rows -> shapes of outputs

    def check(self, features: Columns, labels: Columns) -> None:
        """Raise UsageError for rows that the model cannot train on, naming row and value."""
        rows = rows_of(features)
        for role, columns in ((FEATURES, features), (LABELS, labels)):
            for array in arrays_of(columns):
                if len(array) != rows:
                    raise UsageError(f"{rows} rows of features, but {len(array)} of {role}")
            refuse_not_finite(role, columns)
            _refuse_long_numbers(role, columns)
        outputs = self._outputs(features, labels)
        if isinstance(labels, np.ndarray) and hasattr(outputs, "shape"):
            _check_classes(labels, outputs.shape, self._of_classes, self._ignored)

    def _outputs(self, features: Columns, labels: Columns) -> Any:
        """The outputs' shapes for ``ROWS_TRIED`` rows like these."""
        kinds = [f"{a.dtype}{list(a.shape[1:])}" for a in arrays_of(features)]
        try:
            like = jax.tree_util.tree_map(_some_rows, (features, labels))
            leaves, tree = jax.tree_util.tree_flatten(like)
            key = (*leaves, tree)
            if key not in self._passed:
                outputs, losses = jax.eval_shape(self._run, *like)
                _check_losses(losses)
                self._passed[key] = outputs
        except UsageError:
            raise
        except Exception as error:
            if is_users_own(error, *self._libraries):
                raise
            hint = AS_INTEGERS if NO_INTEGER in str(error) and _are_floating(labels) else ""
            raise UsageError(
                f"the model cannot be trained on rows of {', '.join(kinds)}: {said_by(error)}{hint}"
            ) from error
        return self._passed[key]


def _some_rows(array: Any) -> Any:
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    return jax.ShapeDtypeStruct((ROWS_TRIED, *array.shape[1:]), dtype)


def _refuse_long_numbers(role: str, columns: Columns) -> None:
    for i, array in enumerate(arrays_of(columns)):
        if array.dtype.kind in "iu" and array.dtype.itemsize == 8:
            good = (array >= INT32.min) & (array <= INT32.max)
            refuse_bad(role, columns, i, good, "JAX computes with 32 bits; number such keys anew")


def _check_losses(losses: Any) -> None:
    rows = ROWS_TRIED
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


def _are_floating(labels: Columns) -> bool:
    return any(array.dtype.kind == "f" for array in arrays_of(labels))


def _check_classes(
    labels: Any, outputs: tuple[int, ...], of_classes: bool, ignored: int | None
) -> None:
    """Raise BadValue for a class label out of range, which JAX would clamp silently.

    Labels [rows] of outputs [rows, several] are classes if they are integers, or if the loss takes
    classes (``of_classes``), which then may be doubles.
    """
    several = len(outputs) == 2 and outputs[1] > 1
    whole = of_classes or np.issubdtype(labels.dtype, np.integer)
    if several and labels.ndim == 1 and whole:
        refuse_strange_classes(labels, outputs[1], ignored)
