"""Fuzz the readers of files: from any content, only declared errors may be raised.

    python -m tests.fuzz.files                        # 2,000 mutations of each kind of file
    python -m tests.fuzz.files network --mutations 20000 --seed 7

A mutation changes bytes of a file, or replaces a value in a file that contains JSON. Checkpoints
whose description was changed get a matching digest. Prints a line for each kind. Ends with exit
code 1 at the first input that raises anything else, and prints the folder that contains it.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import random
import shutil
import sys
import tempfile
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkstrom.base.errors import SparkstromError
from sparkstrom.checkpoint.files import (
    Checkpoint,
    read_untrusted_checkpoint,
    write_checkpoint,
)
from sparkstrom.checkpoint.saved_model import load_model, save_model
from sparkstrom.fit.checkpoints import read_resume_point
from sparkstrom.models import DenseNetwork, from_dl4j
from sparkstrom.models.base import from_description
from sparkstrom.models.updaters import Adam
from sparkstrom.observe.reporting.report_page import render_report
from sparkstrom.observe.reporting.run_log_reader import read_history
from sparkstrom.options.resolution import from_json
from tests.conformance.dl4j_files import draw_normal, f, layer, network, output, write
from tests.fuzz.mutation import MUTATIONS

GOLDEN = Path(__file__).parents[1] / "golden"
MEMORY_BYTES_MAX = 32 * 2**20  # files have some KiB
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, -7, 2**31, 2**63, 2**70, 0.5, -1e308, 1e999, float("nan")),
    *("", "x", "dense", "tanh", "\0", "9" * 400, [], [1], [[]], {}, {"kind": "keras"}, {"a": 1}),
)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of file: ``make`` writes a valid one into a folder, ``load`` reads it from there."""

    make: Callable[[Path], None]
    load: Callable[[Path], Any]


def _make_copier(*names: str) -> Callable[[Path], None]:
    """Return a function that copies these golden files to a folder."""

    def copy_all(folder: Path) -> None:
        for name in names:
            shutil.copy(GOLDEN / name, folder / Path(name).name)

    return copy_all


def _save_with_current_version(folder: Path) -> None:
    """Save a network with the current version."""
    model, parameters, epochs = load_model(GOLDEN / "network.npz")
    save_model(folder / "network.npz", model.describe(), parameters, epochs)


def _dense_dl4j(folder: Path) -> None:
    """Write a network of two dense layers in the format of DL4J 1.0.0-M2."""
    told = network(layer("DenseLayer", act="TanH", nin=4, nout=3), output(3, 2, act="Softmax"))
    arrays = (
        f(draw_normal(1, 4, 3)),
        draw_normal(2, 3),
        f(draw_normal(3, 3, 2)),
        draw_normal(4, 2),
    )
    write(folder / "dl4j.zip", told, *arrays)


def _model() -> DenseNetwork:
    return DenseNetwork([4, 3, 2], hidden="relu", loss="cross_entropy", updater=Adam(0.01), seed=3)


def _resume(folder: Path) -> None:
    path = folder / "checkpoint.npz"
    with path.open("rb") as file:
        read_resume_point(str(path), read_untrusted_checkpoint(file, str(path)), _model())


def _estimator(folder: Path) -> None:
    """Read our part of an estimator's metadata, as loading an estimator does."""
    from sparkstrom.spark.ml.persistence import _explain_damage

    path = folder / "part-00000.txt"
    with _explain_damage(str(path)):
        ours = dict(json.loads(path.read_text("utf-8"))["sparkstrom"])
        described = ours.pop("model")
        if described is not None:
            from_description(described)
        for value in ours.values():
            if isinstance(value, dict):
                from_json(value)


KINDS = {
    "network": Kind(_save_with_current_version, lambda folder: load_model(folder / "network.npz")),
    "network of before": Kind(
        _make_copier("network.npz", "network.npz.json"),
        lambda folder: load_model(folder / "network.npz"),
    ),
    "checkpoint": Kind(_make_copier("checkpoint.npz"), _resume),
    "estimator": Kind(_make_copier("estimator/metadata/part-00000.txt"), _estimator),
    "run log": Kind(
        _make_copier("run.jsonl"), lambda folder: render_report(read_history(folder / "run.jsonl"))
    ),
    "dl4j": Kind(
        _dense_dl4j,
        lambda folder: from_dl4j(folder / "dl4j.zip"),
    ),
}


def iterate_places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container and key of a JSON value, at any depth."""
    keys: Any = tree.keys() if isinstance(tree, dict) else range(len(tree))
    for key in keys:
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from iterate_places(tree[key])


def replace_random_value(tree: Any, chance: random.Random) -> Any:
    """Return a copy in which one value is replaced or removed."""
    made = copy.deepcopy(tree)
    container, key = chance.choice([*iterate_places(made)])
    if isinstance(container, dict) and chance.random() < 0.1:
        del container[key]
    else:
        container[key] = chance.choice(VALUES)
    return made


def mutate(path: Path, chance: random.Random) -> None:
    """Change the file at random: a value of its JSON, or some of its bytes."""
    if path.name.endswith((".json", ".txt")) and chance.random() < 0.5:
        path.write_text(json.dumps(replace_random_value(json.loads(path.read_text()), chance)))
    elif path.name == "checkpoint.npz" and chance.random() < 0.7:
        with path.open("rb") as file:
            whole = read_untrusted_checkpoint(file, str(path))
        description = replace_random_value(whole.description, chance)
        sealed = io.BytesIO()
        write_checkpoint(Checkpoint(description, whole.arrays), sealed)
        path.write_bytes(sealed.getvalue())
    else:
        data = bytearray(path.read_bytes())
        for _ in range(chance.randint(1, 3)):
            chance.choice(MUTATIONS)(data, chance, [bytes(data)])
        path.write_bytes(bytes(data))


def fuzz(name: str, mutations: int, seed: int, root: Path) -> Counter[str]:
    """Return how often each declared error, or none, resulted; raise any other error."""
    kind, chance, outcomes = KINDS[name], random.Random(seed), Counter[str]()
    folder = root / "file"
    for _ in range(mutations):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        kind.make(folder)
        mutate(chance.choice(sorted(folder.iterdir())), chance)
        try:
            kind.load(folder)
            outcomes["read"] += 1
        except SparkstromError as error:
            if not any(path.name in str(error) for path in folder.iterdir()):
                raise AssertionError(f"no file is named: {error}") from error
            outcomes[type(error).__name__] += 1
    return outcomes


def main() -> int:
    """Fuzz the named kinds, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.files", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--mutations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in args.kinds or KINDS:
        root = Path(tempfile.mkdtemp(prefix="sparkstrom-fuzz-"))
        tracemalloc.start()
        try:
            outcomes = fuzz(name, args.mutations, args.seed, root)
        except BaseException:
            print(f"{name}: the input is in {root}", file=sys.stderr)
            raise
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        print(f"{name}: {dict(outcomes)}, at most {peak / 2**20:.0f} MiB", flush=True)
        shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
