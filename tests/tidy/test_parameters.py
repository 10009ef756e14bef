"""A function of more than seven parameters wants a value that holds some of them.

Kernels have primitive arguments, as compiled code has: arrays, numbers, and memory for the answer.
A constructor may have more where it makes one value of many settings, or is what users call.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARAMETERS_MAX = 7
SOURCES = sorted((ROOT / "sparkstrom").rglob("*.py"))

KERNELS = {  # in encoding/, and the step that XLA compiles
    *("bitmap_local", "bitmap_replica", "read_sparse"),
    *("_find_chosen", "_find_levels", "_find_local", "_find_replica", "record"),
    *("_move_each", "_write", "_write_amounts", "_written"),
    "_next",
}
CONSTRUCTORS = {
    "TorchModel": "users name what they want",
    "SparkstromEstimator": "users name what they want; Spark ML's keywords",
    "Encoder": "one of its options each",
    "Batches": "the rows, and how they are dealt",
    "SimProcess": "a simulated process: what a world lends it",
    "AeronSender": "an address, and what is true of the way there",
    **dict.fromkeys(
        ("Deadlines", "Heartbeats", "Joining", "OptimizerTransfers", "Replication"),
        "the other parts of a node that it may touch, by name",
    ),
}


def wide(path: Path) -> dict[str, int]:
    """Functions with too many parameters, by class and name."""
    found: dict[str, int] = {}
    tree = ast.parse(path.read_text())
    owners = {
        id(child): node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for child in node.body
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            names = [one.arg for one in given if one.arg not in ("self", "cls")]
            if len(names) > PARAMETERS_MAX:
                owner = owners.get(id(node))
                is_constructor = node.name == "__init__" and owner is not None
                found[str(owner) if is_constructor else node.name] = len(names)
    return found


def is_excused(path: Path, name: str) -> bool:
    computes = path.parts[len(ROOT.parts) + 1] in ("encoding", "models")
    return name in CONSTRUCTORS or (computes and name in KERNELS)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_functions_take_few_parameters(path: Path) -> None:
    assert {name: n for name, n in wide(path).items() if not is_excused(path, name)} == {}


def test_every_exception_is_needed() -> None:
    found = {name for path in SOURCES for name in wide(path)}
    assert (KERNELS | CONSTRUCTORS.keys()) - found == set()
