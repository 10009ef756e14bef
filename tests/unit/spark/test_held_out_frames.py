"""Tests of HeldOutFrames: uniting a DataFrame of held-out rows with the data, or refusing it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.types import (
    ArrayType,
    DoubleType,
    FloatType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from sparkstrom import ParameterAveragingTrainingMaster
from sparkstrom.base.errors import UsageError
from sparkstrom.data.column_selection import ColumnSpec
from sparkstrom.spark.data import partitioning as held_out_frames
from sparkstrom.spark.data.partitioning import HeldOutFrames, check_data

CHOSEN = ColumnSpec(["age", "income"], "bought", "w")
KINDS = {"age": DoubleType(), "income": DoubleType(), "bought": LongType(), "w": DoubleType()}


class Frame:
    """A fake DataFrame with a schema of these columns."""

    mapInArrow = None
    isStreaming = False
    sparkSession = SimpleNamespace(conf=SimpleNamespace(get=lambda _, other: other))

    def __init__(self, **kinds: Any) -> None:
        self.schema = StructType([StructField(name, kind) for name, kind in kinds.items()])


class OtherFrame(Frame):
    """A fake DataFrame of another kind of session."""


class Stream(Frame):
    isStreaming = True


class Rdd:
    mapPartitions = None


@pytest.fixture
def union_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Replace the union by a fake that needs no Spark; return a list of its calls."""
    made: list[tuple[Any, ...]] = []

    def union(data: Any, held: Any, names: list[str], *, keep_partitions: bool) -> tuple[Any, str]:
        made.append((data, held, names, keep_partitions))
        return Frame(**KINDS), "held"

    monkeypatch.setattr(held_out_frames, "_unite_frames", union)
    return made


def test_union_is_reused_for_same_frames_and_columns(union_calls: list[tuple[Any, ...]]) -> None:
    """The union, with its export, is reused for the same frames, columns and partitioning only."""
    data, held = Frame(**KINDS, more=StringType()), Frame(**KINDS, other=LongType())
    frames = HeldOutFrames(check_data)
    first = frames.unite(data, CHOSEN, held, "always")
    assert first[1] == CHOSEN._replace(validation="held")
    assert frames.unite(data, CHOSEN, held, "always")[0] is first[0]
    assert union_calls == [(data, held, ["age", "income", "bought", "w"], False)]
    for other in (
        (Frame(**KINDS), CHOSEN, held, "always"),
        (data, CHOSEN, Frame(**KINDS), "always"),
        (data, CHOSEN._replace(weight=None), held, "always"),
        (data, CHOSEN, held, "never"),
    ):
        before = len(union_calls)
        assert frames.unite(*other)[0] is not first[0]
        assert len(union_calls) == before + 1
    assert [stay for *_, stay in union_calls] == [False, False, False, False, True]


@pytest.mark.parametrize("validation", [None, 0.25, "column", True, [0.1]])
def test_validation_without_rows_is_passed_on_unchanged(validation: Any) -> None:
    """A ``validation`` that is no DataFrame or RDD is passed on unchanged, for later checks."""
    data = Frame(**KINDS)
    found = HeldOutFrames(check_data).unite(data, CHOSEN, validation, "always")
    assert found == (data, CHOSEN._replace(validation=validation))


def test_union_is_repartitioned_if_option_compares_partitions(
    union_calls: list[tuple[Any, ...]],
) -> None:
    """A union is always repartitioned if the option compares the number of partitions."""
    frames, data = HeldOutFrames(check_data), Frame(**KINDS)
    whole, _ = frames.unite(data, CHOSEN, Frame(**KINDS), "always")
    counting, staying = (
        ParameterAveragingTrainingMaster(repartition=word)
        for word in ("num_partitions_workers_differs", "never")
    )
    assert frames.partitioning_options(counting, whole).repartition == "always"
    assert frames.partitioning_options(counting, data) is counting
    assert frames.partitioning_options(staying, whole) is staying


def without(*names: str, **other: Any) -> Frame:
    """Return a Frame without some columns, and with other types for some."""
    return Frame(**{name: kind for name, kind in (KINDS | other).items() if name not in names})


@pytest.mark.parametrize(
    ("data", "held", "why"),
    [
        (
            Frame(**KINDS),
            without("income"),
            r"validation: there is no column 'income' for features; the DataFrame has \['age', "
            r"'bought', 'w'\]\. Held-out rows need .* same names: age, income, bought, w$",
        ),
        (without("w"), Frame(**KINDS), "^there is no column 'w' for weight"),
        (
            Frame(**KINDS),
            without(bought=DoubleType()),
            r"validation: column 'bought' is double among the held-out rows and bigint in the "
            r"data: .*frame.withColumn\('bought', frame\['bought'\].cast\('bigint'\)\)",
        ),
        (
            without(bought=ArrayType(FloatType())),
            without(bought=ArrayType(DoubleType())),
            "column 'bought' is array<double> among the held-out rows and array<float>",
        ),
        (Frame(**KINDS), Frame(**KINDS, Age=DoubleType()), r"validation: .*could be any of \['age"),
        (Frame(**KINDS), Rdd(), "validation=.*held-out rows cannot be an RDD; make a DataFrame"),
        (Frame(**KINDS), OtherFrame(**KINDS), "are a DataFrame of a different session"),
        (Stream(**KINDS), Stream(**KINDS), "data is a streaming DataFrame, which has no last row"),
    ],
)
def test_incompatible_held_out_frames_are_refused(data: Any, held: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        HeldOutFrames(check_data).unite(data, CHOSEN, held, "always")


def test_held_out_frame_for_rdd_is_refused() -> None:
    with pytest.raises(UsageError, match="are a DataFrame, and the data are an RDD: make a Data"):
        HeldOutFrames(check_data).unite(Rdd(), ColumnSpec(), Frame(**KINDS), "always")


def test_streaming_held_out_frame_is_refused() -> None:
    held = Frame(**KINDS)
    held.isStreaming = True
    with pytest.raises(UsageError, match=r"^validation: data is a streaming DataFrame"):
        HeldOutFrames(check_data).unite(Frame(**KINDS), CHOSEN, held, "always")
