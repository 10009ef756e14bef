"""Tests of what training tasks import, and of the importers that they leave to later tasks."""

from __future__ import annotations

import importlib
import subprocess
import sys
import zipfile
from pathlib import Path
from zipimport import zipimporter

from sparkstrom.spark.executor.entry_points import forget_spark_archive_importers


def test_importers_of_spark_archives_are_dropped(tmp_path, monkeypatch):
    """Importers of Spark's archives are dropped; each would be read again for the next task."""
    for name in ("pyspark.zip", "added_by_user.zip"):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            package = f"package_in_{name.removesuffix('.zip')}"
            archive.writestr(f"{package}/__init__.py", "")
            archive.writestr(f"{package}/first.py", "")
            archive.writestr(f"{package}/second.py", "here = True")
        monkeypatch.syspath_prepend(str(tmp_path / name))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))

    def archives():
        importers = sys.path_importer_cache.values()
        return [Path(i.archive).name for i in importers if isinstance(i, zipimporter)]

    importlib.import_module("package_in_pyspark.first")
    importlib.import_module("package_in_added_by_user.first")
    assert archives().count("pyspark.zip") == 2  # for the archive and the package in it
    forget_spark_archive_importers()
    assert set(archives()) == {"added_by_user.zip"}
    assert importlib.import_module("package_in_pyspark.second").here


def test_training_tasks_import_no_unused_modules():
    """Training tasks import no unused modules: an executor's workers all import at one time."""
    modules = "sparkstrom.spark.executor.entry_points, sparkstrom.worker.training_task"
    program = f"import {modules}, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    imported = set(done.stdout.split())
    assert "sparkstrom.worker.training_task" in imported, done.stderr
    unused = {"asyncio", "fsspec", "numba", "pandas", "pyarrow", "sparkstrom.models.dl4j", "torch"}
    assert not imported & unused
