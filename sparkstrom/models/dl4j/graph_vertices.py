"""The vertices of a ComputationGraph in DL4J's order, which is that of their parameters.

1.0.0-beta4 and later say the order; before, it follows from the order of the JSON by DL4J's sort,
in which vertices wait in the order of Java's hash sets.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from sparkstrom.models.dl4j.dl4j_errors import NoDl4jNetwork, NotImported
from sparkstrom.models.dl4j.java_names import lowered, typed

INPUT = -1  # among sources: the network's own input
LAST_STEP = "lasttimestep"
ONE_END = "graphs of one input and one output are, in which each vertex leads to the output"
JOINS = ("merge", "elementwise")  # of several inputs; all others have one
CHANGES = (
    *("scale", "shift", "subset", "l2normalize", "reversetimeseries", "poolhelper", "reshape"),
)
OTHERS = ("layer", "preprocessor", LAST_STEP)


class Conf(NamedTuple):
    """A layer's NeuralNetConfiguration or a vertex without one, and where its input is from."""

    name: str  # unless the layer has another
    fields: dict[str, Any]  # keys in lower case
    before: Any  # a preprocessor
    sources: tuple[int, ...]  # numbers of others, or INPUT
    vertex: str | None = None  # its kind, where it is no layer


def vertices_of(path: str, top: dict[str, Any]) -> list[Conf]:
    """Of a ComputationGraphConfiguration. Raise NotImported for what has no end, or several."""
    inputs, outputs = top.get("networkinputs"), top.get("networkoutputs")
    vertices, sources = top["vertices"], top.get("vertexinputs")
    if not (isinstance(inputs, list) and isinstance(outputs, list) and isinstance(sources, dict)):
        raise NoDl4jNetwork(path, "the graph has no networkInputs, networkOutputs or vertexInputs")
    for names in (inputs, outputs, *sources.values()):
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise NoDl4jNetwork(path, f"{names!r} of the graph are no lists of names")
    if len(inputs) != 1 or len(outputs) != 1:
        what = f"{len(inputs)} inputs and {len(outputs)} outputs"
        raise NotImported(path, "the ComputationGraph", what, ONE_END)
    order = _ordered(path, top, inputs[0])
    numbers = {inputs[0]: INPUT, **{name: number for number, name in enumerate(order)}}
    used = {source for name in order for source in sources[name]} | {outputs[0]}
    for name in order:
        if name not in used or (name == outputs[0] and name != order[-1]):
            where = "nowhere" if name not in used else "on, and is an output"
            what = f"vertex {name!r} leads {where}"
            raise NotImported(path, "the ComputationGraph", what, ONE_END)
    return [
        _vertex(path, name, vertices[name], tuple(numbers[s] for s in sources[name]))
        for name in order
    ]


def _vertex(path: str, name: str, value: Any, sources: tuple[int, ...]) -> Conf:
    found = typed(lowered(value))
    if found is None:
        raise NoDl4jNetwork(path, f"vertex {name!r} is {value!r}")
    kind = found.kind.removesuffix("vertex")
    if kind not in (*JOINS, *CHANGES, *OTHERS):
        remedy = f"those are: {', '.join((*JOINS, *CHANGES, *OTHERS))}"
        raise NotImported(path, f"vertex {name!r}", f"it is a {found.kind}", remedy)
    if kind not in JOINS and len(sources) != 1:
        raise NoDl4jNetwork(path, f"vertex {name!r}, a {found.kind}, has {len(sources)} inputs")
    if kind == "layer":
        if not isinstance(found.fields.get("layerconf"), dict):
            raise NoDl4jNetwork(path, f"vertex {name!r} has no layerConf")
        return Conf(name, found.fields["layerconf"], found.fields.get("preprocessor"), sources)
    if kind == "preprocessor":
        return Conf(name, {}, found.fields.get("preprocessor"), sources)
    if kind == LAST_STEP:
        return Conf(name, found.fields, None, sources, LAST_STEP)
    return Conf(name, found.fields, None, sources, f"{kind}vertex")


def _ordered(path: str, top: dict[str, Any], start: str) -> list[str]:
    """All vertices, each behind its sources, without the input."""
    vertices, sources = top["vertices"], top["vertexinputs"]
    for name in vertices:
        unknown = {*sources.get(name, ())} - {*vertices, start}
        if unknown or not sources.get(name):
            raise NoDl4jNetwork(path, f"vertex {name!r} has inputs {sources.get(name)!r}")
    said = top.get("topologicalorderstr")
    order = said if isinstance(said, list) else _sorted([start, *vertices], sources)
    order = [name for name in order if name != start]
    done = {start}
    for name in order:
        known = isinstance(name, str) and name in vertices  # of JSON, it may be anything
        if not known or name in done or not {*sources[name]} <= done:
            raise NoDl4jNetwork(path, f"the graph's order is wrong at {name!r}")
        done.add(name)
    if len(order) != len(vertices):
        left = next(name for name in vertices if name not in done)
        raise NoDl4jNetwork(path, f"the graph never comes to {left!r}: it goes in a circle")
    return order


def _sorted(names: list[str], sources: dict[str, list[str]]) -> list[str]:
    """As ComputationGraph.calculateIndices does it."""
    number = {name: i for i, name in enumerate(names)}
    waits = {name: {*sources.get(name, ())} for name in names}
    made: list[str] = []
    ready = [name for name in names if not waits[name]]
    while ready:
        at = ready.pop(0)
        made.append(at)
        follows = [number[name] for name in names if at in sources.get(name, ())]
        for i in _as_hashed(follows):
            waits[names[i]].discard(at)
            if not waits[names[i]]:
                ready.append(names[i])
    return made


def _as_hashed(numbers: list[int]) -> Iterable[int]:
    """In the order of a java.util.HashSet: by bucket, of which there are 4/3 as many, or more."""
    buckets = 16
    while len(numbers) > buckets * 3 // 4:
        buckets *= 2
    return sorted(numbers, key=lambda number: (number ^ number >> 16) % buckets)
