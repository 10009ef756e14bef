"""Helpers of tests: write files byte by byte as DL4J does (layers, networks, updaters' states)."""

from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from sparkstrom.models import from_dl4j

ACTIVATIONS = "org.nd4j.linalg.activations.impl.Activation"
LAYERS = "org.deeplearning4j.nn.conf.layers."
PREPROCESSORS = "org.deeplearning4j.nn.conf.preprocessor."
CONFIG = "org.nd4j.linalg.learning.config."  # of updaters
ADAM = {
    "@class": CONFIG + "Adam",
    "learningRate": 0.01,
    "beta1": 0.9,
    "beta2": 0.999,
    "epsilon": 1e-8,
}
KINDS = {"FLOAT": ">f4", "DOUBLE": ">f8", "HALF": ">f2"}


def utf(text: str) -> bytes:
    """Return a string as Java's DataOutputStream.writeUTF encodes it."""
    return struct.pack(">H", len(text)) + text.encode()


def nd4j(values: np.ndarray, kind: str = "FLOAT", order: str = "c") -> bytes:
    """Return an array in the format of ``Nd4j.write`` 1.0.0: shape information, then values."""
    shape = values.shape
    strides = [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
    info = [len(shape), *shape, *strides, 8192, 1, ord(order)]
    head = utf("MIXED_DATA_TYPES") + struct.pack(">q", len(info)) + utf("LONG")
    head += np.array(info, ">i8").tobytes()
    body = utf("MIXED_DATA_TYPES") + struct.pack(">q", values.size) + utf(kind)
    return head + body + np.ravel(values, order.upper()).astype(KINDS[kind]).tobytes()


def nd4j_of_0_9(values: np.ndarray) -> bytes:
    """Return a row vector in the format of 0.9.1: int32 shape information, four-byte lengths."""
    info = [2, 1, values.size, 1, 1, 0, 1, ord("c")]
    head = utf("HEAP") + struct.pack(">i", len(info)) + utf("INT")
    head += np.array(info, ">i4").tobytes()
    body = utf("HEAP") + struct.pack(">i", values.size) + utf("FLOAT")
    return head + body + values.astype(">f4").tobytes()


def activation(name: str, **options: Any) -> dict[str, Any]:
    return {"@class": ACTIVATIONS + name, **options}


def layer(kind: str, *, act: Any = "Identity", **options: Any) -> dict[str, Any]:
    """Return a layer's JSON as 1.0.0-M2 writes it."""
    act = activation(act) if isinstance(act, str) else act
    common = {"activationFn": act, "iupdater": ADAM, "biasUpdater": None, "idropout": None}
    return {"@class": LAYERS + kind, **common, "regularization": [], **options}


def output(n_in: int, n_out: int, **options: Any) -> dict[str, Any]:
    """Return an output layer's JSON, by default softmax with MCXENT."""
    loss = {"@class": "org.nd4j.linalg.lossfunctions.impl.LossMCXENT", "softmaxClipEps": 1e-10}
    options = {"act": "Softmax", "lossFn": loss, **options}
    return layer(options.pop("kind", "OutputLayer"), nin=n_in, nout=n_out, **options)


def network(*layers: dict[str, Any], before: dict[int, Any] | None = None, **top: Any) -> Any:
    """Return a MultiLayerConfiguration; ``before``: preprocessors by layer number."""
    confs = [{"layer": one, "miniBatch": True} for one in layers]
    before = before or {}
    named = {str(i): {"@class": PREPROCESSORS + b.pop("kind"), **b} for i, b in before.items()}
    return {"confs": confs, "inputPreProcessors": named, "iterationCount": 3, **top}


def graph(*layers: dict[str, Any], **sources: list[str]) -> Any:
    """Return a ComputationGraphConfiguration: a chain of layers, but for inputs in ``sources``."""
    names = [f"v{i}" for i in range(len(layers))]
    kind = "org.deeplearning4j.nn.conf.graph.LayerVertex"
    vertices = {
        name: {"@class": kind, "layerConf": {"layer": one}, "preProcessor": None}
        for name, one in zip(names, layers, strict=True)
    }
    line = {name: [before] for name, before in zip(names, ["in", *names], strict=False)}
    return {
        "vertices": dict(reversed(vertices.items())),  # the order has no meaning
        "vertexInputs": {**line, **sources},
        "networkInputs": ["in"],
        "networkOutputs": [names[-1]],
    }


def write(path: Path, configuration: Any, *arrays: np.ndarray, **entries: bytes) -> Path:
    """Write a network's zip file; ``arrays`` are flattened and joined to coefficients.bin."""
    flat = np.concatenate([np.ravel(one) for one in arrays]) if arrays else np.zeros(0)
    parts = {"configuration.json": json.dumps(configuration, indent=2).encode()}
    parts["coefficients.bin"] = nd4j(flat.reshape(1, -1)) if flat.size else b""
    if not flat.size:
        parts["noParams.marker"] = b""
    for name, content in entries.items():
        parts[name.replace("_bin", ".bin")] = content
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in parts.items():
            file.writestr(name, content)
    return path


def draw_normal(seed: int, *shape: int) -> np.ndarray:
    """Return random normal values."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def f(array: np.ndarray) -> np.ndarray:
    """Return a matrix's values column by column, the order of most weights in DL4J's files."""
    return np.ravel(array, "F")


# Rows with their classes, for a softmax output layer with 3 inputs and 4 outputs.
X, LABELS = draw_normal(11, 8, 3), np.arange(8) % 4


def gradients(w: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradients of w and b of softmax with MCXENT, the mean over rows."""
    z = X.astype(np.float64) @ w + b
    p = np.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(8), LABELS] -= 1
    return X.T.astype(np.float64) @ p / 8, p.mean(axis=0)


CLOSE = {"rtol": 1e-4, "atol": 1e-5}
SEQUENCE = draw_normal(90, 3, 2, 7)  # [rows, features, steps]


def predict_imported(path: Path, told: Any, x: np.ndarray, *arrays: np.ndarray) -> np.ndarray:
    """Return the predictions of an imported network."""
    made: np.ndarray = from_dl4j(write(path / "m.zip", told, *arrays), training=False).predict(x)
    return made


def softmax(z: np.ndarray) -> np.ndarray:
    """Return the softmax over axis 1."""
    wide = np.exp(z - z.max(axis=1, keepdims=True))
    return wide / wide.sum(axis=1, keepdims=True)
