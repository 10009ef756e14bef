"""Tests of from_dl4j with damaged files: one error with file and reason, and little memory.

And tests of normalizers, which the same code reads.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import resource
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.checkpoint.saved_model import load_model, save_model
from sparkstrom.models import from_dl4j
from sparkstrom.models.dl4j import NoDl4jNetwork, NotImported
from sparkstrom.models.dl4j.configuration import parse_network
from sparkstrom.models.dl4j.parameters import count_parameters
from tests.conformance.dl4j_files import (
    draw_normal,
    f,
    graph,
    layer,
    nd4j,
    network,
    output,
    utf,
    write,
)

W, B = draw_normal(1, 3, 4), draw_normal(2, 4)
FLAT = np.concatenate([f(W), B]).reshape(1, -1)


def header(count: int, *info: int, mode: str = "MIXED_DATA_TYPES") -> bytes:
    """Return an array's shape information ``info``, and an announcement of ``count`` values."""
    head = utf("MIXED_DATA_TYPES") + struct.pack(">q", len(info)) + utf("LONG")
    head += struct.pack(f">{len(info)}q", *info)
    return head + utf(mode) + struct.pack(">q", count) + utf("FLOAT")


@pytest.mark.parametrize(
    ("coefficients", "said"),
    [
        (nd4j(FLAT)[:-1], "it ends within an array|are left"),
        (nd4j(FLAT)[:20], "it ends within|bytes are left"),
        (b"\xff\xff", "it ends within"),
        (nd4j(FLAT[:, :-1]), "15 values, where the layers need 16"),
        (header(1 << 40, 2, 1, 1 << 40, 1, 1, 0, 1, 99), "1099511627776 values announced"),
        (header(-1, 2, 1, 16, 1, 1, 0, 1, 99), "-1 values announced"),
        (header(16, 2, 4, 5, 5, 1, 0, 1, 99), r"16 values for shape \(4, 5\)|announced"),
        (header(16, 2, 4, 4, 9, 1, 0, 1, 99), r"shape \(4, 4\) with strides \(9, 1\)"),
        (header(16, 2, -4, -4, 1, 1, 0, 1, 99), r"shape \(-4, -4\)"),
        (header(16, 40, *[1] * 84), "shape information"),
        (header(16, 2, 1, 16, 1, 1, 0, 1, 99, mode="HEAPS"), "allocation mode 'HEAPS'"),
        (utf("MIXED_DATA_TYPES") + struct.pack(">q", 8) + utf("UTF8"), "of type UTF8|announced"),
    ],
)
def test_damaged_array_error_names_file_and_reason(
    tmp_path: Path, coefficients: bytes, said: str
) -> None:
    path = write(tmp_path / "d.zip", network(output(3, 4)), coefficients_bin=coefficients)
    with pytest.raises(NoDl4jNetwork, match=said) as refused:
        from_dl4j(path)
    assert str(path) in str(refused.value)
    assert "coefficients.bin" in str(refused.value)


@pytest.mark.parametrize(
    ("configuration", "said"),
    [
        (b"{", "configuration.json cannot be read"),
        (b"[]", "is no JSON object"),
        (b"{}", "neither confs nor vertices"),
        (b'{"confs": []}', "has no layers"),
        (b'{"confs": [{"layer": 3}]}', "layer0 has layer=3"),
        (b'{"confs": [{"layer": {"dense": {}}, "variables": 3}]}', "has variables=3"),
        (
            b'{"vertices": {"a": {}}, "networkInputs": ["i"], "networkOutputs": ["a"],'
            b' "vertexInputs": {"a": 3}}',
            "not lists of names",
        ),
        (b"[" * 100_000, "configuration.json cannot be read"),
        (json.dumps(network(output(-3, 4))).encode(), "has nin=-3"),
        *(
            (json.dumps({**graph(output(3, 4)), "topologicalOrderStr": [odd, "v0"]}).encode(), said)
            for odd, said in (([1], r"wrong at \[1\]"), ({"a": 1}, "wrong at {'a': 1}"))
        ),
        (
            json.dumps(
                network(layer("GlobalPoolingLayer", poolingDimensions=[[1]]), output(3, 4))
            ).encode(),
            r"has poolingdimensions=\[\[1\]\]",
        ),
        (json.dumps(network(output(3, 4), iterationCount="x")).encode(), "iterationCount='x'"),
    ],
)
def test_damaged_configuration_is_refused_with_reason(
    tmp_path: Path, configuration: bytes, said: str
) -> None:
    path = write(tmp_path / "d.zip", {}, configuration_json=b"", coefficients_bin=nd4j(FLAT))
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("configuration.json", configuration)
        file.writestr("coefficients.bin", nd4j(FLAT))
    with pytest.raises(NoDl4jNetwork, match=said):
        from_dl4j(path)


ODD = (None, 0, 1, -1, 3.5, "x", "NaN", [], [1], [[0]], {}, {"a": 1}, True, 1 << 40, ["v0"], 1e300)


def test_odd_configuration_values_raise_only_import_errors(tmp_path: Path) -> None:
    """With an odd value at any place, only the two errors of from_dl4j are raised, or none."""
    random = np.random.default_rng(0)
    inner = layer("LSTM", nin=2, nout=4, act="TanH")
    conv = {"kernelSize": [1, 1], "stride": [1, 1], "padding": [0, 0]}
    step = {"@class": "x.StepSchedule", "initialValue": 0.1, "decayRate": 0.5, "step": 2.0}
    adam = {"@class": "x.Adam", "learningRate": 0.1, "learningRateSchedule": step}
    bases = [
        graph(
            layer("recurrent.Bidirectional", fwd=inner, bwd=inner, mode="ADD"),
            layer("Convolution1DLayer", nin=4, nout=4, **conv),
            layer("Cropping1D", cropping=[1, 1]),
            output(4, 2, kind="RnnOutputLayer", iupdater=adam),
        ),
        network(
            layer("SeparableConvolution2D", nin=3, nout=4, depthMultiplier=2, **conv),
            layer("PReLULayer", inputShape=[4, 8, 8], sharedAxes=[2, 3]),
            layer("Upsampling2D", size=[2, 2], idropout={"@class": "x.AlphaDropout", "p": 0.5}),
            layer("CnnLossLayer", lossFn={"@class": "x.LossL2", "weights": {"data": [1, 2]}}),
        ),
        network(layer("GlobalPoolingLayer", poolingDimensions=[2, 3]), output(3, 2)),
    ]
    bases[0]["topologicalOrderStr"] = ["in", "v0", "v1", "v2", "v3"]
    for _ in range(160):
        told = json.loads(json.dumps(bases[random.integers(len(bases))]))
        places = list(iterate_places(told))
        where, key = places[random.integers(len(places))]
        where[key] = ODD[random.integers(len(ODD))]
        path = write(tmp_path / "o.zip", told, np.zeros(300, np.float32))
        with contextlib.suppress(NoDl4jNetwork, NotImported):
            path = write(
                tmp_path / "o.zip", told, np.zeros(count_parameters(parse_network("x", told)))
            )
        with contextlib.suppress(NoDl4jNetwork, NotImported):
            from_dl4j(path)


def iterate_places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the container and key of each value inside a JSON value, recursively."""
    if isinstance(value, dict | list):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        for key in keys:
            yield value, key
            yield from iterate_places(value[key])


def test_damaged_zip_files_raise_only_import_errors(tmp_path: Path) -> None:
    """Other files, missing entries and changed bytes raise only the errors of from_dl4j."""
    text = tmp_path / "text.zip"
    text.write_text("not a zip")
    with pytest.raises(NoDl4jNetwork, match="cannot be opened as a zip"):
        from_dl4j(text)
    with zipfile.ZipFile(tmp_path / "half.zip", "w") as file:
        file.writestr("configuration.json", json.dumps(network(output(3, 4))))
    with pytest.raises(
        NoDl4jNetwork, match=r"it contains no coefficients\.bin, only configuration"
    ):
        from_dl4j(tmp_path / "half.zip")
    path = write(tmp_path / "whole.zip", network(output(3, 4)), f(W), B)
    content = bytearray(path.read_bytes())
    random = np.random.default_rng(0)
    for at in random.choice(len(content), 300, replace=False):
        damaged = content.copy()
        damaged[at] ^= int(random.integers(1, 256))
        path.write_bytes(damaged)
        with contextlib.suppress(NoDl4jNetwork, NotImported):  # no other error
            from_dl4j(path, training=False)  # entries that are not read may be damaged


def test_a_small_file_that_announces_terabytes_takes_no_memory(tmp_path: Path) -> None:
    """A file is refused early if layers, array and entry agree about a size that it cannot hold."""
    count = (1 << 20) * (1 << 20) + (1 << 20)
    told = network(output(1 << 20, 1 << 20))
    path = write(
        tmp_path / "h.zip", told, coefficients_bin=header(count, 2, 1, count, 1, 1, 0, 1, 99)
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(NoDl4jNetwork, match="values announced"):
        from_dl4j(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 16  # KiB
    with zipfile.ZipFile(tmp_path / "z.zip", "w", zipfile.ZIP_DEFLATED) as file:
        with file.open("configuration.json", "w") as entry:
            for _ in range(65):
                entry.write(b" " * (1 << 20))
        file.writestr("coefficients.bin", nd4j(FLAT))
    with pytest.raises(NoDl4jNetwork, match="more than any network needs"):
        from_dl4j(tmp_path / "z.zip")


def test_an_updaters_state_of_another_network_is_refused(tmp_path: Path) -> None:
    state = nd4j(np.zeros((1, 31), np.float32))
    path = write(tmp_path / "u.zip", network(output(3, 4)), f(W), B, updaterState_bin=state)
    with pytest.raises(NoDl4jNetwork, match=r"updaterState\.bin: 31 values, where the layers need"):
        from_dl4j(path)


# -- normalizers -----------------------------------------------------------------------------------


def import_normalizer(tmp_path: Path, kind: str, body: bytes) -> Any:
    """Return the imported normalizer of a file with this kind and body."""
    content = utf("NORMALIZER") + struct.pack(">i", 1) + utf(kind) + body
    path = write(tmp_path / "n.zip", network(output(3, 4)), f(W), B, normalizer_bin=content)
    return from_dl4j(path).normalizer


def test_standardize_normalizer_matches_formula(tmp_path: Path) -> None:
    mean, std = draw_normal(3, 1, 3), np.array([[0.5, 2, 0]], np.float32)
    body = b"\0" + nd4j(mean) + nd4j(std)
    normalizer = import_normalizer(tmp_path, "STANDARDIZE", body)
    x = draw_normal(4, 6, 3)
    wanted = (x - mean) / np.array([0.5, 2, 1])
    np.testing.assert_allclose(normalizer.transform(x), wanted, rtol=1e-6)
    series = np.stack([x, x + 1], axis=2)
    np.testing.assert_allclose(normalizer.transform(series)[:, :, 0], wanted, rtol=1e-6)
    np.testing.assert_array_equal(normalizer.transform_labels(x), x)
    fitted = b"\1" + nd4j(mean) + nd4j(std) + nd4j(mean) + nd4j(std)
    normalizer = import_normalizer(tmp_path, "STANDARDIZE", fitted)
    np.testing.assert_allclose(
        normalizer.revert_labels(normalizer.transform_labels(x)), x, atol=1e-6
    )


def test_multi_input_normalizers_are_imported_for_one_input(tmp_path: Path) -> None:
    """Normalizers for several inputs (MULTI_*) are imported if there is one input."""
    mean, std = draw_normal(3, 1, 3), np.array([[0.5, 2, 1]], np.float32)
    x = draw_normal(4, 6, 3)
    body = b"\1" + struct.pack(">2i", 1, 1) + nd4j(mean) + nd4j(std) + nd4j(mean + 1) + nd4j(std)
    normalizer = import_normalizer(tmp_path, "MULTI_STANDARDIZE", body)
    np.testing.assert_allclose(normalizer.transform(x), (x - mean) / std, rtol=1e-6)
    np.testing.assert_allclose(normalizer.transform_labels(x), (x - mean - 1) / std, rtol=1e-5)
    body = b"\0" + struct.pack(">2i2d", 1, -1, 0, 2) + nd4j(mean) + nd4j(mean + 4)
    normalizer = import_normalizer(tmp_path, "MULTI_MIN_MAX", body)
    np.testing.assert_allclose(normalizer.transform(x), (x - mean) / 2, rtol=1e-5, atol=1e-6)


def test_min_max_and_image_normalizers_match_formulas(tmp_path: Path) -> None:
    low, high = np.array([[0, -1, 2]], np.float32), np.array([[10, 1, 2]], np.float32)
    body = b"\1" + struct.pack(">2d", -1, 1) + nd4j(low) + nd4j(high) + nd4j(low) + nd4j(high)
    normalizer = import_normalizer(tmp_path, "MIN_MAX", body)
    x = np.array([[5, 0, 2], [10, 1, 2]], np.float32)
    np.testing.assert_allclose(normalizer.transform(x), [[0, 0, -1], [1, 1, -1]], atol=1e-6)
    np.testing.assert_allclose(normalizer.revert_labels(normalizer.transform_labels(x)), x)
    image = import_normalizer(tmp_path, "IMAGE_MIN_MAX", struct.pack(">3d", -1, 1, 255))
    pixels = np.array([[0, 127.5, 255]], np.float32)
    np.testing.assert_allclose(image.transform(pixels), [[-1, 0, 1]], atol=1e-6)


def test_unsupported_and_damaged_normalizers_are_refused(tmp_path: Path) -> None:
    two = b"\0" + struct.pack(">2i", 2, -1)
    with pytest.raises(NotImported, match=r"normalizer MULTI_STANDARDIZE.* has 2 inputs"):
        import_normalizer(tmp_path, "MULTI_STANDARDIZE", two)
    with pytest.raises(NotImported, match="normalizer MULTI_HYBRID"):
        import_normalizer(tmp_path, "MULTI_HYBRID", b"")
    with pytest.raises(NoDl4jNetwork, match=r"normalizer\.bin: 12 bytes of values announced"):
        import_normalizer(tmp_path, "STANDARDIZE", b"\0" + nd4j(draw_normal(3, 1, 3))[:-2])
    with pytest.raises(NoDl4jNetwork, match="3 and 2 statistics of the same features"):
        import_normalizer(
            tmp_path, "STANDARDIZE", b"\0" + nd4j(draw_normal(3, 1, 3)) + nd4j(draw_normal(3, 1, 2))
        )


@pytest.mark.parametrize("act", ["Softmax", "Sigmoid"])  # the built-in network, a TorchModel
@pytest.mark.parametrize("kind", ["STANDARDIZE", "MIN_MAX", "IMAGE_MIN_MAX", None])
def test_a_normalizer_is_saved_with_its_network(tmp_path: Path, act: str, kind: str | None) -> None:
    fitted = nd4j(draw_normal(3, 1, 3)) + nd4j(draw_normal(4, 1, 3) ** 2)
    bodies = {
        "STANDARDIZE": b"\1" + fitted * 2,
        "MIN_MAX": b"\0" + struct.pack(">2d", -1, 1) + fitted,
        "IMAGE_MIN_MAX": struct.pack(">3d", -1, 1, 255),
    }
    head = utf("NORMALIZER") + struct.pack(">i", 1)
    entry = {"normalizer_bin": head + utf(kind) + bodies[kind]} if kind else {}
    told = network(output(3, 4, act=act))
    model = from_dl4j(write(tmp_path / "n.zip", told, f(W), B, **entry))
    save_model(tmp_path / "m.npz", model.describe(), model.initial(), 1)
    again, _, _ = load_model(tmp_path / "m.npz")
    x = draw_normal(5, 4, 3)
    for other in (again, copy.deepcopy(again)):
        if kind is None:
            assert getattr(other, "normalizer", None) is None
        else:
            normalizer = other.normalizer  # type: ignore[attr-defined]
            np.testing.assert_array_equal(normalizer.transform(x), model.normalizer.transform(x))
            reverted = normalizer.revert_labels(x)
            np.testing.assert_array_equal(reverted, model.normalizer.revert_labels(x))


@pytest.mark.parametrize("shape", [(3, 1), (3, 2), (3,), (), (0, 4)])
def test_normalizer_refuses_rows_of_other_width(tmp_path: Path, shape: Any) -> None:
    """Arrays of another width are refused, also one column, which NumPy would broadcast."""
    fitted = nd4j(draw_normal(3, 1, 3)) + nd4j(draw_normal(4, 1, 3) ** 2)
    low = b"\1" + struct.pack(">2d", -1, 1) + fitted * 2
    for kind, body in (("STANDARDIZE", b"\1" + fitted * 2), ("MIN_MAX", low)):
        normalizer = import_normalizer(tmp_path, kind, body)
        for way in (normalizer.transform, normalizer.transform_labels, normalizer.revert_labels):
            with pytest.raises(UsageError, match=rf"for 3 features, .* {re.escape(str([*shape]))}"):
                way(np.ones(shape))
    with pytest.raises(UsageError, match="takes arrays of numbers"):
        normalizer.transform([[1, 2, 3], "abc"])


def test_normalizer_with_other_feature_count_is_refused(tmp_path: Path) -> None:
    """A normalizer with a different number of features than the network's is refused."""
    body = b"\0" + nd4j(draw_normal(3, 1, 7)) + nd4j(draw_normal(3, 1, 7))
    with pytest.raises(NoDl4jNetwork, match="has 7 features, outputlayer 'layer0' takes 3"):
        import_normalizer(tmp_path, "STANDARDIZE", body)


@pytest.mark.parametrize("path", ["nowhere.zip", None, 7])
def test_missing_file_raises_usage_error(path: Any) -> None:
    """A path that is not a file is a UsageError, but not a NoDl4jNetwork."""
    with pytest.raises(UsageError, match=f"^path={path!r}: ") as raised:
        from_dl4j(path)
    assert not isinstance(raised.value, NoDl4jNetwork)
