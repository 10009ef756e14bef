"""Tests of from_dl4j: outputs of networks that DL4J trained, and of each layer by its formulas.

The formulas are written again here from DL4J's Java, in NumPy and in loops, without the import's
code.
"""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.models import DenseNetwork, from_dl4j
from sparkstrom.models.dl4j import NotImported
from tests.conformance import dl4j_files as dl4j
from tests.conformance.dl4j_files import activation, draw_normal, f, layer, network, output, write

DATA = Path(__file__).parent / "data"
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def softmax(z: np.ndarray) -> np.ndarray:
    wide = np.exp(z - z.max(axis=1, keepdims=True))
    return wide / wide.sum(axis=1, keepdims=True)


def sigmoid(z: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-z))


@pytest.mark.parametrize("which", [0, 1])
def test_predictions_equal_outputs_stored_by_dl4j(which: int) -> None:
    """Predictions equal those that DL4J stored with its networks."""
    model = from_dl4j(DATA / f"dl4j-mlp{which}.zip")
    rows = np.loadtxt(DATA / f"dl4j-mlp{which}-input.csv", delimiter=",", dtype=np.float32)
    said = np.loadtxt(DATA / f"dl4j-mlp{which}-output.csv", delimiter=",", dtype=np.float32)
    np.testing.assert_allclose(model.predict(rows), said, atol=1e-5)
    assert isinstance(model, DenseNetwork) == (which == 0)  # normalization and dropout need torch
    assert model.normalizer is None
    twin = copy.deepcopy(model)
    np.testing.assert_array_equal(twin.initial(), model.initial())
    twin.bind(twin.initial())
    np.testing.assert_array_equal(twin.predict(rows), model.predict(rows))


def test_network_file_of_version_0_9_is_read(tmp_path: Path) -> None:
    """Layers and activations in wrapping objects, numeric dropout and HEAP buffers are read."""
    w, b, v, c = draw_normal(1, 3, 4), draw_normal(2, 4), draw_normal(3, 4, 2), draw_normal(4, 2)
    dense = {"nIn": 3, "nOut": 4, "activationFn": {"TanH": {}}, "dropOut": 0.5, "l1": 0.0}
    updater = {"updater": "NESTEROVS", "learningRate": 0.1, "momentum": 0.9, "l2": "NaN"}
    last = {"nIn": 4, "nOut": 2, "activationFn": {"Softmax": {}}, "lossFn": {"MCXENT": {}}}
    confs = [{"layer": {"dense": dense | updater}}, {"layer": {"output": last | updater}}]
    flat = np.concatenate([f(w), b, f(v), c])
    configuration = {"confs": confs, "inputPreProcessors": {}}
    path = write(tmp_path / "m.zip", configuration, coefficients_bin=dl4j.nd4j_of_0_9(flat))
    x = draw_normal(5, 6, 3)
    wanted = softmax(np.tanh(x @ w + b) @ v + c)
    np.testing.assert_allclose(from_dl4j(path).predict(x), wanted, **CLOSE)


@pytest.mark.parametrize(("kind", "tolerance"), [("DOUBLE", 1e-6), ("HALF", 2e-3)])
def test_double_and_half_parameters_are_read(tmp_path: Path, kind: str, tolerance: float) -> None:
    w, b, x = draw_normal(1, 3, 4), draw_normal(2, 4), draw_normal(5, 6, 3)
    flat = np.concatenate([f(w), b]).reshape(1, -1)
    path = write(tmp_path / "m.zip", network(output(3, 4)), coefficients_bin=dl4j.nd4j(flat, kind))
    np.testing.assert_allclose(from_dl4j(path).predict(x), softmax(x @ w + b), atol=tolerance)


def test_chain_graph_is_imported_and_dead_end_refused(tmp_path: Path) -> None:
    """A graph that is a chain is imported; a vertex that leads to no output is refused."""
    w, b, v, c = draw_normal(1, 3, 4), draw_normal(2, 4), draw_normal(3, 4, 2), draw_normal(4, 2)
    dense = layer("DenseLayer", act="ReLU", nin=3, nout=4)
    path = write(tmp_path / "g.zip", dl4j.graph(dense, output(4, 2)), f(w), b, f(v), c)
    x = draw_normal(5, 6, 3)
    wanted = softmax(np.maximum(x @ w + b, 0) @ v + c)
    np.testing.assert_allclose(from_dl4j(path).predict(x), wanted, **CLOSE)
    branch = dl4j.graph(dense, dense, output(4, 2), v1=["in"])
    with pytest.raises(NotImported, match="vertex 'v0' leads nowhere"):
        from_dl4j(write(tmp_path / "b.zip", branch, f(w), b, f(w), b, f(v), c))


# -- images ----------------------------------------------------------------------------------------


def convolve(
    x: np.ndarray, w: np.ndarray, b: np.ndarray, stride: Any, pads: Any, dilation: Any
) -> np.ndarray:
    """Return [rows, out, h, w], computed in loops; ``pads``: top, bottom, left, right."""
    top, bottom, left, right = pads
    x = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)))
    kh, kw = (w.shape[2] - 1) * dilation[0] + 1, (w.shape[3] - 1) * dilation[1] + 1
    high = (x.shape[2] - kh) // stride[0] + 1
    wide = (x.shape[3] - kw) // stride[1] + 1
    out = np.zeros((len(x), len(w), high, wide))
    for i, j in itertools.product(range(high), range(wide)):
        y, z = i * stride[0], j * stride[1]
        part = x[:, :, y : y + kh : dilation[0], z : z + kw : dilation[1]]
        out[:, :, i, j] = np.einsum("nchw,ochw->no", part, w) + b
    return out


@pytest.mark.parametrize(
    ("mode", "stride", "padding", "dilation", "pads"),
    [
        ("Truncate", [1, 1], [0, 0], [1, 1], (0, 0, 0, 0)),
        ("Truncate", [2, 1], [1, 2], [1, 1], (1, 1, 2, 2)),
        ("Strict", [1, 1], [0, 0], [2, 1], (0, 0, 0, 0)),
        ("Same", [1, 1], [0, 0], [1, 1], (1, 1, 0, 1)),
        ("Same", [2, 2], [0, 0], [1, 1], (1, 1, 0, 0)),
    ],
)
def test_convolution_matches_formula(
    tmp_path: Path, mode: str, stride: Any, padding: Any, dilation: Any, pads: Any
) -> None:
    """The file has biases, then weights row by row; mode Same pads less above and to the left."""
    w, b, x = draw_normal(1, 4, 2, 3, 2), draw_normal(2, 4), draw_normal(3, 5, 2, 7, 6)
    options = {"kernelSize": [3, 2], "stride": stride, "padding": padding, "dilation": dilation}
    conv = layer("ConvolutionLayer", nin=2, nout=4, convolutionMode=mode, act="TanH", **options)
    path = write(tmp_path / "c.zip", network(conv), b, w)
    wanted = np.tanh(convolve(x, w, b, stride, pads, dilation))
    np.testing.assert_allclose(from_dl4j(path, training=False).predict(x), wanted, **CLOSE)
    last = {**conv, "cnn2dDataFormat": "NHWC"}
    model = from_dl4j(write(tmp_path / "n.zip", network(last), b, w), training=False)
    found = model.predict(np.ascontiguousarray(x.transpose(0, 2, 3, 1)))
    np.testing.assert_allclose(found, wanted.transpose(0, 2, 3, 1), **CLOSE)


def compute_pooling(x: np.ndarray, kind: str, whole: bool, pads: int) -> np.ndarray:
    """Return the values of windows of 2 x 3 with stride 2 x 2, computed in loops."""
    rows, channels, high, wide = x.shape
    out_h, out_w = (high + 2 * pads - 2) // 2 + 1, (wide + 2 * pads - 3) // 2 + 1
    out = np.zeros((rows, channels, out_h, out_w))
    for i, j in itertools.product(range(out_h), range(out_w)):
        y, z = 2 * i - pads, 2 * j - pads
        part = x[:, :, max(y, 0) : min(y + 2, high), max(z, 0) : min(z + 3, wide)]
        if kind == "MAX":
            out[:, :, i, j] = part.max(axis=(2, 3))
        elif kind == "AVG":
            count = 6 if whole else part.shape[2] * part.shape[3]
            out[:, :, i, j] = part.sum(axis=(2, 3)) / count
        else:
            out[:, :, i, j] = (np.abs(part) ** 3).sum(axis=(2, 3)) ** (1 / 3)
    return out


@pytest.mark.parametrize("kind", ["MAX", "AVG", "PNORM"])
@pytest.mark.parametrize("whole", [True, False, None])
def test_subsampling_matches_formula(tmp_path: Path, kind: str, whole: bool | None) -> None:
    """An average is over the whole window if the file has no option for it (before 1.0.0-beta5)."""
    x = draw_normal(3, 5, 2, 7, 6) - 1
    options = {"kernelSize": [2, 3], "stride": [2, 2], "padding": [1, 1], "poolingType": kind}
    said = {} if whole is None else {"avgPoolIncludePadInDivisor": whole}
    conv = layer("ConvolutionLayer", nin=2, nout=2, kernelSize=[1, 1], stride=[1, 1])
    pool = layer("SubsamplingLayer", pnorm=3, convolutionMode="Truncate", **options, **said)
    w, b = np.eye(2, dtype=np.float32).reshape(2, 2, 1, 1), np.zeros(2, np.float32)
    path = write(tmp_path / "p.zip", network(conv, pool), b, w)
    wanted = compute_pooling(x, kind, whole is not False, 1)
    np.testing.assert_allclose(from_dl4j(path, training=False).predict(x), wanted, **CLOSE)


def test_small_lenet_on_flat_rows_matches_formula(tmp_path: Path) -> None:
    """Preprocessors, convolution, normalization, subsampling and a dense output work together."""
    w, b = draw_normal(1, 3, 1, 3, 3), draw_normal(2, 3)
    gamma, beta, mean, log_std = (
        draw_normal(3, 3),
        draw_normal(4, 3),
        draw_normal(5, 3),
        0.1 * draw_normal(6, 3),
    )
    v, c = draw_normal(7, 27, 4), draw_normal(8, 4)
    conv = layer("ConvolutionLayer", nin=1, nout=3, kernelSize=[3, 3], stride=[1, 1], act="ReLU")
    norm = layer("BatchNormalization", nout=3, eps=1e-3, act="Sigmoid", useLogStd=True)
    pool = layer("SubsamplingLayer", kernelSize=[2, 2], stride=[2, 2], poolingType="MAX")
    sizes = {"inputHeight": 8, "inputWidth": 8, "numChannels": 1}
    after = {"inputHeight": 3, "inputWidth": 3, "numChannels": 3, "format": "NCHW"}
    before = {
        0: {"kind": "FeedForwardToCnnPreProcessor", **sizes},
        3: {"kind": "CnnToFeedForwardPreProcessor", **after},
    }
    told = network(conv, norm, pool, output(27, 4), before=before)
    told["confs"][1]["variables"] = ["gamma", "beta", "mean", "log10stdev"]
    path = write(tmp_path / "l.zip", told, b, w, gamma, beta, mean, log_std, f(v), c)
    x = draw_normal(9, 5, 64)
    z = np.maximum(convolve(x.reshape(5, 1, 8, 8), w, b, (1, 1), (0,) * 4, (1, 1)), 0)
    std = np.sqrt((10.0**log_std) ** 2 + 1e-3)
    shaped = [a.reshape(1, 3, 1, 1) for a in (mean, std, gamma, beta)]
    z = (z - shaped[0]) / shaped[1] * shaped[2] + shaped[3]
    z = z.reshape(5, 3, 3, 2, 3, 2).max(axis=(3, 5)).reshape(5, 27)
    np.testing.assert_allclose(from_dl4j(path).predict(x), softmax(z @ v + c), **CLOSE)


def test_batch_norm_with_saved_variance_matches_formula(tmp_path: Path) -> None:
    gamma, beta, mean, var = (
        draw_normal(1, 3),
        draw_normal(2, 3),
        draw_normal(3, 3),
        np.abs(draw_normal(4, 3)) + 0.1,
    )
    told = network(layer("BatchNormalization", nout=3), output(3, 2))
    told["confs"][0]["variables"] = ["gamma", "beta", "mean", "var"]
    v, c, x = draw_normal(5, 3, 2), draw_normal(6, 2), draw_normal(7, 6, 3)
    path = write(tmp_path / "v.zip", told, gamma, beta, mean, var, f(v), c)
    z = (x - mean) / np.sqrt(var + 1e-5) * gamma + beta
    np.testing.assert_allclose(from_dl4j(path).predict(x), softmax(z @ v + c), **CLOSE)


@pytest.mark.parametrize("kind", ["MAX", "AVG", "SUM", "PNORM"])
def test_global_pooling_matches_formula(tmp_path: Path, kind: str) -> None:
    w, b, x = draw_normal(1, 3, 2, 2, 2), draw_normal(2, 3), draw_normal(3, 4, 2, 5, 5)
    conv = layer("ConvolutionLayer", nin=2, nout=3, kernelSize=[2, 2], stride=[1, 1])
    pool = layer("GlobalPoolingLayer", poolingType=kind, pnorm=2, collapseDimensions=True)
    z = convolve(x, w, b, (1, 1), (0,) * 4, (1, 1)).reshape(4, 3, -1)
    wanted = {"MAX": z.max(2), "AVG": z.mean(2), "SUM": z.sum(2), "PNORM": np.sqrt((z**2).sum(2))}
    path = write(tmp_path / "g.zip", network(conv, pool), b, w)
    found = from_dl4j(path, training=False).predict(x)
    np.testing.assert_allclose(found, wanted[kind], rtol=1e-5, atol=1e-5)


# -- sequences -------------------------------------------------------------------------------------


def lstm(x: np.ndarray, w: np.ndarray, rw: np.ndarray, b: np.ndarray, gate: Any) -> np.ndarray:
    """LSTMHelpers.activateHelper, step by step: gates in the order i (tanh), f, o, g (sigmoid)."""
    width = len(rw)
    hidden, cell = np.zeros((len(x), width)), np.zeros((len(x), width))
    out = np.zeros((len(x), width, x.shape[2]))
    peeps = rw[:, 4 * width :].T if rw.shape[1] > 4 * width else np.zeros((3, width))
    for t in range(x.shape[2]):
        z = x[:, :, t] @ w + hidden @ rw[:, : 4 * width] + b
        i, fg, o, g = (z[:, k * width : (k + 1) * width] for k in range(4))
        i = np.tanh(i)
        fg = gate(fg + cell * peeps[0])
        g = gate(g + cell * peeps[2])
        cell = fg * cell + g * i
        o = gate(o + cell * peeps[1])
        hidden = o * np.tanh(cell)
        out[:, :, t] = hidden
    return out


@pytest.mark.parametrize("peepholes", [0, 3])
@pytest.mark.parametrize("gate", ["Sigmoid", "HardSigmoid"])
def test_lstm_with_output_at_each_step_matches_formula(
    tmp_path: Path, peepholes: int, gate: str
) -> None:
    w, rw, b = draw_normal(1, 3, 16), draw_normal(2, 4, 16 + peepholes), draw_normal(3, 16)
    v, c, x = draw_normal(4, 4, 2), draw_normal(5, 2), draw_normal(6, 5, 3, 7)
    kind, gated = "GravesLSTM" if peepholes else "LSTM", activation(gate)
    first = layer(kind, nin=3, nout=4, act="TanH", gateActivationFn=gated, forgetGateBiasInit=1.0)
    told = network(first, output(4, 2, kind="RnnOutputLayer"))
    path = write(tmp_path / "r.zip", told, f(w), f(rw), b, f(v), c)
    function = sigmoid if gate == "Sigmoid" else lambda z: np.clip(0.2 * z + 0.5, 0, 1)
    z = np.einsum("nht,ho->not", lstm(x, w, rw, b, function), v) + c.reshape(1, 2, 1)
    np.testing.assert_allclose(from_dl4j(path).predict(x), softmax(z), rtol=1e-4, atol=1e-5)


def test_last_time_step_of_embedded_words_matches_formula(tmp_path: Path) -> None:
    table, w, rw, b = (
        draw_normal(1, 11, 3),
        draw_normal(2, 3, 16),
        draw_normal(3, 4, 16),
        draw_normal(4, 16),
    )
    v, c = draw_normal(5, 4, 2), draw_normal(6, 2)
    words = np.random.default_rng(7).integers(0, 11, (5, 6)).astype(np.float32)
    wrapped = {
        "@class": "org.deeplearning4j.nn.conf.layers.recurrent.LastTimeStep",
        "underlying": layer("LSTM", nin=3, nout=4, act="TanH"),
    }
    first = layer("EmbeddingSequenceLayer", nin=11, nout=3, hasBias=False, inputLength=6)
    told = network(first, wrapped, output(4, 2))
    path = write(tmp_path / "w.zip", told, f(table), f(w), f(rw), b, f(v), c)
    x = table[words.astype(int)].transpose(0, 2, 1)
    wanted = softmax(lstm(x, w, rw, b, sigmoid)[:, :, -1] @ v + c)
    np.testing.assert_allclose(from_dl4j(path).predict(words), wanted, rtol=1e-4, atol=1e-5)


def test_embedding_of_single_index_matches_formula(tmp_path: Path) -> None:
    table, bias, v, c = (
        draw_normal(1, 5, 3),
        draw_normal(2, 3),
        draw_normal(3, 3, 2),
        draw_normal(4, 2),
    )
    told = network(layer("EmbeddingLayer", nin=5, nout=3, hasBias=True, act="TanH"), output(3, 2))
    path = write(tmp_path / "e.zip", told, f(table), bias, f(v), c)
    rows = np.array([[0], [4], [2]], np.float32)
    wanted = softmax(np.tanh(table[[0, 4, 2]] + bias) @ v + c)
    np.testing.assert_allclose(from_dl4j(path).predict(rows), wanted, **CLOSE)


@pytest.mark.parametrize(
    ("bad", "said"), [(-1, "-1 in row 1"), (5, "5 in row 1"), (np.nan, "nan in row 1")]
)
def test_embedding_index_outside_table_is_refused(tmp_path: Path, bad: float, said: str) -> None:
    """An index outside the table is refused, as in DL4J; torch would take the last row for -1."""
    for kind, end in (("EmbeddingLayer", output(3, 2)), ("EmbeddingSequenceLayer", None)):
        embedding = layer(kind, nin=5, nout=3, hasBias=False)
        told = network(embedding, end or output(3, 2, kind="RnnOutputLayer"))
        path = write(
            tmp_path / "e.zip",
            told,
            f(draw_normal(1, 5, 3)),
            f(draw_normal(3, 3, 2)),
            draw_normal(4, 2),
        )
        rows = np.array([[0], [bad], [2]], np.float32)
        wanted = rf"{kind.lower()} 'layer0': index {said} of a minibatch: must be 0 to 4"
        with pytest.raises(UsageError, match=wanted):
            from_dl4j(path).predict(rows)


@pytest.mark.parametrize("act", ["Softmax", "Sigmoid"])  # the built-in network, a TorchModel
def test_predict_refuses_rows_of_wrong_shape_or_type(tmp_path: Path, act: str) -> None:
    path = write(
        tmp_path / "w.zip",
        network(output(3, 2, act=act)),
        f(draw_normal(1, 3, 2)),
        draw_normal(2, 2),
    )
    model = from_dl4j(path)
    for features in (
        np.ones((2, 4), np.float32),
        np.ones(4, np.float32),
        "abc",
        np.array(["a"]),
        np.array(1.0),
    ):
        with pytest.raises(UsageError):
            model.predict(features)
    assert model.predict(np.zeros((0, 3), np.float32)).shape == (0, 2)


def test_dense_layer_is_applied_to_each_step_of_sequence(tmp_path: Path) -> None:
    """Preprocessors turn each step of a sequence into a row for a dense layer, and rows back."""
    w, b, v, c, x = (
        draw_normal(1, 3, 4),
        draw_normal(2, 4),
        draw_normal(3, 4, 2),
        draw_normal(4, 2),
        draw_normal(5, 6, 3, 5),
    )
    before = {
        0: {"kind": "RnnToFeedForwardPreProcessor"},
        1: {"kind": "FeedForwardToRnnPreProcessor"},
    }
    dense = layer("DenseLayer", act="ELU", nin=3, nout=4)
    told = network(dense, output(4, 2, kind="RnnOutputLayer"), before=before)
    path = write(tmp_path / "f.zip", told, f(w), b, f(v), c)
    z = np.einsum("nit,io->not", x, w) + b.reshape(1, 4, 1)
    z = np.einsum("nht,ho->not", np.where(z > 0, z, np.expm1(z)), v) + c.reshape(1, 2, 1)
    np.testing.assert_allclose(from_dl4j(path).predict(x), softmax(z), **CLOSE)


def test_rnn_to_cnn_preprocessor_takes_each_step_as_image(tmp_path: Path) -> None:
    """RnnToCnn takes each step of [rows, channels * height * width, steps] as an image."""
    size = {"inputHeight": 2, "inputWidth": 3, "numChannels": 2}
    before = {0: {"kind": "RnnToCnnPreProcessor", **size},
              1: {"kind": "CnnToRnnPreProcessor", **size, "numChannels": 1,
                  "rnnDataFormat": "NCW"}}  # fmt: skip
    convolution = layer("ConvolutionLayer", nin=2, nout=1, kernelSize=[1, 1], stride=[1, 1])
    told = network(convolution, output(6, 2, kind="RnnOutputLayer"), before=before)
    w, b, v, c, x = (
        draw_normal(1, 2),
        draw_normal(2, 1),
        draw_normal(3, 6, 2),
        draw_normal(4, 2),
        draw_normal(5, 4, 12, 5),
    )
    path = write(tmp_path / "v.zip", told, b, w, f(v), c)
    images = np.einsum("rchwt,c->rhwt", x.reshape(4, 2, 2, 3, 5), w) + b
    z = np.einsum("rit,io->rot", images.reshape(4, 6, 5), v) + c.reshape(1, 2, 1)
    np.testing.assert_allclose(from_dl4j(path).predict(x), softmax(z), **CLOSE)


# -- activations, and layers that are not supported ------------------------------------------------

FORMULAS = {
    "Cube": lambda z: z**3,
    "ELU": lambda z: np.where(z > 0, z, np.expm1(z)),
    "GELU": lambda z: z * sigmoid(1.702 * z),
    "HardSigmoid": lambda z: np.clip(0.2 * z + 0.5, 0, 1),
    "HardTanH": lambda z: np.clip(z, -1, 1),
    "LReLU": lambda z: np.where(z > 0, z, 0.01 * z),
    "Mish": lambda z: z * np.tanh(np.log1p(np.exp(z))),
    "RectifiedTanh": lambda z: np.maximum(np.tanh(z), 0),
    "ReLU6": lambda z: np.clip(z, 0, 6),
    "SELU": lambda z: 1.0507009873554805 * np.where(z > 0, z, 1.6732632423543772 * np.expm1(z)),
    "SoftPlus": lambda z: np.log1p(np.exp(z)),
    "SoftSign": lambda z: z / (1 + np.abs(z)),
    "Swish": lambda z: z * sigmoid(z),
    "ThresholdedReLU": lambda z: np.where(z > 1, z, 0),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_activations_match_formulas(tmp_path: Path, name: str) -> None:
    """An activation layer applies its formula, here after a layer with gains and without a bias."""
    w, gain, x = draw_normal(1, 3, 4), draw_normal(2, 4), draw_normal(3, 6, 3)
    dense = layer("DenseLayer", nin=3, nout=4, hasBias=False, hasLayerNorm=True)
    drop = {"@class": "org.deeplearning4j.nn.conf.dropout.Dropout", "p": 0.5}
    told = network(dense, layer("DropoutLayer", idropout=drop), layer("ActivationLayer", act=name))
    path = write(tmp_path / "a.zip", told, f(w), gain)
    z = x @ w
    z = (z - z.mean(1, keepdims=True)) / z.std(1, keepdims=True) * gain
    found = from_dl4j(path, training=False).predict(x)
    np.testing.assert_allclose(found, FORMULAS[name](z), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (network(layer("VariationalAutoencoder", nin=3, nout=2)), "variationalautoencoder"),
        (network(layer("CnnLossLayer", format="NHWC")), "format NHWC"),
        (network({"@class": "x.recurrent.Bidirectional", "layerName": "bi"}), "bidirectional 'bi'"),
        (network(layer("DenseLayer", act="Maxout", nin=3, nout=2)), "activation maxout"),
        (network(layer("LSTM", nin=3, nout=2, rnnDataFormat="NWC")), "the format NWC"),
        (network(output(3, 2, kind="RnnOutputLayer", rnnDataFormat="NWC")), "the format NWC"),
        (network(output(3, 2), output(2, 2)), "it has a loss and is not the last layer"),
        (
            network(output(3, 2), before={0: {"kind": "Cnn3DToFeedForwardPreProcessor"}}),
            "cnn3dtofeedforwardpreprocessor 'before layer0'",
        ),
        (
            network(output(3, 2), before={0: {"kind": "RnnToFeedForwardPreProcessor"}}),
            "it turns each step of a sequence into a row",
        ),
    ],
)
def test_error_names_unsupported_layer_or_option_and_file(
    tmp_path: Path, told: Any, said: str
) -> None:
    """The error names the unsupported layer or option, and the file."""
    from sparkstrom.models.dl4j.configuration import parse_network
    from sparkstrom.models.dl4j.parameters import count_parameters

    try:
        count = count_parameters(parse_network("x", told))
    except NotImported:
        count = 1
    path = write(tmp_path / "u.zip", told, np.zeros(count))
    with pytest.raises(NotImported) as refused:
        from_dl4j(path)
    assert said in str(refused.value)
    assert str(path) in str(refused.value)
