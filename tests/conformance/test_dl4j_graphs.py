"""Tests of from_dl4j with branched graphs, whose parameters are in DL4J's order of vertices."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkstrom.models import from_dl4j
from sparkstrom.models.dl4j import NoDl4jNetwork, NotImported
from tests.conformance.dl4j_files import (
    CLOSE,
    SEQUENCE,
    draw_normal,
    f,
    graph,
    layer,
    output,
    predict_imported,
    softmax,
    write,
)


def vertex(kind: str, **options: Any) -> dict[str, Any]:
    """Return the JSON of a vertex without parameters."""
    return {"@class": f"org.deeplearning4j.nn.conf.graph.{kind}", **options}


def branched(ops: list[dict[str, Any]], width: int, **sources: list[str]) -> Any:
    """Return a graph: two dense layers of one input, the vertices ``ops``, and an output layer."""
    a, b = (layer("DenseLayer", nin=3, nout=4, act=act) for act in ("TanH", "ReLU"))
    told = graph(a, b, *[a] * len(ops), output(width, 2), v1=["in"], **sources)
    for number, one in enumerate(ops):
        told["vertices"][f"v{2 + number}"] = one
    told["vertices"] = dict(sorted(told["vertices"].items()))
    return told


JOINED = {
    "Add": lambda a, b: a + b,
    "Subtract": lambda a, b: a - b,
    "Product": lambda a, b: a * b,
    "Average": lambda a, b: (a + b) / 2,
    "Max": np.maximum,
}


@pytest.mark.parametrize("op", [*JOINED, "Merge"])
def test_joining_vertices_match_formulas(tmp_path: Path, op: str) -> None:
    w, b, v, c, x = (
        draw_normal(1, 3, 4),
        draw_normal(2, 4),
        draw_normal(3, 3, 4),
        draw_normal(4, 4),
        draw_normal(5, 6, 3),
    )
    joins = [vertex("MergeVertex") if op == "Merge" else vertex("ElementWiseVertex", op=op)]
    width = 8 if op == "Merge" else 4
    told = branched(joins, width, v2=["v0", "v1"])
    u, d = draw_normal(6, width, 2), draw_normal(7, 2)
    one, other = np.tanh(x @ w + b), np.maximum(x @ v + c, 0)
    both = np.concatenate((one, other), axis=1) if op == "Merge" else JOINED[op](one, other)
    found = predict_imported(tmp_path, told, x, f(w), b, f(v), c, f(u), d)
    np.testing.assert_allclose(found, softmax(both @ u + d), **CLOSE)


def test_scale_shift_subset_and_norm_vertices_match_formulas(tmp_path: Path) -> None:
    """Sum, scale, shift, subset and L2 norm are applied in a chain of vertices."""
    w, b, v, c, x = (
        draw_normal(1, 3, 4),
        draw_normal(2, 4),
        draw_normal(3, 3, 4),
        draw_normal(4, 4),
        draw_normal(5, 6, 3),
    )
    ops = [
        vertex("ElementWiseVertex", op="Add"),
        vertex("ScaleVertex", scaleFactor=0.5),
        vertex("ShiftVertex", shiftFactor=0.25),
        vertex("SubsetVertex", **{"from": 1, "to": 3}),
        vertex("L2NormalizeVertex", dimension=[], eps=1e-8),
    ]
    told = branched(ops, 3, v2=["v0", "v1"])
    u, d = draw_normal(6, 3, 2), draw_normal(7, 2)
    z = (0.5 * (np.tanh(x @ w + b) + np.maximum(x @ v + c, 0)) + 0.25)[:, 1:]
    z = z / np.linalg.norm(z, axis=1, keepdims=True)
    found = predict_imported(tmp_path, told, x, f(w), b, f(v), c, f(u), d)
    np.testing.assert_allclose(found, softmax(z @ u + d), **CLOSE)


def test_parameters_are_read_in_topological_order(tmp_path: Path) -> None:
    """Parameters are in the file's topological order or, if it has none, in that of DL4J's sort.

    DL4J sorts by a hash map of 16 buckets: vertex 17 is in bucket 1, and precedes vertex 2.
    """
    w, b, v, c, x = (
        draw_normal(1, 3, 4),
        draw_normal(2, 4),
        draw_normal(3, 3, 4),
        draw_normal(4, 4),
        draw_normal(5, 6, 3),
    )
    u, d = draw_normal(6, 8, 2), draw_normal(7, 2)
    told = branched([vertex("MergeVertex")], 8, v2=["v0", "v1"])
    told["topologicalOrderStr"] = ["in", "v1", "v0", "v2", "v3"]
    both = np.concatenate((np.tanh(x @ w + b), np.maximum(x @ v + c, 0)), axis=1)
    wanted = softmax(both @ u + d)
    found = predict_imported(tmp_path, told, x, f(v), c, f(w), b, f(u), d)
    np.testing.assert_allclose(found, wanted, **CLOSE)
    del told["topologicalOrderStr"]
    line = [f"n{i}" for i in range(14)]
    names = ["v2", "v0", *line, "v1", "v3"]  # v0 is number 2, v1 number 17
    same = vertex("ScaleVertex", scaleFactor=1.0)
    told["vertices"] = {name: told["vertices"].get(name, same) for name in names}
    steps = itertools.pairwise(["v2", *line, "v3"])
    told["vertexInputs"] |= {name: [before] for before, name in steps}
    found = predict_imported(tmp_path, told, x, f(v), c, f(w), b, f(u), d)
    np.testing.assert_allclose(found, wanted, **CLOSE)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"networkInputs": ["in", "on"]}, NotImported, "2 inputs and 1 outputs"),
        ({"vertexInputs": {"v2": [["v0"]]}}, NoDl4jNetwork, "are not lists of names"),
        ({"networkOutputs": [{}]}, NoDl4jNetwork, "are not lists of names"),
        ({"vertexInputs": {"v2": ["v0", "v9"]}}, NoDl4jNetwork, "vertex 'v2' has inputs"),
        ({"vertexInputs": {"v0": ["v2"]}}, NoDl4jNetwork, "never reaches 'v0': it has a cycle"),
        ({"vertexInputs": {"v3": ["v1"]}}, NotImported, "vertex 'v2' leads nowhere"),
        ({"topologicalOrderStr": ["in", "v3"]}, NoDl4jNetwork, "order is wrong at 'v3'"),
        ({"vertices": {"v2": vertex("StackVertex")}}, NotImported, "it is a stackvertex"),
    ],
)
def test_unsupported_and_invalid_graphs_are_refused(
    tmp_path: Path, change: Any, error: Any, said: str
) -> None:
    told = branched([vertex("MergeVertex")], 8, v2=["v0", "v1"])
    for name, value in change.items():
        told[name] = told.get(name, {}) | value if isinstance(value, dict) else value
    path = write(tmp_path / "g.zip", told, np.zeros(50))
    with pytest.raises(error, match=said):
        from_dl4j(path, training=False)


def test_pickled_network_predicts_same(tmp_path: Path) -> None:
    """A pickled copy, as executors get it, predicts the same, with many kinds of modules."""
    inner = layer("LSTM", nin=2, nout=4, act="TanH")
    told = graph(
        layer("recurrent.Bidirectional", fwd=inner, bwd=inner, mode="ADD"),
        layer("GravesBidirectionalLSTM", nin=4, nout=2),
        layer("Convolution1DLayer", nin=2, nout=4, kernelSize=[1], stride=[1]),
        layer("Cropping1D", cropping=[1, 1]),
        layer("recurrent.SimpleRnn", nin=4, nout=4),
        vertex("ElementWiseVertex", op="Max"),
        vertex("ScaleVertex", scaleFactor=2.0),
        output(4, 2, kind="RnnOutputLayer"),
        v5=["v4", "v3"],
    )
    for number in (5, 6):
        told["vertices"][f"v{number}"] = told["vertices"][f"v{number}"]["layerConf"]["layer"]
    count = 2 * 112 + 2 * (32 + 22 + 8) + 12 + 36 + 10
    path = write(tmp_path / "t.zip", told, draw_normal(1, count))
    model = from_dl4j(path)
    model.bind(model.initial())
    again = pickle.loads(pickle.dumps(model))
    again.bind(model.initial())
    np.testing.assert_array_equal(again.predict(SEQUENCE), model.predict(SEQUENCE))
