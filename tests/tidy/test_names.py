"""Tests of the package's names: docstrings, errors that can be pickled, and quick imports."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import sparkstrom
from sparkstrom.base.errors import SparkstromError, UsageError

SAMPLES: dict[str, object] = {"int": 7, "float": 1.5, "str": "why", "bool": True}


def modules() -> list[str]:
    root = Path(sparkstrom.__path__[0])
    paths = sorted(path.relative_to(root.parent) for path in root.rglob("*.py"))
    return [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths]


def imported_modules() -> list[ModuleType]:
    """Return the modules of the package, without adapters whose library is not installed."""
    found = []
    for name in modules():
        with contextlib.suppress(UsageError):
            found.append(importlib.import_module(name))
    return found


def test_every_exported_name_exists_and_has_a_docstring() -> None:
    kinds = (inspect.isclass, inspect.isroutine, inspect.ismodule)
    assert [
        f"{module.__name__}.{public}"
        for module in imported_modules()
        for public in getattr(module, "__all__", ())
        for value in [getattr(module, public)]
        if any(kind(value) for kind in kinds) and not inspect.getdoc(value)
    ] == []


def test_error_classes_pickle_with_all_fields() -> None:
    errors = [error for module in imported_modules() for error in errors_of(module)]
    assert errors
    for error in errors:
        raised = error(*sample_arguments(error))
        copy = pickle.loads(pickle.dumps(raised))
        assert type(copy) is error
        assert copy.args == raised.args
        assert vars(copy) == vars(raised)
        assert str(copy) == str(raised)
        assert inspect.getdoc(error)


def errors_of(module: ModuleType) -> list[type[SparkstromError]]:
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, SparkstromError)
        and value.__module__ == module.__name__
    ]


def sample_arguments(error: type[SparkstromError]) -> list[object]:
    """Return arguments for an error, by the types of its parameters."""
    if error.__init__ is Exception.__init__ or "__init__" not in dir_of_ours(error):
        return ["a message"]
    parameters = list(inspect.signature(error).parameters.values())
    return [SAMPLES[str(parameter.annotation)] for parameter in parameters]


def dir_of_ours(error: type[SparkstromError]) -> set[str]:
    """Return the names that are defined by sparkstrom's classes among the error's bases."""
    ours = [base for base in error.__mro__ if base.__module__.startswith("sparkstrom")]
    return {name for base in ours for name in vars(base)}


def test_unknown_package_attribute_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'SharedTrainingMonster'"):
        _ = sparkstrom.SharedTrainingMonster
    assert set(sparkstrom.__all__) == set(dir(sparkstrom))


IMPORT = """
import os, sys, threading, time
start = time.perf_counter()
import sparkstrom
seconds = time.perf_counter() - start
heavy = {"numpy", "numba", "pyspark", "pyarrow", "cffi", "msgspec", "cryptography", "socket"}
print(seconds)
print(sorted(heavy & sys.modules.keys()))
print(threading.active_count())
files = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
print([file for file in files if "socket" in file])
"""


def test_package_import_is_quick_and_loads_no_heavy_module() -> None:
    answers = [
        subprocess.run(
            [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        for _ in range(3)
    ]
    assert [answer[1:] for answer in answers] == [["[]", "1", "[]"]] * 3
    assert min(float(answer[0]) for answer in answers) < 0.3


def test_options_can_be_imported_without_pyspark() -> None:
    program = """
import sys
sys.modules["pyspark"] = None
from sparkstrom import SharedTrainingMaster
import sparkstrom.options.resolution
print(SharedTrainingMaster().batch_size_per_worker)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout == "32\n", done.stderr
