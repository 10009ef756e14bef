"""Seconds from the call of ``fit`` to the first step, by phase, for the first fits of a session.

    python -m benchmarks.start --model dense,torch --sessions 3 [--preload] --json

Each session is a Spark application of its own on ``local-cluster[2,2,1024]``, whose executors have
started before the first call. A phase lasts from the end of the previous phase until its event has
happened, in the slowest worker. In their order:

    prepare    the driver program is about to submit the Spark job
    stage N    Spark has launched the first task of a stage
    imported   the model is unpickled, and what it needs is imported
    rows       the worker has its rows
    bound      the model has its parameters
    step       the first step is done

``cpu_seconds`` is the processor time of the driver program and all processes below it, from the
call to the summary.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks import start_models
from benchmarks.sessions import local_cluster
from sparkstrom import SharedTrainingMaster, SparkNetwork

WORKERS = 4
ROWS = 1437
EPOCHS = 2
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


MODELS = {"dense": start_models.make_dense, "torch": start_models.make_torch}


def main() -> int:
    """Print one line per fit, with medians over the sessions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="dense", help="dense, torch or both, by comma")
    parser.add_argument("--sessions", type=int, default=3)
    parser.add_argument("--fits", type=int, default=3, help="in each session")
    parser.add_argument("--preload", action="store_true", help="with sparkstrom's Python daemon")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    args = parser.parse_args()
    for name in args.model.split(","):
        results = [
            r for _ in range(args.sessions) for r in run_session(name, args.fits, args.preload)
        ]
        for number in range(args.fits):
            result = compute_medians([r for r in results if r["fit"] == number + 1])
            print(json.dumps(result) if args.json else format_result(result), flush=True)
    return 0


def run_session(name: str, fits: int, preload: bool) -> Iterator[dict[str, Any]]:
    """Run all fits of one application, and yield their figures."""
    conf = {"spark.python.daemon.module": "sparkstrom.spark.daemon"} if preload else {}
    if preload and name == "torch":
        conf["spark.executorEnv.SPARKSTROM_PRELOAD"] = "torch"
    with local_cluster(WORKERS, conf) as session, TemporaryDirectory() as scratch:
        marks = Path(scratch) / "marks"
        await_executors(session)
        chance = np.random.default_rng(0)
        features = chance.random((ROWS, 64), np.float32)
        rows = [(x, int(x[:10].argmax())) for x in features]
        data = session.sparkContext.parallelize(rows, WORKERS)
        model = MODELS[name]()
        model.marks = marks
        network = SparkNetwork(session, model, SharedTrainingMaster(), progress=False)
        for number in range(fits):
            yield {"model": name, "fit": number + 1} | run_fit(session, network, data, marks)
        network.close()


def run_fit(session: Any, network: Any, data: Any, marks: Path) -> dict[str, Any]:
    """Run one fit; return its seconds, in total and by phase."""
    jobs = read_launch_times(session)
    marks.write_text("")
    cpu_s, called_s, wall_s = read_cpu_seconds(), time.monotonic(), time.time()
    summary = network.fit(data, epochs=EPOCHS, run_log="")
    used_s = read_cpu_seconds() - cpu_s
    events = [json.loads(line) for line in marks.read_text().splitlines()]
    last = {
        name: max(m["s"] for m in events if m["name"] == name and m["pid"] != os.getpid())
        for name in ("imported", "rows", "bound", "step")
    }
    first_s = min(m["s"] for m in events if m["name"] == "step")
    stages = [(m - wall_s * 1000) / 1000 for m in read_launch_times(session)[len(jobs) :]]
    phases, before_s = {}, 0.0
    for name, s in [
        ("prepare", summary.phase_seconds["prepare"]),
        *((f"stage {i}", s) for i, s in enumerate(stages)),
        *((name, s - called_s) for name, s in last.items()),
    ]:
        phases[name], before_s = round(s - before_s, 3), s
    return {
        "first_step": round(first_s - called_s, 3),
        "last_step": round(last["step"] - called_s, 3),
        "seconds": round(summary.seconds, 3),
        "cpu_seconds": round(used_s, 2),
        "phases": phases,
    }


def read_launch_times(session: Any) -> list[int]:
    """Return when Spark launched the first task of each stage so far, in ms since 1970, sorted."""
    context = session.sparkContext
    quantiles = context._gateway.new_array(context._jvm.double, 0)
    stages = context._jsc.sc().statusStore().stageList(None, False, False, quantiles, None)
    found = [stages.apply(i).firstTaskLaunchedTime() for i in range(stages.size())]
    return sorted(launch.get().getTime() for launch in found if launch.isDefined())


def await_executors(session: Any) -> None:
    """Wait until both executors have started; do not start their Python workers."""
    status = session.sparkContext._jsc.sc()
    while status.getExecutorMemoryStatus().size() < 3:
        time.sleep(0.1)


def read_cpu_seconds() -> float:
    """Return the processor time of this process and all below it, with that of ended children."""
    table = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            fields = stat[stat.rindex(")") + 2 :].split()
            table[int(entry.name)] = (int(fields[1]), sum(map(int, fields[11:15])))
    ours = {os.getpid()}
    while below := {pid for pid, (parent, _) in table.items() if parent in ours} - ours:
        ours |= below
    return sum(table[pid][1] for pid in ours) * TICK_S


def compute_medians(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median over the sessions of each figure."""
    first = results[0]
    numbers = [name for name in first if name not in ("model", "fit", "phases")]
    return {
        "model": first["model"],
        "fit": first["fit"],
        "sessions": len(results),
        **{name: round(statistics.median(r[name] for r in results), 3) for name in numbers},
        "first_steps": [r["first_step"] for r in results],
        "phases": {
            name: round(statistics.median(r["phases"][name] for r in results), 3)
            for name in first["phases"]
        },
    }


def format_result(result: dict[str, Any]) -> str:
    """Return a result as text."""
    phases = ", ".join(f"{name} {s:.2f}" for name, s in result["phases"].items())
    return (
        f"{result['model']}, fit {result['fit']}: first step after {result['first_step']:.2f} s "
        f"(all {result['last_step']:.2f}), CPU {result['cpu_seconds']:.1f} s: {phases}"
    )


if __name__ == "__main__":
    sys.exit(main())
