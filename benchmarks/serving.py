"""Serving: requests of 64 threads to one model in each mode, and predictions for a table.

    python -m benchmarks.serving --json
    python -m benchmarks.serving --rows 10000000 --json

Each of ``--clients`` threads requests a prediction for one row, and sends the next request when it
has the answer. The modes are measured in turns, each ``--pairs`` times. One object per mode:

    requests_s       requests per second, median
    p50_ms, p99_ms   time of a request
    x_sequential     requests per second, relative to SEQUENTIAL

The last object is a run in mode BATCHED in which the model is ``replaced`` 20 times. ``mixed``
counts answers that are of no single model, and ``dropped`` requests without an answer.

With ``--rows``, ``network.udf()`` and Spark's ``predict_batch_udf`` predict this number of rows
with ``--width`` floats by the same NumPy network, on local[2]: rows per second, the median of
``--pairs`` runs in turns after a first one that does not count, and the peak of resident memory
(VmHWM) of the largest Python worker in MiB.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np

from sparkstrom import InferenceMode, ParallelInference
from sparkstrom.models import DenseNetwork

WIDTHS = [64, 512, 512, 10]
REPLACED = 20


def main() -> int:
    """Print one line per case."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--clients", type=int, default=64, help="threads that send requests")
    parser.add_argument("--workers", type=int, default=2, help="of ParallelInference")
    parser.add_argument("--batch-limit", type=int, default=64, help="rows")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--pairs", type=int, default=3, help="measurements of each case")
    parser.add_argument("--model", choices=["dense", "torch"], default="dense")
    parser.add_argument("--rows", type=int, default=0, help="predict a table of this size instead")
    parser.add_argument("--width", type=int, default=64, help="of the table: floats of a row")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    args = parser.parse_args()
    tables = args.rows > 0
    results = measure_tables(args.rows, args.width, args.pairs) if tables else measure_modes(args)
    for found in results:
        words = ", ".join(f"{name} {value}" for name, value in found.items())
        print(json.dumps(found) if args.json else words, flush=True)
    return 0


# -- clients ---------------------------------------------------------------------------------------


def measure_modes(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure all modes in turns, then the replacement of models; yield the figures."""
    model = make_model(args.model)
    runs: dict[InferenceMode, list[list[float]]] = {mode: [] for mode in InferenceMode}
    for _ in range(args.pairs):
        for mode, times in runs.items():
            times.append(measure_requests(model, mode, args))
    rates = {mode: median(len(run) / args.seconds for run in times) for mode, times in runs.items()}
    for mode, times in runs.items():
        all_ms = 1000 * np.sort(np.concatenate(times))
        yield {
            "mode": mode.value,
            "model": args.model,
            "clients": args.clients,
            "requests_s": round(rates[mode], 1),
            "x_sequential": round(rates[mode] / rates[InferenceMode.SEQUENTIAL], 2),
            "p50_ms": round(float(np.quantile(all_ms, 0.5)), 2),
            "p99_ms": round(float(np.quantile(all_ms, 0.99)), 2),
        }
    yield replace_models(args)


def make_model(kind: str) -> Any:
    """Return a network of the same layers, in NumPy (``dense``) or torch."""
    if kind == "dense":
        return DenseNetwork(WIDTHS, seed=1)
    from functools import partial
    from itertools import pairwise

    import torch

    from sparkstrom.models.torch import TorchModel

    layers: list[Any] = []
    for wide, narrow in pairwise(WIDTHS):
        layers += [torch.nn.Linear(wide, narrow), torch.nn.ReLU()]
    module = torch.nn.Sequential(*layers[:-1])
    return TorchModel(module, torch.nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=0.1))


def measure_requests(model: Any, mode: InferenceMode, args: argparse.Namespace) -> list[float]:
    """Serve a model to all clients; return the seconds of each of their requests."""
    row = np.random.default_rng(0).random((1, WIDTHS[0]), np.float32)
    times: list[list[float]] = [[] for _ in range(args.clients)]
    with make_server(model, mode, args) as inference:
        inference.output(row)
        until_s = time.monotonic() + args.seconds

        def send_requests(own: list[float]) -> None:
            while (began_s := time.monotonic()) < until_s:
                inference.output(row)
                own.append(time.monotonic() - began_s)

        run_all([threading.Thread(target=send_requests, args=(own,)) for own in times])
    return [one for own in times for one in own]


def make_server(model: Any, mode: InferenceMode, args: argparse.Namespace, **more: Any) -> Any:
    """Return a server whose queue has room for all clients."""
    return ParallelInference(
        model,
        workers=args.workers,
        batch_limit=args.batch_limit,
        queue_limit=args.clients,
        inference_mode=mode,
        **more,
    )


def run_all(threads: list[threading.Thread]) -> None:
    """Run threads until all have ended."""
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def replace_models(args: argparse.Namespace) -> dict[str, Any]:
    """Replace the model while clients send requests; count mixed and missing answers.

    All outputs of one model are equal, so an answer with two values is of two models.
    """
    model = DenseNetwork([4, 8], loss="squared_error", seed=1)

    def make_parameters(value: float) -> Any:
        parameters = np.zeros(model.n_params, np.float32)
        parameters[-8:] = value  # the biases
        return parameters

    rows = np.zeros((4, 4), np.float32)
    counts = {"asked": 0, "answered": 0, "mixed": 0}
    lock, done = threading.Lock(), threading.Event()
    first = make_parameters(0)
    with make_server(model, InferenceMode.BATCHED, args, parameters=first) as inference:

        def send_requests() -> None:
            while not done.is_set():
                with lock:
                    counts["asked"] += 1
                answer = inference.output(rows)
                with lock:
                    counts["answered"] += 1
                    counts["mixed"] += len(np.unique(answer)) != 1

        def replace() -> None:
            for value in range(REPLACED):
                inference.update_model(model, parameters=make_parameters(value))
                time.sleep(args.seconds / REPLACED)
            done.set()

        clients = [threading.Thread(target=send_requests) for _ in range(args.clients)]
        run_all([*clients, threading.Thread(target=replace)])
    dropped = counts["asked"] - counts["answered"]
    return {"replaced": REPLACED, **counts, "dropped": dropped}


# -- a table ---------------------------------------------------------------------------------------


def measure_tables(rows: int, width: int, pairs: int) -> Iterator[dict[str, Any]]:
    """Predict a table with ``network.udf`` and ``predict_batch_udf``; yield the figures."""
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as sql

    from sparkstrom import SparkNetwork

    session = SparkSession.builder.master("local[2]").appName("serving").getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    network = SparkNetwork(session, DenseNetwork([width, 64, 10], seed=1), progress=False)
    frame = session.range(rows, numPartitions=8).select(
        sql.transform(
            sql.sequence(sql.lit(1), sql.lit(width)),
            lambda i: ((sql.col("id") * i) % 97 / 97).cast("float"),
        ).alias("x")
    )
    functions = {"network.udf": network.udf(), "predict_batch_udf": make_batch_udf(network, width)}
    found: dict[str, Any] = {}
    made = {
        name: frame.select(sql.sum(function("x")[0]).alias("sum"), sql.count("*").alias("rows"))
        for name, function in functions.items()
    }
    rates: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(1 + pairs):  # the first compiles code for the others
        for name, asked in made.items():
            began_s = time.monotonic()
            found[name] = asked.first()
            if turn:
                rates[name].append(rows / (time.monotonic() - began_s))
    for name, totals in found.items():
        yield {
            "function": name,
            "rows": totals["rows"],
            "rows_s": round(statistics.median(rates[name])),
            "peak_mib": max(read_peaks_mib(session)),
            "sum": round(totals["sum"], 3),
        }
    session.stop()


def make_batch_udf(network: Any, width: int) -> Any:
    """Return a ``predict_batch_udf`` of the same network, as users of Spark write it."""
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql.types import ArrayType, FloatType

    model, parameters = network.model, network.parameters

    def make() -> Any:
        model.bind(parameters)
        return lambda x: model.predict(x)

    return predict_batch_udf(
        make,
        return_type=ArrayType(FloatType()),
        batch_size=1024,
        input_tensor_shapes=[[width]],
    )


def read_peaks_mib(session: Any) -> list[int]:
    """Return the peaks of resident memory (VmHWM) of the Python workers, in MiB."""

    def of_worker(_: Any) -> Iterator[int]:
        with open("/proc/self/status") as status:
            line = next(line for line in status if line.startswith("VmHWM"))
        yield int(line.split()[1]) >> 10

    found: list[int] = (
        session.sparkContext.parallelize(range(4), 4).mapPartitions(of_worker).collect()
    )
    return found


if __name__ == "__main__":
    sys.exit(main())
