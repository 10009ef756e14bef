"""Check the columns that a user named against a DataFrame's schema, and select them.

A column's role is its use in training: features, label, weight, or mark of held-out rows. ``kind``
is a column's type in Spark.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from sparkstrom.base.errors import UsageError
from sparkstrom.data.column_selection import (
    HELD_OUT,
    IMAGE_FIELDS,
    LABEL,
    WEIGHT,
    ArrowReadPlan,
    ColumnNames,
    ColumnSpec,
    iter_arrays_by_role,
    make_read_plan,
    resolve_array_source,
    split_into_arrays,
)
from sparkstrom.spark.executor_slots import is_enabled

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructField


LARGE_TYPES_KEY = "spark.sql.execution.arrow.useLargeVarTypes"  # 64-bit offsets in binary columns


DENSE_WIDTH_MAX = 4096  # longer vectors are assumed to be sparse


def select_columns(frame: DataFrame, spec: ColumnSpec) -> tuple[DataFrame, ArrowReadPlan]:
    """Select the columns that a job reads; return the new DataFrame and how to read its rows.

    Raise UsageError if a column does not suit its role; the message names the column.
    """
    columns, plan = resolve_columns(frame, spec)
    return frame.select(*columns), plan


def resolve_columns(
    frame: DataFrame, spec: ColumnSpec, *, dense: bool = False
) -> tuple[list[Column], ArrowReadPlan]:
    """Return the column expressions to select, and the plan with which executors read them.

    If ``dense`` is True, vectors that are known to be short are converted to arrays. Raise
    UsageError if a column does not suit its role; the message names the column.
    """
    positions: dict[str, int] = {}
    frame_columns = _FrameColumns.from_frame(frame)
    sources = [
        resolve_array_source(role, names, positions, partial(_check_column, frame_columns, role))
        for role, names in iter_arrays_by_role(spec)
    ]
    columns = [
        _create_expression(frame_columns.fields[name], f"c{i}", dense)
        for name, i in positions.items()
    ]
    schema = _get_arrow_schema(frame.select(*columns)).serialize().to_pybytes()
    return columns, make_read_plan(spec, schema, sources)


def find_fields(frame: DataFrame, spec: ColumnSpec) -> dict[str, StructField]:
    """Return the schema fields of the columns in ``spec``, by name.

    Raise UsageError if a column does not suit its role.
    """
    frame_columns, positions = _FrameColumns.from_frame(frame), dict[str, int]()
    for role, names in iter_arrays_by_role(spec):
        resolve_array_source(role, names, positions, partial(_check_column, frame_columns, role))
    return {name: frame_columns.fields[name] for name in positions}


def has_exact_names(frame: DataFrame) -> bool:
    """Return whether names of columns are case-sensitive in the DataFrame's session."""
    return is_enabled(frame.sparkSession.conf, "spark.sql.caseSensitive")


class _FrameColumns(NamedTuple):
    """A DataFrame's columns, read only once because a table may have thousands."""

    fields: dict[str, StructField]  # by exact name
    names_by_spark: dict[str, list[str]]  # exact names, by the name in lower case if not ``exact``
    exact: bool  # whether names are case-sensitive (spark.sql.caseSensitive)

    @classmethod
    def from_frame(cls, frame: DataFrame) -> _FrameColumns:
        """Read a DataFrame's columns and whether their names are case-sensitive."""
        exact = has_exact_names(frame)
        fields, by_spark = dict[str, Any](), dict[str, list[str]]()
        for field in frame.schema.fields:
            fields.setdefault(field.name, field)
            by_spark.setdefault(field.name if exact else field.name.lower(), []).append(field.name)
        return cls(fields, by_spark, exact)

    def find_ambiguous(self, name: str) -> list[str]:
        """Return all columns that Spark considers to have this name."""
        return self.names_by_spark[name if self.exact else name.lower()]


def _check_column(frame_columns: _FrameColumns, role: str, name: str, side_by_side: bool) -> None:
    """Raise UsageError for a column that does not exist or does not suit its role.

    ``side_by_side`` is True if the column is one of several that are combined into one array.
    """
    _check_name(frame_columns, role, name)
    _check_type(role, name, frame_columns.fields[name].dataType, side_by_side=side_by_side)


def _check_name(frame_columns: _FrameColumns, role: str, name: str) -> None:
    """Raise UsageError for a column that does not exist or whose name is ambiguous."""
    if name not in frame_columns.fields:
        raise UsageError(
            f"there is no column {name!r} for {role}; the DataFrame has"
            f" {list(frame_columns.fields)}"
        )
    matches = frame_columns.find_ambiguous(name)
    if len(matches) > 1:
        raise UsageError(
            f"{role} column {name!r} could be any of {matches}, which are the same name to Spark: "
            "rename one of them, with toDF(...) if both have equal names, or drop it"
        )


def _check_type(role: str, name: str, kind: Any, *, side_by_side: bool) -> None:
    """Raise UsageError for a column whose type ``kind`` does not suit its role.

    See ``_check_column`` for ``side_by_side``.
    """
    from pyspark.sql.types import BinaryType, BooleanType, NumericType, StringType

    is_number = isinstance(kind, NumericType | BooleanType)
    subject = f"{role} column {name!r} is {kind.simpleString()}"
    if role == HELD_OUT:
        fits, requirement = isinstance(kind, BooleanType), "boolean: true for rows to hold out"
    elif role == WEIGHT:
        fits, requirement = isinstance(kind, NumericType), "a number"
    elif side_by_side:
        fits, requirement = is_number, "a number, as part of a list; name an array column by itself"
    elif role == LABEL:
        fits = is_number or _is_array(kind) or is_vector(kind)
        requirement = "a number (a class index or a value), an array of numbers or an ml vector"
    else:
        fits = is_number or _is_array(kind) or is_vector(kind) or is_image(kind)
        fits = fits or isinstance(kind, BinaryType)
        requirement = "an array of numbers, an ml vector, an image, a number, or a list of numbers"
    if isinstance(kind, StringType):
        requirement += "; pyspark.ml.feature.StringIndexer converts strings to numbers"
    if not fits:
        raise UsageError(f"{subject}: it must be {requirement}")


def _is_array(kind: Any) -> bool:
    """Return whether a type is an array of numbers, possibly nested."""
    from pyspark.sql.types import ArrayType, BooleanType, NumericType

    while isinstance(kind, ArrayType):
        kind = kind.elementType
        if isinstance(kind, NumericType | BooleanType):
            return True
    return False


def is_scalar_label(frame: DataFrame, label: ColumnNames | None) -> bool:
    """Return whether ``label`` names one column (perhaps in a list) with one number per row."""
    arrays = [] if label is None else split_into_arrays(label)
    names = [name for one in arrays for name in ([one] if isinstance(one, str) else one)]
    if len(names) != 1:
        return False
    kind = frame.schema[names[0]].dataType
    return not (_is_array(kind) or is_vector(kind))


def is_vector(kind: Any) -> bool:
    """Return whether a type is a vector of pyspark.ml or pyspark.mllib."""
    return type(kind).__name__ == "VectorUDT"


def is_image(kind: Any) -> bool:
    """Return whether a type is the image schema of ``spark.read.format("image")``."""
    from pyspark.sql.types import StructType

    return isinstance(kind, StructType) and set(IMAGE_FIELDS) <= set(kind.names)


def _create_expression(field: StructField, alias: str, dense: bool) -> Column:
    """Return an expression that selects a column as ``alias``, converting decimals and images.

    If ``dense`` is True, short vectors are also converted, to arrays. A column that needs no
    conversion takes only one call into the JVM, because tables can be wide.
    """
    from pyspark.sql import functions as sql

    kind, quoted = field.dataType, "`" + field.name.replace("`", "``") + "`"
    if is_image(kind):
        image = sql.struct(*(sql.col(quoted)[part].alias(part) for part in IMAGE_FIELDS))
        return image.alias(alias)
    if dense and is_vector(kind) and 0 < get_vector_width(field) <= DENSE_WIDTH_MAX:
        from pyspark.ml.functions import vector_to_array

        # Doubles: the JVM would convert a number that float32 cannot hold to infinity.
        return vector_to_array(sql.col(quoted)).alias(alias)
    type_name = kind.simpleString()
    if "decimal" in type_name and not is_vector(kind):
        import re

        double = re.sub(r"decimal\(\d+,\d+\)", "double", type_name)
        return sql.col(quoted).cast(double).alias(alias)
    return sql.expr(f"{quoted} AS {alias}")


def get_vector_width(field: StructField) -> int:
    """Return the length of a vector column according to Spark ML's metadata; 0 if unknown."""
    attributes = field.metadata.get("ml_attr", {})
    return int(attributes.get("num_attrs", sum(map(len, attributes.get("attrs", {}).values()))))


def _get_arrow_schema(frame: DataFrame) -> pa.Schema:
    """Return the Arrow schema with which the JVM writes this DataFrame."""
    import pyarrow as pa
    from pyspark.sql.pandas.types import to_arrow_schema

    schema = to_arrow_schema(frame.schema)
    if not is_enabled(frame.sparkSession.conf, LARGE_TYPES_KEY):
        return schema
    return pa.schema([field.with_type(_to_large_type(field.type)) for field in schema])


def _to_large_type(kind: pa.DataType) -> pa.DataType:
    """Return ``kind`` with 64-bit offsets for binary values, including those in a struct."""
    import pyarrow as pa

    if pa.types.is_binary(kind):
        return pa.large_binary()
    if pa.types.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        return pa.struct([field.with_type(_to_large_type(field.type)) for field in fields])
    return kind


# The former names, which the programs of the acceptance cases (../shared/cases) import.
Chosen, wanted_columns = ColumnSpec, resolve_columns
