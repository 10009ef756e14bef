"""Summary groups: a summary's figures in words, in the order in which people ask for them.

They are made of ``TrainingSummary.to_dict()``, as it is or as a run log holds it, so that a page
of an older or a damaged log leaves out what is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparkstrom.observe.reporting.plain_values import listing, mapping, number, text
from sparkstrom.observe.reporting.quantities import (
    byte_count,
    count,
    duration,
    figure,
    plural,
    times,
)

WORKERS_SHOWN = 32  # of each there is a row; all are in the dictionary
ACTIVITIES_SHOWN = 4  # that took longest

Row = tuple[str, str]
Figures = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a heading each."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    more: int = 0  # rows that are not shown


@dataclass(frozen=True, slots=True)
class Group:
    """Figures that belong together; any of the three may be empty."""

    title: str
    rows: list[Row]
    lines: tuple[str, ...] = ()
    table: Table | None = None


def headline(made: Figures) -> str:
    """What was trained, in one line."""
    workers, epochs = number(made.get("workers")), number(made.get("epochs"))
    before = number(made.get("epochs_resumed"))
    here = epochs - before if epochs is not None and before else epochs
    resumed = f", after {plural(before, 'epoch')} before it was resumed" if before else ""
    n_params = number(made.get("n_params"))
    of_what = "" if n_params is None else f" of {plural(n_params, 'parameter')}"
    return (
        f"{plural(workers, 'worker')} trained {plural(here, 'epoch')}{of_what} in"
        f" {duration(number(made.get('seconds')))}{resumed}"
    )


def result(made: Figures) -> Group:
    """What one looks for first."""
    rows = [("loss", _loss(number(made.get("loss")))), *_held_out(made)]
    rows += _best(made)
    if made.get("replicas_equal") is True:
        rows.append(("replicas", "equal by all bits, on the driver and all workers"))
    elif made.get("replicas_equal") is False:
        rows.append(("replicas", "NOT equal: see the warnings"))
    rows += [(name, text(made.get(key))) for name, key in ENDS if made.get(key)]
    rows += _speed(made)
    took, dense = number(made.get("bytes_sent")), number(made.get("bytes_dense"))
    less = times(took, dense) if took and dense and dense > took else ""
    sent = byte_count(number(made.get("bytes_sent")))
    rows.append(("sent", f"{sent} of updates" + (f", {less} than dense ones" if less else "")))
    return Group("Result", rows)


ENDS = (
    ("ended early", "stopped"),
    ("resumed from", "resumed_from"),
    ("checkpoint", "checkpoint"),
)


def warnings_in(made: Figures) -> list[str]:
    """All there are."""
    return [text(one) for one in listing(made.get("warnings"))]


def groups_of(made: Figures) -> list[Group]:
    """All figures but the result's; groups about which there is nothing to say are left out."""
    groups = [part(made) for part in PARTS]
    return [group for group in groups if group.rows or group.lines or group.table]


def _loss(value: float | None) -> str:
    if value is None:
        return "not a number: nobody finished an epoch, or it diverged"
    return f"{figure(value)} in the last epoch"


def _speed(made: Figures) -> list[Row]:
    """Return how fast it trained, over the phase of training where that is known."""
    phases = mapping(made.get("phase_seconds"))
    seconds = number(phases.get("train")) or number(made.get("seconds"))
    examples = number(made.get("examples"))
    if not seconds or not examples:
        return []
    return [("speed", f"{count(round(examples / seconds))} examples/s")]


def _held_out(made: Figures) -> list[Row]:
    """Of the last epoch, where rows were held out."""
    history = [mapping(one) for one in listing(made.get("history"))]
    last = history[-1] if history else {}
    judged = number(last.get("validation"))
    if judged is None:
        return []
    epoch = count(number(last.get("epoch")))
    return [("held-out rows", f"{figure(judged)} at the end of epoch {epoch}")]


def _best(made: Figures) -> list[Row]:
    best = mapping(made.get("best"))
    if not best:
        return []
    commit = number(best.get("commit"))
    kept = "" if commit is None else f"; its parameters (commit {count(commit)}) are delivered"
    judged = f"{text(best.get('metric'))} {figure(number(best.get('value')))}"
    return [("best epoch", f"{count(number(best.get('epoch')))}: {judged}{kept}")]


def _known(made: Figures, *named: tuple[str, str, Callable[[float | None], str]]) -> list[Row]:
    """Rows of what is there."""
    found = [(title, number(made.get(key)), say) for title, key, say in named]
    return [(title, say(value)) for title, value, say in found if value is not None]


def _training(made: Figures) -> Group:
    rows = _known(made, ("parameters", "n_params", count))
    done, expected = number(made.get("minibatches")), number(made.get("minibatches_expected"))
    if done is not None:
        before = number(made.get("minibatches_resumed"))
        resumed = f", {count(before)} of them before it was resumed" if before else ""
        rows.append(
            ("minibatches", f"{count(done)} of {count(expected)}, each counted once{resumed}")
        )
    held, trained = number(made.get("rows_held_out")), number(made.get("rows_trained"))
    if trained is not None:
        rows.append(("rows", f"{count(trained)} trained in every epoch, {count(held)} held out"))
    rows += _known(made, ("examples trained", "examples", count), ("updates", "updates", count))
    return Group("Training", [*rows, *_batch(made), *_horizons(made)])


def _batch(made: Figures) -> list[Row]:
    """As the optimizer sees it: each worker steps by its own, and a round has one of each."""
    own, whole = number(made.get("batch_size_per_worker")), number(made.get("effective_batch"))
    if own is None or whole is None:
        return []
    workers = plural(whole / own, "worker") if own else "no workers"
    return [("batch", f"{count(own)} rows a step; {count(whole)} in a round of {workers}")]


def _horizons(made: Figures) -> list[Row]:
    """What momentum and schedules became for so many workers."""
    changes = mapping(made.get("horizons"))
    said = ", ".join(
        f"{text(name)} {text(to)}" for name, to in changes.items() if name != "workers"
    )
    return [(f"for {text(changes.get('workers'))} workers", said)] if said else []


def _sending(made: Figures) -> Group:
    rows = _known(
        made,
        ("sent fraction", "sent_fraction", figure),
        ("threshold (tau)", "tau", figure),
        ("residual norm", "residual_norm", figure),
    )
    masses = (
        ("clipped", "mass_clipped"),
        ("scaled away", "mass_scaled_away"),
        ("lost", "mass_lost"),
    )
    lost = [(title, number(made.get(key))) for title, key in masses]
    rows += [(f"mass {title}", figure(value)) for title, value in lost if value]
    return Group("What updates hold", rows)


def _staleness(made: Figures) -> Group:
    def of(key: str) -> str:
        return figure(number(made.get(key)))

    if number(made.get("staleness_minibatches")) is None:
        return Group("", [])
    rows = [
        ("on the way", f"{of('staleness_minibatches')} minibatches of the others (max"
         f" {of('staleness_minibatches_max')})"),
        ("in commits", f"{of('staleness_mean')} (max {of('staleness_max')})"),
        ("in residuals", f"{of('residual_minibatches')} minibatches more"),
    ]  # fmt: skip
    return Group("How late learning arrives", rows)


def _bytes(made: Figures) -> Group:
    kinds = mapping(made.get("bytes_by_kind"))
    rows = [
        (text(kind).replace("_", " "), byte_count(number(size))) for kind, size in kinds.items()
    ]
    rows += _known(made, ("left interfaces", "bytes_wire", byte_count))
    rejected = number(made.get("rejected_frames"))
    if rejected:
        rows.append(("frames rejected", count(rejected)))
    return Group(
        "Bytes, each hop", rows, tuple(text(one) for one in listing(made.get("slow_links")))
    )


def _time(made: Figures) -> Group:
    phases = mapping(made.get("phase_seconds"))
    return Group("Time by phase", [(text(k), duration(number(v))) for k, v in phases.items()])


def _workers(made: Figures) -> Group:
    """A row for each of the first ones."""
    workers = [mapping(one) for one in listing(made.get("per_worker"))]
    if not workers:
        return Group("", [])
    activities = activities_of(workers)[:ACTIVITIES_SHOWN]
    columns = ("node", "partition", "host", "steps", "examples", "loss", "sent", *activities)
    rows = [
        (
            *(text(one.get(key)) for key in ("node", "partition", "host")),
            *(count(number(one.get(key))) for key in ("steps", "examples")),
            figure(number(one.get("loss"))),
            byte_count(number(one.get("bytes_sent"))),
            *(duration(spent(one, activity)) for activity in activities),
        )
        for one in workers[:WORKERS_SHOWN]
    ]
    more = max(0, len(workers) - WORKERS_SHOWN)
    return Group("Workers", [], table=Table(columns, rows, more))


def spent(worker: Figures, activity: str) -> float:
    """Seconds."""
    return max(0.0, number(mapping(worker.get("seconds")).get(activity)) or 0.0)


def activities_of(workers: list[dict[str, Any]]) -> list[str]:
    """What workers spent time with, the longest first."""
    total: dict[str, float] = {}
    for worker in workers:
        for name in mapping(worker.get("seconds")):
            total[name] = total.get(name, 0.0) + spent(worker, name)
    return sorted(total, key=lambda name: -total[name])


def _faults(made: Figures) -> Group:
    return Group("Faults survived", [], tuple(map(_fault, listing(made.get("faults")))))


def _fault(fault: Any) -> str:
    found = mapping(fault)
    seconds, node = number(found.get("seconds")), number(found.get("node"))
    when = "" if seconds is None else f"after {duration(seconds)}: "
    who = "" if node is None else f" (node {node:.0f}, partition {text(found.get('partition'))})"
    what, host = text(found.get("what")), text(found.get("host"))
    return f"{when}{what}{who} on {host}: {text(found.get('reason'))}"


PARTS: tuple[Callable[[Figures], Group], ...] = (
    _training, _staleness, _sending, _bytes, _time, _workers, _faults,
)  # fmt: skip
