"""Parse DL4J's JSON configurations, of all versions, into a list of layer specs.

Versions write the type of a layer differently: 1.0.0-beta3 and later as
``{"@class": "org.deeplearning4j.nn.conf.layers.DenseLayer", ...}``, earlier ones as
``{"dense": {...}}``. Early versions wrote some options, such as activations and updaters, as plain
words like ``"relu"``. Keys are converted to lower case, because some versions wrote ``nIn`` and
others ``nin``.

There is a spec for each layer, for each preprocessor before a layer, for each operation that a
wrapper adds after a layer, and for each vertex of a ComputationGraph that joins or changes
activations.

A saved model contains the parameters in the order of the graph's vertices. 1.0.0-beta4 and later
write this order into the JSON. For earlier versions, it is reconstructed by repeating DL4J's
topological sort of the vertices, which iterates over Java's hash sets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from sparkstrom.models.dl4j.files import NoDl4jNetwork, NotImported

CLASS_KEY = "@class"


class TypedObject(NamedTuple):
    """A JSON object that represents an instance of a Java class."""

    kind: str  # the short name of the class, in lower case
    fields: dict[str, Any]  # all fields except the class


def lowercase_keys(value: Any) -> Any:
    """Return a JSON value with all keys in lower case, including nested ones."""
    if isinstance(value, dict):
        return {str(key).lower(): lowercase_keys(one) for key, one in value.items()}
    return [lowercase_keys(one) for one in value] if isinstance(value, list) else value


def parse_typed(value: Any) -> TypedObject | None:
    """Return class and fields of a JSON object, or the class named by a string; otherwise None."""
    if isinstance(value, str):
        return TypedObject(value.lower(), {})
    if not isinstance(value, dict) or not value:
        return None
    if isinstance(name := value.get(CLASS_KEY), str):
        short = name.rpartition(".")[2].rpartition("$")[2]
        return TypedObject(short.lower(), {k: v for k, v in value.items() if k != CLASS_KEY})
    name, fields = next(iter(value.items()))
    if len(value) == 1 and isinstance(fields, dict):
        return TypedObject(name.lower(), fields)
    return None


# Names before 1.0.0-beta3, and names of subclasses -> the class that does the same.
LAYER_ALIASES = {
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
PREPROCESSOR_ALIASES = {
    "cnntofeedforward": "cnntofeedforwardpreprocessor",
    "feedforwardtocnn": "feedforwardtocnnpreprocessor",
    "rnntofeedforward": "rnntofeedforwardpreprocessor",
    "feedforwardtornn": "feedforwardtornnpreprocessor",
    "rnntocnn": "rnntocnnpreprocessor",
    "cnntornn": "cnntornnpreprocessor",
    "composableinput": "composableinputpreprocessor",
}
ACTIVATION_ALIASES = {"leakyrelu": "lrelu", "hardtanh": "hardtanh", "softmaxold": "softmax"}
LOSS_ALIASES = {
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


def _parse_named(value: Any, prefix: str, names: dict[str, str]) -> TypedObject | None:
    """Parse a typed object; remove ``prefix`` from its kind, and replace a kind in ``names``.

    Return None if the value is not a typed object.
    """
    parsed = parse_typed(value)
    if parsed is None:
        return None
    kind = parsed.kind.removeprefix(prefix)
    return TypedObject(names.get(kind, kind), parsed.fields)


NETWORK_INPUT = -1  # the network's input, in a list of source numbers
LAST_TIME_STEP = "lasttimestep"
SINGLE_END_REMEDY = (
    "use a graph of one input and one output, in which each vertex leads to the output"
)
JOIN_VERTICES = ("merge", "elementwise")  # have several inputs; all other vertices have one
UNARY_VERTICES = (
    *("scale", "shift", "subset", "l2normalize", "reversetimeseries", "poolhelper", "reshape"),
)
LAYER_VERTICES = ("layer", "preprocessor", LAST_TIME_STEP)


class LayerConf(NamedTuple):
    """A layer's NeuralNetConfiguration, or a vertex that has none, together with its inputs."""

    name: str  # the layer's name, unless ``fields`` contains another one
    fields: dict[str, Any]  # the options, with keys in lower case
    preprocessor: Any  # JSON of the preprocessor before the layer, or None
    sources: tuple[int, ...]  # numbers of the LayerConfs that are its input, or NETWORK_INPUT
    vertex: str | None = None  # the vertex's kind; None for a layer


def parse_graph(path: str, config: dict[str, Any]) -> list[LayerConf]:
    """Return the vertices of a ComputationGraphConfiguration in the order of their parameters.

    Raise NotImported unless the graph has one input and one output, to which each vertex leads.
    Raise NoDl4jNetwork if the graph is invalid.
    """
    inputs, outputs = config.get("networkinputs"), config.get("networkoutputs")
    vertices, sources = config["vertices"], config.get("vertexinputs")
    if not (isinstance(inputs, list) and isinstance(outputs, list) and isinstance(sources, dict)):
        raise NoDl4jNetwork(path, "the graph has no networkInputs, networkOutputs or vertexInputs")
    for names in (inputs, outputs, *sources.values()):
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise NoDl4jNetwork(path, f"{names!r} of the graph are not lists of names")
    if len(inputs) != 1 or len(outputs) != 1:
        what = f"{len(inputs)} inputs and {len(outputs)} outputs"
        raise NotImported(path, "the ComputationGraph", what, SINGLE_END_REMEDY)
    order = _order_vertices(path, config, inputs[0])
    numbers = {inputs[0]: NETWORK_INPUT, **{name: number for number, name in enumerate(order)}}
    used = {source for name in order for source in sources[name]} | {outputs[0]}
    for name in order:
        if name not in used or (name == outputs[0] and name != order[-1]):
            where = "nowhere" if name not in used else "on, and is an output"
            what = f"vertex {name!r} leads {where}"
            raise NotImported(path, "the ComputationGraph", what, SINGLE_END_REMEDY)
    return [
        _parse_vertex(path, name, vertices[name], tuple(numbers[s] for s in sources[name]))
        for name in order
    ]


def _parse_vertex(path: str, name: str, value: Any, sources: tuple[int, ...]) -> LayerConf:
    """Convert a vertex to a LayerConf; raise NotImported or NoDl4jNetwork if that is impossible."""
    parsed = parse_typed(lowercase_keys(value))
    if parsed is None:
        raise NoDl4jNetwork(path, f"vertex {name!r} is {value!r}")
    kind = parsed.kind.removesuffix("vertex")
    if kind not in (*JOIN_VERTICES, *UNARY_VERTICES, *LAYER_VERTICES):
        remedy = f"supported are: {', '.join((*JOIN_VERTICES, *UNARY_VERTICES, *LAYER_VERTICES))}"
        raise NotImported(path, f"vertex {name!r}", f"it is a {parsed.kind}", remedy)
    if kind not in JOIN_VERTICES and len(sources) != 1:
        raise NoDl4jNetwork(path, f"vertex {name!r}, a {parsed.kind}, has {len(sources)} inputs")
    if kind == "layer":
        if not isinstance(parsed.fields.get("layerconf"), dict):
            raise NoDl4jNetwork(path, f"vertex {name!r} has no layerConf")
        return LayerConf(
            name, parsed.fields["layerconf"], parsed.fields.get("preprocessor"), sources
        )
    if kind == "preprocessor":
        return LayerConf(name, {}, parsed.fields.get("preprocessor"), sources)
    if kind == LAST_TIME_STEP:
        return LayerConf(name, parsed.fields, None, sources, LAST_TIME_STEP)
    return LayerConf(name, parsed.fields, None, sources, f"{kind}vertex")


def _order_vertices(path: str, config: dict[str, Any], start: str) -> list[str]:
    """Return the names of all vertices, each after its sources; the input ``start`` is omitted."""
    vertices, sources = config["vertices"], config["vertexinputs"]
    for name in vertices:
        unknown = {*sources.get(name, ())} - {*vertices, start}
        if unknown or not sources.get(name):
            raise NoDl4jNetwork(path, f"vertex {name!r} has inputs {sources.get(name)!r}")
    written = config.get("topologicalorderstr")
    order = (
        written if isinstance(written, list) else _sort_topologically([start, *vertices], sources)
    )
    order = [name for name in order if name != start]
    done = {start}
    for name in order:
        known = isinstance(name, str) and name in vertices  # untrusted JSON: any type
        if not known or name in done or not {*sources[name]} <= done:
            raise NoDl4jNetwork(path, f"the graph's order is wrong at {name!r}")
        done.add(name)
    if len(order) != len(vertices):
        missing = next(name for name in vertices if name not in done)
        raise NoDl4jNetwork(path, f"the graph never reaches {missing!r}: it has a cycle")
    return order


def _sort_topologically(names: list[str], sources: dict[str, list[str]]) -> list[str]:
    """Return vertex names in the order of DL4J's ``ComputationGraph.calculateIndices``.

    ``sources`` maps a vertex to its inputs. Vertices in a cycle are omitted.
    """
    number = {name: i for i, name in enumerate(names)}
    missing = {name: {*sources.get(name, ())} for name in names}
    ordered: list[str] = []
    ready = [name for name in names if not missing[name]]
    while ready:
        current = ready.pop(0)
        ordered.append(current)
        dependents = [number[name] for name in names if current in sources.get(name, ())]
        for i in _sort_as_java_hash_set(dependents):
            missing[names[i]].discard(current)
            if not missing[names[i]]:
                ready.append(names[i])
    return ordered


def _sort_as_java_hash_set(numbers: list[int]) -> Iterable[int]:
    """Return the numbers in the order in which a ``java.util.HashSet`` iterates over them."""
    buckets = 16
    while len(numbers) > buckets * 3 // 4:
        buckets *= 2
    return sorted(numbers, key=lambda number: (number ^ number >> 16) % buckets)


SUPPORTED_LAYERS = (
    *("denselayer", "outputlayer", "losslayer", "activationlayer", "dropoutlayer"),
    *("batchnormalization", "embeddinglayer", "embeddingsequencelayer", "convolutionlayer"),
    *("subsamplinglayer", "globalpoolinglayer", "lstm", "graveslstm", "rnnoutputlayer"),
    *("rnnlosslayer", "cnnlosslayer", "convolution1dlayer", "subsampling1dlayer"),
    *("deconvolution2d", "separableconvolution2d", "depthwiseconvolution2d", "prelulayer"),
    *("localresponsenormalization", "elementwisemultiplicationlayer", "repeatvector"),
    *("upsampling1d", "upsampling2d", "zeropadding1dlayer", "zeropaddinglayer"),
    *("cropping1d", "cropping2d", "simplernn", "bidirectional", "gravesbidirectionallstm"),
)
RECURRENT_LAYERS = ("lstm", "graveslstm", "simplernn")
RESHAPING_PREPROCESSORS = (
    *("cnntofeedforwardpreprocessor", "feedforwardtocnnpreprocessor"),
    *("rnntofeedforwardpreprocessor", "feedforwardtornnpreprocessor"),
    *("rnntocnnpreprocessor", "cnntornnpreprocessor"),
)
FROZEN_WRAPPERS = ("frozenlayer", "frozenlayerwithbackprop")
LOSS_LAYERS = ("outputlayer", "losslayer", "rnnoutputlayer", "rnnlosslayer", "cnnlosslayer")
RETRAIN_REMEDY = "train the module again in PyTorch (TorchModel)"
PREDICT_REMEDY = "import it with from_dl4j(path, training=False) to predict with it"
JAVA_SIZE_MAX = 1 << 31  # sizes are below this limit of Java's arrays


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A layer, preprocessor or vertex of a saved network.

    Its methods that return numbers or sizes raise NoDl4jNetwork for an invalid value.

    Attributes:
        kind: the short name of its class in DL4J, in lower case, such as ``denselayer``.
        name: the layer's name in DL4J.
        fields: its options as DL4J wrote them, with keys in lower case.
        path: the saved network's file, for error messages.
        frozen: whether it is not trained and always in evaluation mode.
        stops_gradients: whether earlier layers get no gradients through it.
        variables: names of its arrays, if DL4J wrote them.
        sources: numbers of the specs that it gets input from, in order.
    """

    kind: str
    name: str
    fields: dict[str, Any] = field(repr=False)
    path: str = field(repr=False)
    frozen: bool = False
    stops_gradients: bool = False
    variables: tuple[str, ...] = ()
    sources: tuple[int, ...] = (NETWORK_INPUT,)

    @property
    def label(self) -> str:
        """Kind and name, for error messages."""
        return f"{self.kind} {self.name!r}"

    def get_int(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        """Return the integer option ``name``; the default if it is missing or null.

        Raise NoDl4jNetwork unless it is an integer of at least ``minimum``.
        """
        value = self.fields.get(name, default)
        value = default if value is None else value
        if (
            isinstance(value, bool)
            or not isinstance(value, int)
            or not minimum <= value < JAVA_SIZE_MAX
        ):
            raise NoDl4jNetwork(self.path, f"{self.label} has {name}={value!r}")
        return value

    def get_float(self, name: str, default: float) -> float:
        """Return the numeric option ``name``; the default if it is missing, null or NaN."""
        return read_float(self.path, self.label, self.fields, name, default)

    def get_bool(self, name: str, default: bool) -> bool:
        """Return the boolean option ``name``; the default if it is missing."""
        return bool(self.fields.get(name, default))

    def get_pair(self, name: str, default: int, minimum: int = 1) -> tuple[int, int]:
        """Return the option ``name`` as (height, width); both are ``default`` if it is missing.

        Raise NoDl4jNetwork unless both are integers of at least ``minimum``.
        """
        value = self.fields.get(name)
        sizes = self.get_sizes(name, minimum) if value is not None else (default, default)
        if len(sizes) != 2:
            raise NoDl4jNetwork(self.path, f"{self.label} has {name}={value!r}")
        return sizes[0], sizes[1]

    def get_sizes(self, name: str, minimum: int = 0) -> tuple[int, ...]:
        """Return the option ``name``, a number or a list of numbers, as a tuple of sizes.

        Raise NoDl4jNetwork unless there is a size, and all are integers of at least ``minimum``.
        """
        value = self.fields.get(name)
        listed = value if isinstance(value, list) else [value]
        if not (listed and all(type(v) is int and minimum <= v < JAVA_SIZE_MAX for v in listed)):
            raise NoDl4jNetwork(self.path, f"{self.label} has {name}={value!r}")
        return tuple(listed)

    def get_word(self, name: str, default: str) -> str:
        """Return the enum constant ``name`` in lower case; the default if it is missing."""
        value = self.fields.get(name)
        return str(value).lower() if value is not None else default

    def parse_activation(self, field: str = "activationfn") -> TypedObject | None:
        """Return the activation in ``field`` or, if that is missing, in ``activationfunction``.

        Return None if there is none, or if it is not a typed object. ``ActivationReLU``,
        ``{"ReLU": {}}`` and "relu" all have the kind ``relu``.
        """
        value = self.fields.get(field, self.fields.get("activationfunction"))
        return _parse_named(value, "activation", ACTIVATION_ALIASES)

    def parse_loss(self) -> TypedObject | None:
        """Return the loss in ``lossfn`` or, if that is missing, in ``lossfunction``.

        Return None if there is none, or if it is not a typed object. ``LossMCXENT``,
        ``{"MCXENT": {}}`` and "MCXENT" all have the kind ``mcxent``.
        """
        value = self.fields.get("lossfn", self.fields.get("lossfunction"))
        return _parse_named(value, "loss", LOSS_ALIASES)

    def unsupported(self, what: str, remedy: str = RETRAIN_REMEDY) -> NotImported:
        """Return a NotImported error: ``what``, a feature of this layer, is not supported."""
        return NotImported(self.path, self.label, what, remedy)


def read_float(path: str, label: str, fields: dict[str, Any], name: str, default: float) -> float:
    """Return the finite number ``name`` of ``fields``; the default if it is missing, null or NaN.

    Raise NoDl4jNetwork, naming ``path`` and ``label``, for any other value. NaN may be a string,
    because DL4J's JSON library Jackson writes it as one.
    """
    value = fields.get(name)
    if value is None or value == "NaN" or (isinstance(value, float) and math.isnan(value)):
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise NoDl4jNetwork(path, f"{label} has {name}={value!r}")
    return float(value)


@dataclass(frozen=True, slots=True)
class SavedNetwork:
    """A parsed configuration: the layer specs, and options of the whole network."""

    path: str  # the file, for error messages
    specs: tuple[LayerSpec, ...]  # the layers in the order of their parameters
    iterations: int  # number of minibatches that DL4J trained
    epochs: int  # number of epochs that DL4J trained
    untrainable: tuple[str, ...]  # options that training here does not support
    tbptt_length: int = 0  # time steps between two updates of TruncatedBPTT; 0: whole sequences


def parse_network(path: str, configuration: dict[str, Any]) -> SavedNetwork:
    """Parse the configuration of a MultiLayerNetwork or ComputationGraph.

    Args:
        path: the file, for error messages.
        configuration: content of configuration.json.

    Raises:
        NoDl4jNetwork: the configuration is invalid.
        NotImported: the network has a layer or vertex that is not supported.
    """
    config = {key.lower(): value for key, value in configuration.items()}
    is_graph = isinstance(config.get("vertices"), dict)
    confs = parse_graph(path, config) if is_graph else _parse_layer_list(path, config)
    specs = _connect_specs(path, confs)
    if not any(spec.kind in SUPPORTED_LAYERS for spec in specs):
        raise NoDl4jNetwork(path, "configuration.json has no layers")
    _check_single_loss(path, specs)
    iterations = _read_count(path, config, "iterationCount")
    epochs = _read_count(path, config, "epochCount")
    untrainable = dict.fromkeys(
        option for conf in confs for option in _find_untrainable_options(conf.fields)
    )
    segment, back = _read_tbptt_lengths(path, config)
    if back < segment:
        untrainable[f"TruncatedBPTT of {back} steps back and {segment} forward"] = None
    return SavedNetwork(path, tuple(specs), iterations, epochs, tuple(untrainable), segment)


def _read_count(path: str, config: dict[str, Any], name: str) -> int:
    """Return the counter ``name``, or 0 if it is missing; raise NoDl4jNetwork if it is invalid."""
    count = config.get(name.lower(), 0)
    if type(count) is not int or count < 0:
        raise NoDl4jNetwork(path, f"{name}={count!r}")
    return count


def _read_tbptt_lengths(path: str, config: dict[str, Any]) -> tuple[int, int]:
    """Return TruncatedBPTT's (forward, back) lengths; (0, 0) for standard backpropagation."""
    if str(config.get("backproptype", "standard")).lower() == "standard":
        return 0, 0
    forward, back = config.get("tbpttfwdlength", 20), config.get("tbpttbacklength", 20)
    if not (type(forward) is int and type(back) is int and min(forward, back) > 0):
        raise NoDl4jNetwork(path, f"tbpttFwdLength={forward!r}, tbpttBackLength={back!r}")
    return forward, back


def _parse_layer_list(path: str, config: dict[str, Any]) -> list[LayerConf]:
    """Return the layers of a MultiLayerConfiguration; raise NoDl4jNetwork if it is invalid."""
    confs = config.get("confs", config.get("netconfigurations"))
    if not isinstance(confs, list) or not all(isinstance(conf, dict) for conf in confs):
        raise NoDl4jNetwork(path, "configuration.json has neither confs nor vertices")
    before = config.get("inputpreprocessors") or {}
    if not isinstance(before, dict):
        raise NoDl4jNetwork(path, f"inputPreProcessors={before!r}")
    return [
        LayerConf(f"layer{i}", lowercase_keys(conf), lowercase_keys(before.get(str(i))), (i - 1,))
        for i, conf in enumerate(confs)
    ]


def _connect_specs(path: str, confs: list[LayerConf]) -> list[LayerSpec]:
    """Return the specs of all LayerConfs in order, each with the numbers of its source specs."""
    specs: list[LayerSpec] = []
    last = {NETWORK_INPUT: NETWORK_INPUT}  # number of each LayerConf -> of its last spec
    for number, conf in enumerate(confs):
        sources = tuple(last[source] for source in conf.sources)
        for spec in _expand_conf(path, conf):
            specs.append(replace(spec, sources=sources))
            sources = (len(specs) - 1,)
        last[number] = sources[0]
    return specs


def _expand_conf(path: str, conf: LayerConf) -> Iterator[LayerSpec]:
    """Yield the specs of one LayerConf in order: its preprocessor, then its vertex or layer."""
    if conf.preprocessor is not None:
        yield from _parse_preprocessors(path, conf.name, conf.preprocessor)
    if conf.vertex is not None:
        yield LayerSpec(conf.vertex, conf.name, conf.fields, path)
    if conf.vertex is not None or not conf.fields:
        return
    layer = conf.fields.get("layer")
    parsed = parse_typed(layer)
    if parsed is None:
        raise NoDl4jNetwork(path, f"{conf.name} has layer={layer!r}")
    variables = conf.fields.get("variables") or []
    if not isinstance(variables, list):
        raise NoDl4jNetwork(path, f"{conf.name} has variables={variables!r}")
    for spec in _unwrap_layer(path, conf.name, parsed):
        yield replace(spec, variables=tuple(map(str, variables)))


def _unwrap_layer(path: str, default: str, parsed: TypedObject) -> Iterator[LayerSpec]:
    """Yield the spec of the layer inside wrappers, then one for a LastTimeStep wrapper.

    ``default`` is the layer's name if DL4J wrote none. Raise NotImported for an unknown layer.
    """
    kind = LAYER_ALIASES.get(parsed.kind, parsed.kind)
    name = str(parsed.fields.get("layername") or default)
    if kind in FROZEN_WRAPPERS or kind == LAST_TIME_STEP:
        inner = parse_typed(parsed.fields.get("layer", parsed.fields.get("underlying")))
        if inner is not None:
            for spec in _unwrap_layer(path, name, inner):
                frozen, ends = kind in FROZEN_WRAPPERS, kind == FROZEN_WRAPPERS[0]
                yield replace(
                    spec, frozen=spec.frozen or frozen, stops_gradients=spec.stops_gradients or ends
                )
        if kind == LAST_TIME_STEP:
            yield LayerSpec(kind, f"{name} last", parsed.fields, path)
        return
    spec = LayerSpec(kind, name, parsed.fields, path)
    if kind not in SUPPORTED_LAYERS:
        raise spec.unsupported("sparkstrom has no such layer")
    yield _flatten_bidirectional(spec) if kind == "bidirectional" else spec


def _flatten_bidirectional(spec: LayerSpec) -> LayerSpec:
    """Return a Bidirectional's spec with its forward layer's options, used for both directions.

    Raise NotImported if it does not contain recurrent layers.
    """
    layers = [parse_typed(spec.fields.get(name)) for name in ("fwd", "bwd")]
    if any(layer is None or layer.kind not in RECURRENT_LAYERS for layer in layers):
        kinds = " and ".join("nothing" if layer is None else layer.kind for layer in layers)
        raise spec.unsupported(f"it contains {kinds}")
    forward = layers[0]
    assert forward is not None
    fields = {**forward.fields, "mode": spec.fields.get("mode"), "within": forward.kind}
    return replace(spec, fields=fields)


def _parse_preprocessors(path: str, layer: str, value: Any) -> Iterator[LayerSpec]:
    """Yield the spec of a preprocessor, or the specs of all parts of a composed preprocessor."""
    parsed = parse_typed(value)
    if parsed is None:
        raise NoDl4jNetwork(path, f"the preprocessor of {layer} is {value!r}")
    kind = PREPROCESSOR_ALIASES.get(parsed.kind, parsed.kind)
    if kind == "composableinputpreprocessor":
        listed = parsed.fields.get("inputpreprocessors") or []
        if not isinstance(listed, list):
            raise NoDl4jNetwork(path, f"the preprocessors of {layer} are {listed!r}")
        for one in listed:
            yield from _parse_preprocessors(path, layer, one)
        return
    spec = LayerSpec(kind, f"before {layer}", parsed.fields, path)
    if kind not in RESHAPING_PREPROCESSORS:
        raise spec.unsupported("sparkstrom has no such preprocessor")
    yield spec


def _check_single_loss(path: str, specs: list[LayerSpec]) -> None:
    """Raise NotImported if a layer other than the last one has a loss."""
    for spec in specs[:-1]:
        if spec.kind in LOSS_LAYERS:
            raise spec.unsupported("it has a loss and is not the last layer")


def _find_untrainable_options(conf: dict[str, Any]) -> Iterator[str]:
    """Yield the options of one NeuralNetConfiguration that training here does not support."""
    algorithm = str(conf.get("optimizationalgo", "stochastic_gradient_descent")).lower()
    if algorithm != "stochastic_gradient_descent":
        yield f"optimizationAlgo {algorithm.upper()}"
    if conf.get("minibatch", True) is False:
        yield "miniBatch=false (gradients are sums over a minibatch)"
    if conf.get("minimize", True) is False:
        yield "minimize=false (the score is maximized)"
    if conf.get("usedropconnect", False) is True:
        yield "useDropConnect"
    policy = str(conf.get("learningratepolicy") or "none").lower()
    if policy != "none":  # an option of DL4J 0.9 and earlier
        yield f"learningRatePolicy {policy}"
