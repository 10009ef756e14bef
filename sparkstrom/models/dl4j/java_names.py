"""Java's class names in DL4J's JSON, of all its versions, as one word each.

1.0.0-beta3 and later write ``{"@class": "org.deeplearning4j.nn.conf.layers.DenseLayer", ...}``,
earlier versions ``{"dense": {...}}``, and before 0.8 some are plain words. Keys are made lower
case: Jackson wrote ``nIn`` in some versions and ``nin`` in others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

CLASS = "@class"


class Typed(NamedTuple):
    """An object of a class: its short name in lower case, and its fields."""

    kind: str
    fields: dict[str, Any]


def lowered(value: Any) -> Any:
    """The same with all keys in lower case."""
    if isinstance(value, dict):
        return {str(key).lower(): lowered(one) for key, one in value.items()}
    return [lowered(one) for one in value] if isinstance(value, list) else value


def typed(value: Any) -> Typed | None:
    """Which class an object is of; None for null and for what is none."""
    if isinstance(value, str):
        return Typed(value.lower(), {})
    if not isinstance(value, dict) or not value:
        return None
    if isinstance(name := value.get(CLASS), str):
        short = name.rpartition(".")[2].rpartition("$")[2]
        return Typed(short.lower(), {k: v for k, v in value.items() if k != CLASS})
    name, fields = next(iter(value.items()))
    if len(value) == 1 and isinstance(fields, dict):
        return Typed(name.lower(), fields)
    return None


# Names of before 1.0.0-beta3 and of subclasses, by the class that does the same.
LAYERS = {
    "dense": "denselayer",
    "output": "outputlayer",
    "rnnoutput": "rnnoutputlayer",
    "loss": "losslayer",
    "activation": "activationlayer",
    "dropout": "dropoutlayer",
    "embedding": "embeddinglayer",
    "convolution": "convolutionlayer",
    "convolution2d": "convolutionlayer",
    "subsampling": "subsamplinglayer",
    "pooling2d": "subsamplinglayer",
    "globalpooling": "globalpoolinglayer",
    "convolution1d": "convolution1dlayer",
    "subsampling1d": "subsampling1dlayer",
    "pooling1d": "subsampling1dlayer",
    "zeropadding": "zeropaddinglayer",
    "zeropadding1d": "zeropadding1dlayer",
    "elementwisemult": "elementwisemultiplicationlayer",
}
PREPROCESSORS = {
    "cnntofeedforward": "cnntofeedforwardpreprocessor",
    "feedforwardtocnn": "feedforwardtocnnpreprocessor",
    "rnntofeedforward": "rnntofeedforwardpreprocessor",
    "feedforwardtornn": "feedforwardtornnpreprocessor",
    "rnntocnn": "rnntocnnpreprocessor",
    "cnntornn": "cnntornnpreprocessor",
    "composableinput": "composableinputpreprocessor",
}
ACTIVATIONS = {"leakyrelu": "lrelu", "hardtanh": "hardtanh", "softmaxold": "softmax"}
LOSSES = {
    "xent": "binaryxent",
    "squaredloss": "l2",
    "squared_loss": "l2",
    "reconstruction_crossentropy": "kld",
    "kl_divergence": "kld",
    "mean_absolute_error": "mae",
    "cosine_proximity": "cosineproximity",
    "squared_hinge": "squaredhinge",
    "sparse_mcxent": "sparsemcxent",
}


def activation(value: Any) -> Typed | None:
    """``relu`` of ``ActivationReLU``, ``{"ReLU": {}}`` and ``"relu"``."""
    return _called(value, "activation", ACTIVATIONS)


def loss(value: Any) -> Typed | None:
    """``mcxent`` of ``LossMCXENT``, ``{"MCXENT": {}}`` and ``"MCXENT"``."""
    return _called(value, "loss", LOSSES)


def _called(value: Any, prefix: str, names: dict[str, str]) -> Typed | None:
    found = typed(value)
    if found is None:
        return None
    kind = found.kind.removeprefix(prefix)
    return Typed(names.get(kind, kind), found.fields)
