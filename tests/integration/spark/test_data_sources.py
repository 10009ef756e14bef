"""Tests of reading Spark data: kinds of columns, held-out rows, bad rows, exported rows."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from sparkstrom import ParameterAveragingTrainingMaster, SharedTrainingMaster, SparkNetwork
from sparkstrom.base.errors import TrainingError, UsageError
from sparkstrom.data.column_selection import ColumnSpec
from sparkstrom.data.row_blocks import read_row_blocks
from sparkstrom.models import DenseNetwork, Sgd
from sparkstrom.spark.data.partitioning import FIRST_ELEMENTS, create_source, partition_source


def rows_of(source, spread=None):
    """Return all rows as sorted (features, labels), read on executors as in a fit."""

    blocks = (spread or source).blocks  # an RDD cannot be pickled

    def read(index, items):
        for block in blocks(index, items):
            yield block.form.batch(block.records)

    found = (spread or source).rdd.mapPartitionsWithIndex(read).collect()
    return sorted(
        (np.asarray(f).ravel().tolist(), np.asarray(y).ravel().tolist())
        for batch in found
        for f, y in zip(batch.features, batch.labels, strict=True)
    )


@pytest.fixture
def table(spark):
    """A DataFrame of twelve rows with a column of each kind, made without pandas."""
    from pyspark.ml.linalg import SparseVector, Vectors
    from pyspark.sql import Row

    rows = [
        Row(
            id=i,
            x=[float(i), 1.0],
            dense=Vectors.dense([i, 0.0, 2.0]),
            mixed=Vectors.dense([i, 1.0]) if i % 2 else Vectors.sparse(2, [0], [float(i)]),
            wide=SparseVector(1 << 18, {i: 1.0}),
            nested=[[i, 1], [2, 3]],
            raw=bytearray([i, 255]),
            held=i % 4 == 0,
            label=i % 3,
        )
        for i in range(12)
    ]
    return spark.createDataFrame(rows, verifySchema=False).repartition(3).cache()


@pytest.mark.parametrize("move", [True, False])
def test_columns_of_all_kinds_are_read_without_pandas(table, move):
    """Columns of all kinds are read with their shapes, and executors do not import pandas."""
    names = {name: name for name in ("x", "dense", "mixed", "nested", "raw", "id")}
    source = create_source(table, ColumnSpec(names | {"beside": ["id", "label"]}))
    spread = partition_source(source, 2, 0, move=move)
    blocks = spread.blocks

    def read(index, items):
        import sys

        sys.modules.pop("pandas", None)
        for block in blocks(index, items):
            features = block.form.batch(block.records).features
            arrays = {name: array.tolist() for name, array in features.items()}
            yield from ({n: a[i] for n, a in arrays.items()} for i in range(len(arrays["id"])))
        assert "pandas" not in sys.modules

    found = spread.rdd.mapPartitionsWithIndex(read).collect()
    assert sorted(found, key=lambda row: row["id"]) == [
        {
            "x": [i, 1],
            "dense": [i, 0, 2],
            "mixed": [i, i % 2],
            "nested": [[i, 1], [2, 3]],
            "raw": [i, 255],
            "id": i,
            "beside": [i, i % 3],
        }
        for i in range(12)
    ]
    assert sum(spread.rows) == (0 if move else 12)


def test_several_inputs_and_long_sparse_vector_are_read(table):
    source = create_source(
        table, ColumnSpec({"a": "x", "b": "wide"}, ("label", "id"), "label", "held")
    )
    blocks = source.blocks

    def read(index, items):
        for block in blocks(index, items):
            batch = block.form.batch(block.records)
            assert batch.features["b"].shape[1] == 1 << 18
            assert block.form.row_bytes < 100
            places = batch.features["b"].argmax(1).tolist()
            held = block.form.held_out(block.records).tolist()
            yield batch.features["a"].tolist(), places, batch.labels[1].tolist(), held

    for a, places, ids, held in source.rdd.mapPartitionsWithIndex(read).collect():
        assert [row[0] for row in a] == places == ids
        assert held == [i % 4 == 0 for i in ids]


@pytest.mark.parametrize(
    ("chosen", "why"),
    [
        (ColumnSpec("nowhere"), "no column 'nowhere' for features; the DataFrame has"),
        (ColumnSpec(["x", "id"]), r"features column 'x' is array<double>: it must be a number"),
        (ColumnSpec("x", "raw"), "label column 'raw' is binary: it must be a number"),
        (ColumnSpec("x", weight="x"), "weight column 'x' is array<double>"),
        (ColumnSpec("x", validation="id"), "validation column 'id' is bigint: it must be boolean"),
        (ColumnSpec("x", validation=1.5), "a fraction must be at least 0 and below 1"),
        (ColumnSpec([]), r"features=\[\]: give a column's name"),
    ],
)
def test_missing_or_mistyped_column_is_rejected_before_job(table, chosen, why):
    """Columns that do not exist or have the wrong type are refused before a job starts."""
    with pytest.raises(UsageError, match=why):
        create_source(table, chosen)


def test_images_from_spark_reader_keep_their_pixels(spark, tmp_path):
    from PIL import Image

    pixels = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    frame = spark.read.format("image").load(str(tmp_path)).selectExpr("image", "1 as label")
    ((found, _),) = rows_of(create_source(frame, ColumnSpec("image")))
    assert found == pixels.ravel().tolist()
    files = spark.read.format("binaryFile").load(str(tmp_path)).selectExpr("content", "1 as label")
    ((found, _),) = rows_of(create_source(files, ColumnSpec("content")))
    assert found == pixels.ravel().tolist()


def frame_of(spark, digits, count=600):
    rows = [
        (f.tolist(), int(y), 1.0 + i % 2, i % 5 == 0)
        for i, (f, y) in enumerate(zip(digits.features[:count], digits.labels, strict=False))
    ]
    return spark.createDataFrame(rows, "features array<float>, label int, w double, held boolean")


def test_every_row_is_trained_or_held_out(spark, digits, make_network):
    frame = frame_of(spark, digits)
    by_column = make_network().fit(frame, epochs=2, weight="w", validation="held")
    assert (by_column.rows, by_column.rows_trained, by_column.rows_held_out) == (600, 480, 120)
    assert by_column.examples == 2 * 480
    assert by_column.replicas_equal
    by_chance = make_network().fit(frame, epochs=1, validation=0.25)
    assert by_chance.rows_trained + by_chance.rows_held_out == 600
    assert 100 < by_chance.rows_held_out < 200
    again = make_network(workers_per_node=1).fit(frame, epochs=1, validation=0.25)
    assert again.rows_held_out == by_chance.rows_held_out  # chosen by content, on any worker


def test_separate_held_out_dataframe_equals_validation_column(spark, digits, tmp_path):
    """Held-out rows in a separate DataFrame give the same results as a column that marks them."""
    frame = frame_of(spark, digits, 200).withColumnRenamed("features", "pixel`s.x")
    train, test = (frame.where(said).drop("held").cache() for said in ("not held", "held"))
    marked = (part.selectExpr("*", f"{held} held") for part, held in ((train, False), (test, True)))
    one = next(marked).union(next(marked))
    asked = {"epochs": 3, "features": "pixel`s.x", "weight": "w"}
    model = DenseNetwork([64, 10], updater=Sgd(0.1), seed=1)
    found = []
    for data, validation in ((one, "held"), (train, test.select("w", "label", "`pixel``s.x`"))):
        for how in ("direct", "export"):
            options = {"export_directory": str(tmp_path)} if how == "export" else {}
            master = ParameterAveragingTrainingMaster(
                rdd_training_approach=how, workers_per_node=1, **options
            )
            with SparkNetwork(spark, model, master, progress=False) as network:
                found.append(network.fit(data, validation=validation, **asked))
                if how == "export":
                    (first,) = tmp_path.iterdir()
                    network.fit(data, validation=validation, **asked)
                    assert [first] == list(tmp_path.iterdir())  # the export was reused
    assert {(made.rows_trained, made.rows_held_out, made.workers) for made in found} == {
        (160, 40, 2)
    }
    assert found[2].history == found[0].history
    assert found[3].history == found[1].history
    shared = SharedTrainingMaster(workers_per_node=1, repartition="never")
    with SparkNetwork(spark, model, shared, progress=False) as network:
        stays = network.fit(train.coalesce(2), validation=test, **asked)
    assert (stays.rows_trained, stays.rows_held_out, stays.workers) == (160, 40, 2)
    assert np.isfinite(stays.history[-1].validation)


def test_rows_of_weight_zero_do_not_change_parameters(spark, digits, make_network):
    """Rows of weight 0 do not change the parameters."""
    model = DenseNetwork([64, 10], updater=Sgd(0.1), seed=1)
    rows = [(f, y, 0.0) for f, y in digits.rows()[:200]]
    network = make_network(model)
    before = network.parameters
    network.fit(spark.sparkContext.parallelize(rows, 4))
    np.testing.assert_allclose(network.parameters, before, atol=1e-5)


@pytest.mark.parametrize("repartition", ["always", "never"])
def test_bad_row_error_names_row_and_partition(spark, digits, make_network, repartition):
    good = frame_of(spark, digits, 100)
    bad = spark.createDataFrame([([0.5] * 63, 1, 1.0, False)], good.schema)
    parts = [part.rdd.coalesce(1) for part in (good, bad)]  # Spark 4.1 merges such DataFrames
    frame = spark.createDataFrame(parts[0].union(parts[1]), good.schema)
    wrong = frame.selectExpr("if(size(features) = 63, null, features) as features", "label")
    with pytest.raises(UsageError, match=r"row 0 of partition 1: column 'features' is null"):
        make_network(repartition=repartition).fit(wrong)
    nan = frame.selectExpr(
        "if(size(features) = 63, array_repeat(float('nan'), 64), features) as features", "label"
    )
    with pytest.raises(
        TrainingError,
        match=r"row 0 of partition 1: column 'features' at \[0\] is nan: it must be a finite",
    ):
        make_network(repartition=repartition).fit(nan)


def test_bad_row_error_names_row_of_only_partition(spark, make_network):
    frame = spark.createDataFrame([([0.5] * 64, 1), (None, 1)], "features array<float>, label int")
    with pytest.raises(UsageError, match=r"row 1 of partition 0: column 'features' is null"):
        make_network(repartition="never").fit(frame.coalesce(1))


# -- export ----------------------------------------------------------------------------------------


@pytest.mark.flips(
    "SharedTrainingMaster.rdd_training_approach", "SharedTrainingMaster.export_directory"
)
def test_exported_rows_are_computed_once_for_all_fits(spark, digits, make_network, tmp_path):
    computed = spark.sparkContext.accumulator(0)

    def count(row):
        computed.add(1)
        return row

    rows = spark.sparkContext.parallelize(digits.rows()[:400], 3).map(count)
    network = make_network(rdd_training_approach="export", export_directory=str(tmp_path))
    first = network.fit(rows, epochs=2)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert len(files) == 4
    assert all(str(path).startswith(first.export_directory) for path in files)
    second = network.fit(rows, epochs=1)
    assert computed.value == 400
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == files
    for summary, epochs in ((first, 2), (second, 1)):
        assert summary.replicas_equal
        assert summary.examples == epochs * 400 == epochs * summary.rows
    direct = make_network().fit(rows, epochs=1)
    assert computed.value == 800 + FIRST_ELEMENTS  # read by the trial step before the fit
    assert direct.export_directory is None
    network.close()
    assert list(tmp_path.iterdir()) == []
    network.close()


def test_exported_rows_equal_directly_read_rows(table, spark, tmp_path):
    """Exported rows equal directly read rows, for all kinds of columns and on the same workers."""
    from sparkstrom.spark.data.export import export_rows, partition_export

    several = {"a": "x", "b": "nested", "c": "raw", "d": "wide", "e": "mixed"}
    for chosen in (ColumnSpec(several, "label", "label", "held"), ColumnSpec("wide", "x")):
        direct = partition_source(create_source(table, chosen), 2, 0, move=True)
        files = partition_export(
            spark.sparkContext, export_rows(table, chosen, 2, direct, str(tmp_path))
        )
        assert records_of(files) == records_of(direct)


def records_of(spread):
    """Return the form, number and checksum of each worker's rows, by worker."""
    blocks = spread.blocks

    def read(index, items):
        from sparkstrom.data.row_store import RowStore

        store = RowStore()
        for block in blocks(index, items):
            store.add(block.form, block.records)
        done = store.finish()
        yield index, done.form, done.rows, done.checksum

    return spread.rdd.mapPartitionsWithIndex(read).collect()


def test_export_is_replaced_by_other_data_and_removed_on_bad_row(
    spark, digits, make_network, tmp_path
):
    """An export for other data replaces the previous one, and a bad row removes the export."""
    rows = digits.rows()[:60]
    network = make_network(rdd_training_approach="export", export_directory=f"file://{tmp_path}")
    first = network.fit(spark.sparkContext.parallelize(rows, 2)).export_directory
    second = network.fit(spark.sparkContext.parallelize(rows, 2)).export_directory
    assert first != second
    assert [str(path) for path in tmp_path.iterdir()] == [second.removeprefix("file://")]
    bad = spark.sparkContext.parallelize([*rows, (np.zeros(3, np.float32), 1)], 2)
    with pytest.raises(UsageError, match=r"row 30 of partition 1 has features float32\[3\]"):
        network.fit(bad)
    assert list(tmp_path.iterdir()) == []


def test_default_export_directory_is_on_default_filesystem(spark, digits, make_network):
    network = make_network(rdd_training_approach="export")
    summary = network.fit(spark.sparkContext.parallelize(digits.rows()[:60], 2))
    directory = Path(summary.export_directory.removeprefix("file:"))
    assert directory.is_dir()
    network.close()
    assert not os.path.lexists(directory)


def test_missing_export_file_error_names_file(spark, digits, make_network, tmp_path):
    network = make_network(rdd_training_approach="export", export_directory=str(tmp_path))
    rows = spark.sparkContext.parallelize(digits.rows()[:60], 2)
    network.fit(rows)
    next(tmp_path.rglob("00002-*.parquet")).unlink()
    with pytest.raises(TrainingError, match=r"exported rows are missing: .*00002"):
        network.fit(rows)
    network.close()


def test_unmoved_rows_keep_their_partitions(spark):
    """With move=False, the rows keep their partitions, and there are no more workers than these."""
    rdd = spark.sparkContext.parallelize([([float(i)], i) for i in range(10)], 2)
    spread = partition_source(create_source(rdd, ColumnSpec()), 4, 0, move=False)
    assert (spread.workers, spread.rows, spread.blocks) == (2, (5, 5), read_row_blocks)


def test_rows_beyond_memory_limit_are_trained_from_files(spark, make_network):
    """Four workers with 10 MiB of rows each spill rows to files, if 8 MiB may stay in memory."""
    rows = spark.sparkContext.parallelize(range(2600), 3).map(
        lambda i: (np.full(4096, i % 2, np.float32), i % 2)
    )
    network = make_network(
        DenseNetwork([4096, 2], updater=Sgd(1e-4), seed=1), batch_memory_bytes=16 << 20
    )
    summary = network.fit(rows, epochs=2, validation=0.0)
    assert summary.spilled_bytes == 2600 * (4 * 4096 + 8)
    assert summary.examples == 2 * 2600
    assert summary.replicas_equal
    assert network.predict(np.ones((1, 4096), np.float32)).argmax() == 1
