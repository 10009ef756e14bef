"""Tests of from_dl4j with more layers, by formulas written again in loops from DL4J's Java.

Parameters are cut as DL4J's ParamInitializers cut them. These tests were also compared with DL4J's
own regression files, which we may not redistribute: see the commit.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkstrom.models import from_dl4j
from sparkstrom.models.base import Batch
from sparkstrom.models.dl4j import NotImported
from sparkstrom.models.dl4j.files import ArrayReader
from tests.conformance import dl4j_files as dl4j
from tests.conformance.dl4j_files import (
    CLOSE,
    SEQUENCE,
    activation,
    draw_normal,
    f,
    layer,
    network,
    output,
    predict_imported,
    softmax,
    write,
)

IMAGE = draw_normal(91, 2, 3, 5, 6)  # [rows, channels, height, width]


# -- sequences -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "stride", "dilation", "before", "behind"),
    [
        ("Truncate", 1, 1, 0, 0),
        ("Truncate", 2, 1, 1, 1),
        ("Same", 1, 1, 1, 1),
        ("Same", 2, 1, 1, 1),
        ("Causal", 1, 2, 4, 0),
    ],
)
def test_convolution_1d_matches_formula(
    tmp_path: Path, mode: str, stride: int, dilation: int, before: int, behind: int
) -> None:
    """Convolution1DLayer's parameters are the biases, then kernels [out, in, size, 1]."""
    w, b = draw_normal(1, 4, 2, 3, 1), draw_normal(2, 4)
    pad = 1 if mode == "Truncate" and before else 0
    options = {"kernelSize": [3, 1], "stride": [stride, 1], "dilation": [dilation, 1]}
    conv = layer("Convolution1DLayer", nin=2, nout=4, convolutionMode=mode, **options)
    conv["padding"] = [pad, 0]
    x = np.pad(SEQUENCE, ((0, 0), (0, 0), (before, behind)))
    wide = 2 * dilation + 1
    starts = range(0, x.shape[2] - wide + 1, stride)
    parts = [x[:, :, at : at + wide : dilation] for at in starts]
    wanted = np.stack([np.einsum("nct,oct->no", p, w[..., 0]) + b for p in parts], axis=2)
    np.testing.assert_allclose(
        predict_imported(tmp_path, network(conv), SEQUENCE, b, w), wanted, **CLOSE
    )


@pytest.mark.parametrize("mode", ["Truncate", "Causal"])
def test_convolution_1d_kernels_of_m1_and_later_match_formula(tmp_path: Path, mode: str) -> None:
    """Kernels are ``W.reshape('c', k, nIn, nOut)`` in files written since DL4J's f9aebec79e."""
    w, b = draw_normal(1, 3, 2, 4), draw_normal(2, 4)  # [k, nIn, nOut]
    options = {"kernelSize": [3, 1], "stride": [1, 1], "padding": [0, 0], "dilation": [1, 1]}
    conv = layer("Convolution1DLayer", nin=2, nout=4, rnnDataFormat="NCW", **options)
    conv["convolutionMode"] = mode
    x = np.pad(SEQUENCE, ((0, 0), (0, 0), (2 if mode == "Causal" else 0, 0)))
    parts = [x[:, :, at : at + 3] for at in range(x.shape[2] - 2)]
    wanted = np.stack([np.einsum("nct,tco->no", p, w) + b for p in parts], axis=2)
    np.testing.assert_allclose(
        predict_imported(tmp_path, network(conv), SEQUENCE, b, w), wanted, **CLOSE
    )


def test_updater_state_of_convolution_1d_is_transposed_like_kernels(tmp_path: Path) -> None:
    """The velocity of Convolution1DLayer's kernels is transposed like the kernels themselves."""
    sgd = {"@class": dl4j.CONFIG + "Nesterovs", "learningRate": 0.1, "momentum": 0.9}
    options = {"kernelSize": [3], "stride": [1], "padding": [0], "iupdater": sgd}
    conv = layer("Convolution1DLayer", nin=2, nout=4, rnnDataFormat="NCW", **options)
    told = network(conv, layer("RnnLossLayer", lossFn={"@class": "x.LossL2"}))
    w, b, velocity = draw_normal(1, 3, 2, 4), draw_normal(2, 4), draw_normal(3, 3, 2, 4)
    state = dl4j.nd4j(np.concatenate([np.zeros(4), velocity.ravel()]).reshape(1, -1))
    model = from_dl4j(write(tmp_path / "u.zip", told, b, w, updaterState_bin=state))
    kept = model.continuing_state()
    found = [v for k, v in kept.items() if k.endswith("/velocity") and np.size(v) == 24]
    np.testing.assert_array_equal(found[0].reshape(4, 2, 3), velocity.transpose(2, 1, 0))


def test_sequence_cropping_padding_pooling_and_repeating_match_formulas(tmp_path: Path) -> None:
    conv = layer("Convolution1D", nin=2, nout=2, kernelSize=[1], stride=[1], padding=[0])
    w, b = np.eye(2, dtype=np.float32).reshape(2, 2, 1, 1), np.zeros(2, np.float32)
    crop = layer("convolutional.Cropping1D", cropping=[2, 1])
    pad = layer("ZeroPadding1DLayer", padding=[1, 2])
    up = layer("Upsampling1D", size=[2])
    pool = layer("Subsampling1DLayer", poolingType="MAX", kernelSize=[3, 1], stride=[2, 2])
    x = np.pad(SEQUENCE[:, :, 2:-1], ((0, 0), (0, 0), (1, 2))).repeat(2, axis=2)
    wanted = np.stack([x[:, :, at : at + 3].max(2) for at in range(0, 12, 2)], axis=2)
    told = network(conv, crop, pad, up, pool)
    np.testing.assert_allclose(predict_imported(tmp_path, told, SEQUENCE, b, w), wanted, **CLOSE)
    dense, v, c = layer("DenseLayer", nin=2, nout=3), draw_normal(1, 2, 3), draw_normal(2, 3)
    told = network(dense, layer("misc.RepeatVector", n=4))
    rows = SEQUENCE[:, :, 0]
    found = predict_imported(tmp_path, told, rows, f(v), c)
    np.testing.assert_allclose(found, np.stack([rows @ v + c] * 4, axis=2), **CLOSE)


def run_simple_rnn(x: np.ndarray, w: np.ndarray, rw: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the outputs of a SimpleRnn layer without layer normalization."""
    hidden, out = np.zeros((len(x), len(rw))), []
    for t in range(x.shape[2]):
        hidden = np.tanh(x[:, :, t] @ w + b + hidden @ rw)
        out.append(hidden)
    return np.stack(out, axis=2)


def draw_rnn_weights(*shape: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return random input weights, recurrent weights and biases."""
    n_in, n_out = shape
    return (
        draw_normal(seed, n_in, n_out),
        draw_normal(seed + 1, n_out, n_out),
        draw_normal(seed + 2, n_out),
    )


def test_simple_rnn_matches_formula(tmp_path: Path) -> None:
    w, rw, b = draw_rnn_weights(2, 4)
    told = network(layer("recurrent.SimpleRnn", nin=2, nout=4, act="TanH"))
    found = predict_imported(tmp_path, told, SEQUENCE, f(w), f(rw), b)
    np.testing.assert_allclose(found, run_simple_rnn(SEQUENCE, w, rw, b), **CLOSE)


def test_simple_rnn_with_layer_norm_matches_formula(tmp_path: Path) -> None:
    """The gains are the input's, then the recurrent part's, which the first step does not have."""
    (w, rw, b), gain = draw_rnn_weights(2, 4), draw_normal(4, 8)
    told = network(layer("recurrent.SimpleRnn", nin=2, nout=4, act="TanH", hasLayerNorm=True))
    hidden, wanted = None, []
    for t in range(7):
        z = normalize_rows(SEQUENCE[:, :, t] @ w) * gain[:4] + b
        z = z if hidden is None else z + normalize_rows(hidden @ rw) * gain[4:]
        hidden = np.tanh(z)
        wanted.append(hidden)
    found = predict_imported(tmp_path, told, SEQUENCE, f(w), f(rw), b, gain)
    np.testing.assert_allclose(found, np.stack(wanted, axis=2), **CLOSE)


def normalize_rows(z: np.ndarray) -> np.ndarray:
    return (z - z.mean(1, keepdims=True)) / z.std(1, keepdims=True)


BOTH = {
    "ADD": lambda a, b: a + b,
    "MUL": lambda a, b: a * b,
    "AVERAGE": lambda a, b: (a + b) / 2,
    "CONCAT": lambda a, b: np.concatenate((a, b), axis=1),
}


@pytest.mark.parametrize("mode", BOTH)
def test_bidirectional_layer_joins_both_directions(tmp_path: Path, mode: str) -> None:
    """Parameters are the forward layer's, then the backward one's, which reads steps in reverse."""
    one, other = draw_rnn_weights(2, 4, seed=1), draw_rnn_weights(2, 4, seed=5)
    inner = layer("recurrent.SimpleRnn", nin=2, nout=4, act="TanH")
    told = network(layer("recurrent.Bidirectional", fwd=inner, bwd=inner, mode=mode))
    arrays = [part for w, rw, b in (one, other) for part in (f(w), f(rw), b)]
    back = run_simple_rnn(SEQUENCE[:, :, ::-1], *other)[:, :, ::-1]
    wanted = BOTH[mode](run_simple_rnn(SEQUENCE, *one), back)
    np.testing.assert_allclose(predict_imported(tmp_path, told, SEQUENCE, *arrays), wanted, **CLOSE)


def test_bidirectional_layer_continues_from_updater_state(tmp_path: Path) -> None:
    """Both directions continue with the saved state, and train by the forward layer's options."""
    inner = layer("LSTM", nin=2, nout=1, act="TanH")
    both = layer("recurrent.Bidirectional", fwd=inner, bwd=inner, mode="CONCAT", iupdater=None)
    told = network(both, output(2, 3, kind="RnnOutputLayer"))
    count = 2 * (8 + 4 + 4) + 6 + 3
    state = np.arange(2 * count, dtype=np.float32)
    path = write(tmp_path / "s.zip", told, draw_normal(1, count), updaterState_bin=dl4j.nd4j(state))
    model = from_dl4j(path)
    found = model.continuing_state()
    key = "state/layers.0_layer0.{}.bias/{}"
    np.testing.assert_array_equal(found[key.format("forwards", "mean")], np.arange(12, 16))
    back = found[key.format("backwards", "square")]
    np.testing.assert_array_equal(back, np.arange(count + 28, count + 32))
    model.bind(model.initial())
    before = model.module.layers["0_layer0"].backwards.weight.detach().clone()
    model.step(Batch(SEQUENCE, np.zeros((3, 7), np.int64)))
    assert not np.array_equal(before, model.module.layers["0_layer0"].backwards.weight.detach())


def test_graves_bidirectional_lstm_is_sum_of_both_directions(tmp_path: Path) -> None:
    one = draw_normal(1, 2 * 16), draw_normal(2, 4 * 19), draw_normal(3, 16)
    other = draw_normal(4, 2 * 16), draw_normal(5, 4 * 19), draw_normal(6, 16)
    options = {"nin": 2, "nout": 4, "act": "TanH"}
    both = network(layer("GravesBidirectionalLSTM", **options))
    ahead = predict_imported(tmp_path, network(layer("GravesLSTM", **options)), SEQUENCE, *one)
    turned = np.ascontiguousarray(SEQUENCE[:, :, ::-1])
    back = predict_imported(tmp_path, network(layer("GravesLSTM", **options)), turned, *other)
    found = predict_imported(tmp_path, both, SEQUENCE, *one, *other)
    np.testing.assert_allclose(found, ahead + back[:, :, ::-1], **CLOSE)


# -- images ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [False, True])
def test_depthwise_and_separable_convolutions_match_formulas(tmp_path: Path, last: bool) -> None:
    """Depthwise kernels are [h, w, channels, times], separable ones [times, channels, h, w]."""
    depth, b = draw_normal(1, 2, 2, 3, 2), draw_normal(2, 6)
    high, wide = 4, 5
    planes = np.zeros((2, 6, high, wide))
    for c, m, y, x in itertools.product(range(3), range(2), range(high), range(wide)):
        part = IMAGE[:, c, y : y + 2, x : x + 2]
        planes[:, 2 * c + m, y, x] = (part * depth[:, :, c, m]).sum(axis=(1, 2))
    options = {"kernelSize": [2, 2], "stride": [1, 1], "padding": [0, 0], "depthMultiplier": 2}
    options["cnn2dDataFormat"] = "NHWC" if last else "NCHW"
    told = network(layer("DepthwiseConvolution2D", nin=3, nout=6, act="TanH", **options))
    x = np.ascontiguousarray(IMAGE.transpose(0, 2, 3, 1)) if last else IMAGE
    found = predict_imported(tmp_path, told, x, b, depth)
    found = found.transpose(0, 3, 1, 2) if last else found
    np.testing.assert_allclose(found, np.tanh(planes + b.reshape(1, 6, 1, 1)), **CLOSE)
    point, bias = draw_normal(3, 4, 6), draw_normal(4, 4)
    told = network(layer("SeparableConvolution2D", nin=3, nout=4, act="TanH", **options))
    found = predict_imported(tmp_path, told, x, bias, depth.transpose(3, 2, 0, 1), point)
    found = found.transpose(0, 3, 1, 2) if last else found
    mixed = np.einsum("nchw,oc->nohw", planes, point) + bias.reshape(1, 4, 1, 1)
    np.testing.assert_allclose(found, np.tanh(mixed), **CLOSE)


@pytest.mark.parametrize(
    ("mode", "stride", "padding", "cut"),
    [("Truncate", 2, 1, (1, 1)), ("Truncate", 1, 0, (0, 0)), ("Same", 2, 0, (0, 1))],
)
def test_deconvolution_matches_formula(
    tmp_path: Path, mode: str, stride: int, padding: int, cut: Any
) -> None:
    """Each value adds its kernel, [inputs, outputs, h, w], to the output; borders are cut off."""
    w, b = draw_normal(1, 3, 2, 3, 3), draw_normal(2, 2)
    high, wide = 4 * stride + 3, 5 * stride + 3
    out = np.zeros((2, 2, high, wide))
    for y, x in itertools.product(range(5), range(6)):
        part = np.einsum("nc,cohw->nohw", IMAGE[:, :, y, x], w)
        out[:, :, y * stride : y * stride + 3, x * stride : x * stride + 3] += part
    out = out[:, :, cut[0] : high - cut[1], cut[0] : wide - cut[1]] + b.reshape(1, 2, 1, 1)
    options = {"kernelSize": [3, 3], "stride": [stride] * 2, "padding": [padding] * 2}
    told = network(layer("Deconvolution2D", nin=3, nout=2, convolutionMode=mode, **options))
    np.testing.assert_allclose(predict_imported(tmp_path, told, IMAGE, b, w), out, **CLOSE)


def test_image_padding_cropping_upsampling_and_norm_match_formulas(tmp_path: Path) -> None:
    slopes = draw_normal(1, 3, 1, 12)
    told = network(
        layer("PReLULayer", inputShape=[3, 8, 12], sharedAxes=[2]),
        layer("LocalResponseNormalization", n=3.0, k=2.0, alpha=0.1, beta=0.75),
        before={0: {"kind": "ComposableInputPreProcessor", "inputPreProcessors": []}},
    )
    told["confs"] = [
        {"layer": layer("ZeroPaddingLayer", padding=[1, 0, 2, 1])},
        {"layer": layer("convolutional.Cropping2D", cropping=[0, 2, 1, 2])},
        {"layer": layer("Upsampling2D", size=[2, 2])},
        *told["confs"],
    ]
    x = np.pad(IMAGE, ((0, 0), (0, 0), (1, 0), (2, 1)))[:, :, :-2, 1:-2]
    x = x.repeat(2, axis=2).repeat(2, axis=3)
    x = np.where(x < 0, x * slopes, x)
    squares = np.pad(x**2, ((0, 0), (1, 1), (0, 0), (0, 0)))
    around = squares[:, :-2] + squares[:, 1:-1] + squares[:, 2:]
    wanted = x / (2 + 0.1 * around) ** 0.75
    np.testing.assert_allclose(predict_imported(tmp_path, told, IMAGE, f(slopes)), wanted, **CLOSE)


def test_cnn_loss_sums_over_pixels(tmp_path: Path) -> None:
    """A row's score in CnnLossLayer is the sum over its pixels."""
    w, b = draw_normal(1, 4, 3, 1, 1), draw_normal(2, 4)
    conv = layer("ConvolutionLayer", nin=3, nout=4, kernelSize=[1, 1], stride=[1, 1])
    loss = {"@class": "org.nd4j.linalg.lossfunctions.impl.LossMCXENT"}
    told = network(conv, layer("CnnLossLayer", act="Softmax", lossFn=loss))
    model = from_dl4j(write(tmp_path / "c.zip", told, b, w))
    p = softmax(np.einsum("nchw,oc->nohw", IMAGE, w[:, :, 0, 0]) + b.reshape(1, 4, 1, 1))
    np.testing.assert_allclose(model.predict(IMAGE), p, **CLOSE)
    labels = np.random.default_rng(3).integers(0, 4, (2, 5, 6))
    total, weight = model.loss(Batch(IMAGE, labels))
    picked = np.take_along_axis(p, labels[:, None], axis=1)
    np.testing.assert_allclose(total / weight, -np.log(picked).sum() / 2, rtol=1e-4)


# -- arrays and activations ------------------------------------------------------------------------


def test_array_reader_follows_strides_not_order(tmp_path: Path) -> None:
    """Strides count, not the order: DL4J's recurrent outputs have order c and other strides."""
    values = draw_normal(1, 3, 4, 5)
    content = dl4j.nd4j(values.transpose(1, 2, 0))
    info = [3, 3, 4, 5, 1, 15, 3, 8192, 0, ord("c")]
    head = len(dl4j.utf("MIXED_DATA_TYPES")) + 8 + len(dl4j.utf("LONG"))
    content = content[:head] + np.array(info, ">i8").tobytes() + content[head + 80 :]
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    with path.open("rb") as stream:
        np.testing.assert_array_equal(ArrayReader(stream, len(content)).read_array(), values)


def test_rrelu_uses_mean_slope_as_threshold(tmp_path: Path) -> None:
    """RReLU is the maximum of value and mean slope: ND4J passes the slope as a threshold."""
    w, b, x = draw_normal(1, 3, 4), draw_normal(2, 4), draw_normal(3, 6, 3)
    act = activation("RReLU", l=0.125, u=0.375)
    told = network(layer("DenseLayer", act=act, nin=3, nout=4))
    found = predict_imported(tmp_path, told, x, f(w), b)
    np.testing.assert_allclose(found, np.maximum(x @ w + b, 0.25), **CLOSE)


def test_rejects_softmax_over_other_dimension(tmp_path: Path) -> None:
    """A softmax over a dimension that depends on the version of DL4J is refused."""
    told = network(layer("LSTM", nin=2, nout=4), layer("ActivationLayer", act="Softmax"))
    with pytest.raises(NotImported, match="its softmax is over a dimension"):
        predict_imported(tmp_path, told, SEQUENCE, np.zeros(112))
