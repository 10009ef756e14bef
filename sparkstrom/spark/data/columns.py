"""Columns: from the names that a user gives to what executors read, checked on the driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import as_float, is_real, shown
from sparkstrom.runtime.records import Nest, nest_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructField

# One column, several numeric ones side by side, several arrays by place, or several by name.
Names = str | list[str] | tuple[str | list[str], ...] | dict[str, str | list[str]]

NAMES = "give a column's name, a list of numeric columns, or a tuple or dictionary of these"
FEATURES, LABEL, WEIGHT, HELD_OUT = "features", "label", "weight", "validation"
IMAGE_FIELDS = ("height", "width", "nChannels", "mode", "data")  # Spark's image schema
LARGE_TYPES = "spark.sql.execution.arrow.useLargeVarTypes"
DENSE_WIDTH_MAX = 4096  # of a vector: longer ones are mostly zeros


class Chosen(NamedTuple):
    """What ``fit`` was told about columns."""

    features: Names = "features"
    label: Names | None = "label"  # None: the model's loss takes all from the features
    weight: str | None = None
    validation: float | str | None = None

    @property
    def labels(self) -> Names:
        """The label's columns; an empty tuple where there are none."""
        return () if self.label is None else self.label

    @property
    def fraction(self) -> float:
        """Of the rows to hold out by chance."""
        return as_float(self.validation) if is_real(self.validation) else 0.0


class Take(NamedTuple):
    """One array of a minibatch: which columns of the job's frame it is made of."""

    role: str
    names: tuple[str, ...]  # the user's, for messages
    columns: tuple[int, ...]
    side_by_side: bool


class Reading(NamedTuple):
    """How executors read Arrow batches. Travels."""

    schema: bytes  # Arrow's own form
    takes: tuple[Take, ...]
    features: Nest
    labels: Nest
    weighted: bool
    flagged: bool


def check_chosen(chosen: Chosen, dataframe: bool, said: str = "an RDD") -> None:
    """Raise UsageError for a weight or validation that cannot be meant.

    ``said``: what data without columns are called.
    """
    value, weight = chosen.validation, chosen.weight
    _need_names(FEATURES, chosen.features)
    if not isinstance(chosen.labels, tuple) or chosen.labels:
        _need_names(LABEL, chosen.labels)
    if not isinstance(weight, str | None):
        raise UsageError(f"weight={shown(weight)}: give a column's name, or None for no weights")
    need_validation(value)
    for role, names in ((FEATURES, chosen.features), (LABEL, chosen.label)):
        if not dataframe and names != role:
            raise UsageError(
                f"{role}={shown(names)}: there are no columns in {said}; make its elements"
                " (features, label), where either may be a tuple or dictionary of arrays, and a"
                " label None"
            )
    if not dataframe and isinstance(value, str):
        raise UsageError(
            f"validation={shown(value)}: there are no columns in {said}; give a fraction"
        )
    if not dataframe and weight is not None:
        raise UsageError(
            f"weight={shown(weight)}: there are no columns in {said}; make its elements (features, "
            "label, weight)"
        )


def chosen_columns(frame: DataFrame, chosen: Chosen) -> tuple[DataFrame, Reading]:
    """The columns that the job needs, and how to read them. Raise UsageError naming a wrong one."""
    columns, reading = wanted_columns(frame, chosen)
    return frame.select(*columns), reading


def wanted_columns(
    frame: DataFrame, chosen: Chosen, *, dense: bool = False
) -> tuple[list[Column], Reading]:
    """What to select of the frame, and how to read it. Raise UsageError naming a wrong column.

    ``dense``: vectors that are known to be short come as arrays.
    """
    used: dict[str, int] = {}
    known = _Known.of(frame)
    takes = [
        take_of(role, one, used, partial(_check, known, role))
        for role, one in wanted_by_role(chosen)
    ]
    columns = [_column(known.fields[name], f"c{i}", dense) for name, i in used.items()]
    schema = _schema(frame.select(*columns)).serialize().to_pybytes()
    return columns, reading_for(chosen, schema, takes)


def fields_of(frame: DataFrame, chosen: Chosen) -> dict[str, StructField]:
    """Return the chosen columns by name, without duplicates. Raise UsageError for a wrong one."""
    known, used = _Known.of(frame), dict[str, int]()
    for role, one in wanted_by_role(chosen):
        take_of(role, one, used, partial(_check, known, role))
    return {name: known.fields[name] for name in used}


def wanted_by_role(chosen: Chosen) -> Iterator[tuple[str, str | list[str]]]:
    """What each array is made of, with its role. Raise UsageError where there are no features."""
    refuse_none(FEATURES, chosen.features)
    for role, names in (
        (FEATURES, chosen.features),
        (LABEL, chosen.labels),
        (WEIGHT, chosen.weight),
        (HELD_OUT, chosen.validation if isinstance(chosen.validation, str) else None),
    ):
        for one in [] if names is None else each_of(names):
            yield role, one


def reading_for(chosen: Chosen, schema: bytes, takes: Sequence[Take]) -> Reading:
    """How what was chosen is read from columns of this schema."""
    return Reading(
        schema,
        tuple(takes),
        nest_of(chosen.features),
        nest_of(chosen.labels),
        chosen.weight is not None,
        isinstance(chosen.validation, str),
    )


def need_validation(value: object) -> None:
    """Raise UsageError for what is neither a fraction of the rows nor a column's name."""
    if not (is_real(value) or isinstance(value, str | None)):
        raise UsageError(
            f"validation={shown(value)}: give a fraction such as 0.1, the name of a boolean"
            " column, or a DataFrame of held-out rows with the columns that the fit reads"
        )
    if is_real(value) and not 0 <= as_float(value) < 1:
        raise UsageError(f"validation={shown(value)}: a fraction must be at least 0 and below 1")


def _need_names(role: str, names: Any) -> None:
    """Raise UsageError for what cannot name columns; whether they exist is asked later."""
    if isinstance(names, str | list | tuple | dict):
        refuse_none(role, names)
    for one in each_of(names):
        if isinstance(one, str | list):
            refuse_none(role, one)
        if not all(isinstance(name, str) for name in (one if isinstance(one, list) else [one])):
            raise UsageError(f"{role}={shown(names)}: {NAMES}")


def refuse_none(role: str, names: Names) -> None:
    """Raise UsageError for no name at all."""
    if not names:
        raise UsageError(f"{role}={shown(names)}: give a column's name, or several")


def each_of(names: Names) -> list[str | list[str]]:
    """What each array is made of, in order."""
    if isinstance(names, dict):
        return list(names.values())
    return list(names) if isinstance(names, tuple) else [names]


def take_of(role: str, one: Any, used: dict[str, int], check: Callable[[str, bool], None]) -> Take:
    """What is read for one array; ``used``: the columns that are read, each with its place.

    ``check(name, side_by_side)`` raises for a column that does not fit.
    """
    names = [one] if isinstance(one, str) else one
    if not (isinstance(names, list) and names and all(isinstance(n, str) for n in names)):
        raise UsageError(f"{role}={shown(one)}: {NAMES}")
    side_by_side = not isinstance(one, str)
    for name in names:
        check(name, side_by_side)
        used.setdefault(name, len(used))
    return Take(role, tuple(names), tuple(used[name] for name in names), side_by_side)


class _Known(NamedTuple):
    """A frame's columns, looked at once: a table may have thousands."""

    fields: dict[str, StructField]
    by_spark: dict[str, list[str]]  # those that Spark takes for the same name
    exact: bool

    @classmethod
    def of(cls, frame: DataFrame) -> _Known:
        exact = frame.sparkSession.conf.get("spark.sql.caseSensitive", "false") == "true"
        fields, by_spark = dict[str, Any](), dict[str, list[str]]()
        for field in frame.schema.fields:
            fields.setdefault(field.name, field)
            by_spark.setdefault(field.name if exact else field.name.lower(), []).append(field.name)
        return cls(fields, by_spark, exact)

    def same_as(self, name: str) -> list[str]:
        """All that Spark takes for this name."""
        return self.by_spark[name if self.exact else name.lower()]


def _check(known: _Known, role: str, name: str, side_by_side: bool) -> None:
    _check_name(known, role, name)
    _check_kind(role, name, known.fields[name].dataType, side_by_side=side_by_side)


def _check_name(known: _Known, role: str, name: str) -> None:
    if name not in known.fields:
        raise UsageError(
            f"there is no column {name!r} for {role}; the DataFrame has {list(known.fields)}"
        )
    same = known.same_as(name)
    if len(same) > 1:
        raise UsageError(
            f"{role} column {name!r} could be any of {same}, for Spark they are the same name: "
            "rename one of them, with toDF(...) where both are called alike, or drop it"
        )


def _check_kind(role: str, name: str, kind: Any, *, side_by_side: bool) -> None:
    from pyspark.sql.types import BinaryType, BooleanType, NumericType, StringType

    number = isinstance(kind, NumericType | BooleanType)
    said = f"{role} column {name!r} is {kind.simpleString()}"
    if role == HELD_OUT:
        fits, wanted = isinstance(kind, BooleanType), "boolean: true for rows to hold out"
    elif role == WEIGHT:
        fits, wanted = isinstance(kind, NumericType), "a number"
    elif side_by_side:
        fits, wanted = number, "a number to stand beside others; name an array column by itself"
    elif role == LABEL:
        fits = number or _is_array(kind) or is_vector(kind)
        wanted = "a number (a class index or a value), an array of numbers or an ml vector"
    else:
        fits = number or _is_array(kind) or is_vector(kind) or is_image(kind)
        fits = fits or isinstance(kind, BinaryType)
        wanted = "an array of numbers, an ml vector, an image, a number, or a list of numbers"
    if isinstance(kind, StringType):
        wanted += "; pyspark.ml.feature.StringIndexer makes numbers of strings"
    if not fits:
        raise UsageError(f"{said}: it must be {wanted}")


def _is_array(kind: Any) -> bool:
    """Of numbers, or of such arrays."""
    from pyspark.sql.types import ArrayType, BooleanType, NumericType

    while isinstance(kind, ArrayType):
        kind = kind.elementType
        if isinstance(kind, NumericType | BooleanType):
            return True
    return False


def is_one_number(frame: DataFrame, label: Names | None) -> bool:
    """Is a row's label one number, and not an array or vector of them, or several?"""
    if not isinstance(label, str):
        return False
    kind = frame.schema[label].dataType
    return not (_is_array(kind) or is_vector(kind))


def is_vector(kind: Any) -> bool:
    """A vector of pyspark.ml or pyspark.mllib."""
    return type(kind).__name__ == "VectorUDT"


def is_image(kind: Any) -> bool:
    """Spark's image schema, as ``spark.read.format("image")`` gives it."""
    from pyspark.sql.types import StructType

    return isinstance(kind, StructType) and set(IMAGE_FIELDS) <= set(kind.names)


def _column(field: StructField, alias: str, dense: bool) -> Column:
    """A column as executors want it: decimals as doubles, of images what is needed.

    One expression where it is taken as it is: each call to the JVM counts for wide tables.
    """
    from pyspark.sql import functions as sql

    kind, quoted = field.dataType, "`" + field.name.replace("`", "``") + "`"
    if is_image(kind):
        whole = sql.struct(*(sql.col(quoted)[part].alias(part) for part in IMAGE_FIELDS))
        return whole.alias(alias)
    if dense and is_vector(kind) and 0 < _vector_width(field) <= DENSE_WIDTH_MAX:
        from pyspark.ml.functions import vector_to_array

        return vector_to_array(sql.col(quoted), "float32").alias(alias)
    wanted = kind.simpleString()
    if "decimal" in wanted and not is_vector(kind):
        import re

        double = re.sub(r"decimal\(\d+,\d+\)", "double", wanted)
        return sql.col(quoted).cast(double).alias(alias)
    return sql.expr(f"{quoted} AS {alias}")


def _vector_width(field: StructField) -> int:
    """What Spark ML notes beside the vectors that it makes; 0 where nobody has noted it."""
    noted = field.metadata.get("ml_attr", {})
    return int(noted.get("num_attrs", sum(map(len, noted.get("attrs", {}).values()))))


def _schema(frame: DataFrame) -> pa.Schema:
    """The Arrow schema that the JVM writes for this frame."""
    import pyarrow as pa
    from pyspark.sql.pandas.types import to_arrow_schema

    schema = to_arrow_schema(frame.schema)
    if frame.sparkSession.conf.get(LARGE_TYPES, "false") != "true":
        return schema
    return pa.schema([field.with_type(_large(field.type)) for field in schema])


def _large(kind: pa.DataType) -> pa.DataType:
    import pyarrow as pa

    if pa.types.is_binary(kind):
        return pa.large_binary()
    if pa.types.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        return pa.struct([field.with_type(_large(field.type)) for field in fields])
    return kind
