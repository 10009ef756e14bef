"""From configuration.json to steps: what is done to activations, one after the other.

A layer is a step; so is a preprocessor before it, what a wrapper does behind it, and a vertex of a
ComputationGraph that joins or changes activations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from sparkstrom.models.dl4j.dl4j_errors import NoDl4jNetwork, NotImported
from sparkstrom.models.dl4j.graph_vertices import INPUT, Conf, vertices_of
from sparkstrom.models.dl4j.java_names import LAYERS, PREPROCESSORS, Typed, lowered, typed

SUPPORTED = (
    *("denselayer", "outputlayer", "losslayer", "activationlayer", "dropoutlayer"),
    *("batchnormalization", "embeddinglayer", "embeddingsequencelayer", "convolutionlayer"),
    *("subsamplinglayer", "globalpoolinglayer", "lstm", "graveslstm", "rnnoutputlayer"),
    *("rnnlosslayer", "cnnlosslayer", "convolution1dlayer", "subsampling1dlayer"),
    *("deconvolution2d", "separableconvolution2d", "depthwiseconvolution2d", "prelulayer"),
    *("localresponsenormalization", "elementwisemultiplicationlayer", "repeatvector"),
    *("upsampling1d", "upsampling2d", "zeropadding1dlayer", "zeropaddinglayer"),
    *("cropping1d", "cropping2d", "simplernn", "bidirectional", "gravesbidirectionallstm"),
)
RECURRENT = ("lstm", "graveslstm", "simplernn")
RESHAPING = (
    *("cnntofeedforwardpreprocessor", "feedforwardtocnnpreprocessor"),
    *("rnntofeedforwardpreprocessor", "feedforwardtornnpreprocessor"),
    *("rnntocnnpreprocessor", "cnntornnpreprocessor"),
)
LAST_STEP = "lasttimestep"
FROZEN = ("frozenlayer", "frozenlayerwithbackprop")
ENDS = ("outputlayer", "losslayer", "rnnoutputlayer", "rnnlosslayer", "cnnlosslayer")
BRING_ANOTHER = "train the module anew in PyTorch (TorchModel)"
TO_PREDICT = "import it with from_dl4j(path, training=False) to predict with it"
SIZE_MAX = 1 << 31  # of Java's own arrays


@dataclass(frozen=True, slots=True)
class Step:
    """One of them. ``fields`` are its options as DL4J wrote them, keys in lower case."""

    kind: str
    name: str
    fields: dict[str, Any] = field(repr=False)
    path: str = field(repr=False)
    frozen: bool = False  # never trained, and as it is outside of training
    ends_training: bool = False  # what is before it gets no gradients
    variables: tuple[str, ...] = ()  # names of its arrays, where DL4J says them
    sources: tuple[int, ...] = (INPUT,)  # numbers of the steps whose outputs it gets, in order

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.kind} {self.name!r}"

    def whole(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A whole number. Raise NoDl4jNetwork for anything else."""
        value = self.fields.get(name, default)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < SIZE_MAX:
            raise NoDl4jNetwork(self.path, f"{self.where} has {name}={value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        """A finite number; ``default`` where it is missing, null or NaN."""
        return number_in(self.path, self.where, self.fields, name, default)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        return bool(self.fields.get(name, default))

    def pair(self, name: str, default: int, least: int = 1) -> tuple[int, int]:
        """Height and width."""
        value = self.fields.get(name)
        found = self.sizes(name, least) if value is not None else (default, default)
        if len(found) != 2:
            raise NoDl4jNetwork(self.path, f"{self.where} has {name}={value!r}")
        return found[0], found[1]

    def sizes(self, name: str, least: int = 0) -> tuple[int, ...]:
        """Of any number of dimensions; one number is of one."""
        value = self.fields.get(name)
        listed = value if isinstance(value, list) else [value]
        if not (listed and all(type(v) is int and least <= v < SIZE_MAX for v in listed)):
            raise NoDl4jNetwork(self.path, f"{self.where} has {name}={value!r}")
        return tuple(listed)

    def word(self, name: str, default: str) -> str:
        """A constant of an enumeration, in lower case."""
        value = self.fields.get(name)
        return str(value).lower() if value is not None else default

    def refuse(self, what: str, remedy: str = BRING_ANOTHER) -> NotImported:
        """The error that names this step."""
        return NotImported(self.path, self.where, what, remedy)


def number_in(path: str, where: str, fields: dict[str, Any], name: str, default: float) -> float:
    """A finite number among fields; Jackson writes NaN as a word."""
    value = fields.get(name)
    if value is None or value == "NaN" or (isinstance(value, float) and math.isnan(value)):
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise NoDl4jNetwork(path, f"{where} has {name}={value!r}")
    return float(value)


@dataclass(frozen=True, slots=True)
class SavedNetwork:
    """What a configuration says: steps, and what hangs on none of them."""

    path: str
    steps: tuple[Step, ...]
    iterations: int  # that it has been trained for
    epochs: int
    untrainable: tuple[str, ...]  # how DL4J trains it, where that is not how it is done here
    segment: int = 0  # steps of a sequence between two updates; 0: all of them


def network_of(path: str, configuration: dict[str, Any]) -> SavedNetwork:
    """Read it. Raise NoDl4jNetwork or NotImported."""
    top = {key.lower(): value for key, value in configuration.items()}
    is_graph = isinstance(top.get("vertices"), dict)
    confs = vertices_of(path, top) if is_graph else _list_of(path, top)
    steps = _numbered(path, confs)
    if not any(step.kind in SUPPORTED for step in steps):
        raise NoDl4jNetwork(path, "configuration.json has no layers")
    _check_ends(path, steps)
    iterations, epochs = _count(path, top, "iterationCount"), _count(path, top, "epochCount")
    said = dict.fromkeys(what for conf in confs for what in _untrainable(conf.fields))
    segment, back = _segment(path, top)
    if back < segment:
        said[f"TruncatedBPTT of {back} steps back and {segment} forward"] = None
    return SavedNetwork(path, tuple(steps), iterations, epochs, tuple(said), segment)


def _count(path: str, top: dict[str, Any], name: str) -> int:
    """What it has been trained for, from 0."""
    count = top.get(name.lower(), 0)
    if type(count) is not int or count < 0:
        raise NoDl4jNetwork(path, f"{name}={count!r}")
    return count


def _segment(path: str, top: dict[str, Any]) -> tuple[int, int]:
    """How many steps forward and back TruncatedBPTT has; zeros where it is not that."""
    if str(top.get("backproptype", "standard")).lower() == "standard":
        return 0, 0
    forward, back = top.get("tbpttfwdlength", 20), top.get("tbpttbacklength", 20)
    if not (type(forward) is int and type(back) is int and min(forward, back) > 0):
        raise NoDl4jNetwork(path, f"tbpttFwdLength={forward!r}, tbpttBackLength={back!r}")
    return forward, back


def _list_of(path: str, top: dict[str, Any]) -> list[Conf]:
    """Of a MultiLayerConfiguration."""
    confs = top.get("confs", top.get("netconfigurations"))
    if not isinstance(confs, list) or not all(isinstance(conf, dict) for conf in confs):
        raise NoDl4jNetwork(path, "configuration.json has neither confs nor vertices")
    before = top.get("inputpreprocessors") or {}
    if not isinstance(before, dict):
        raise NoDl4jNetwork(path, f"inputPreProcessors={before!r}")
    return [
        Conf(f"layer{i}", lowered(conf), lowered(before.get(str(i))), (i - 1,))
        for i, conf in enumerate(confs)
    ]


def _numbered(path: str, confs: list[Conf]) -> list[Step]:
    """Each with the numbers of those before it; a conf may be several steps, or none."""
    steps: list[Step] = []
    last = {INPUT: INPUT}  # of each conf, its last step
    for number, conf in enumerate(confs):
        sources = tuple(last[source] for source in conf.sources)
        for step in _steps_of(path, conf):
            steps.append(replace(step, sources=sources))
            sources = (len(steps) - 1,)
        last[number] = sources[0]
    return steps


def _steps_of(path: str, conf: Conf) -> Iterator[Step]:
    """A preprocessor and its layer, or a vertex without a layer."""
    if conf.before is not None:
        yield from _preprocessors(path, conf.name, conf.before)
    if conf.vertex is not None:
        yield Step(conf.vertex, conf.name, conf.fields, path)
    if conf.vertex is not None or not conf.fields:
        return
    layer = conf.fields.get("layer")
    found = typed(layer)
    if found is None:
        raise NoDl4jNetwork(path, f"{conf.name} has layer={layer!r}")
    variables = conf.fields.get("variables") or []
    if not isinstance(variables, list):
        raise NoDl4jNetwork(path, f"{conf.name} has variables={variables!r}")
    for step in _layer_steps(path, conf.name, found):
        yield replace(step, variables=tuple(map(str, variables)))


def _layer_steps(path: str, default: str, found: Typed) -> Iterator[Step]:
    """Wrappers are taken off: a frozen layer is frozen, the last time step is a step behind."""
    kind = LAYERS.get(found.kind, found.kind)
    name = str(found.fields.get("layername") or default)
    if kind in FROZEN or kind == LAST_STEP:
        inner = typed(found.fields.get("layer", found.fields.get("underlying")))
        if inner is not None:
            for step in _layer_steps(path, name, inner):
                frozen, ends = kind in FROZEN, kind == FROZEN[0]
                yield replace(
                    step,
                    frozen=step.frozen or frozen,
                    ends_training=step.ends_training or ends,
                )
        if kind == LAST_STEP:
            yield Step(kind, f"{name} last", found.fields, path)
        return
    step = Step(kind, name, found.fields, path)
    if kind not in SUPPORTED:
        raise step.refuse("sparkstrom has no such layer")
    yield _both_ways(step) if kind == "bidirectional" else step


def _both_ways(step: Step) -> Step:
    """With the options of the layer that is in it: the one forwards says how both are trained."""
    ways = [typed(step.fields.get(name)) for name in ("fwd", "bwd")]
    if any(way is None or way.kind not in RECURRENT for way in ways):
        kinds = " and ".join("nothing" if way is None else way.kind for way in ways)
        raise step.refuse(f"there is {kinds} in it")
    forwards = ways[0]
    assert forwards is not None
    fields = {**forwards.fields, "mode": step.fields.get("mode"), "within": forwards.kind}
    return replace(step, fields=fields)


def _preprocessors(path: str, layer: str, value: Any) -> Iterator[Step]:
    found = typed(value)
    if found is None:
        raise NoDl4jNetwork(path, f"the preprocessor of {layer} is {value!r}")
    kind = PREPROCESSORS.get(found.kind, found.kind)
    if kind == "composableinputpreprocessor":
        listed = found.fields.get("inputpreprocessors") or []
        if not isinstance(listed, list):
            raise NoDl4jNetwork(path, f"the preprocessors of {layer} are {listed!r}")
        for one in listed:
            yield from _preprocessors(path, layer, one)
        return
    step = Step(kind, f"before {layer}", found.fields, path)
    if kind not in RESHAPING:
        raise step.refuse("sparkstrom has no such preprocessor")
    yield step


def _check_ends(path: str, steps: list[Step]) -> None:
    """One loss, and that at the end."""
    for step in steps[:-1]:
        if step.kind in ENDS:
            raise step.refuse("it has a loss, and is not the last layer")


def _untrainable(conf: dict[str, Any]) -> Iterator[str]:
    """Of one NeuralNetConfiguration."""
    algorithm = str(conf.get("optimizationalgo", "stochastic_gradient_descent")).lower()
    if algorithm != "stochastic_gradient_descent":
        yield f"optimizationAlgo {algorithm.upper()}"
    if conf.get("minibatch", True) is False:
        yield "miniBatch=false: gradients that are sums over a minibatch"
    if conf.get("minimize", True) is False:
        yield "minimize=false: a score that is to grow"
    if conf.get("usedropconnect", False) is True:
        yield "useDropConnect"
    policy = str(conf.get("learningratepolicy") or "none").lower()
    if policy != "none":  # of 0.9 and earlier
        yield f"learningRatePolicy {policy}"
