"""Compile Spark's Python modules once, in the archives that its Python workers import them from.

``pyspark.zip`` holds sources alone, so that each executor's daemon, and each worker, compiles what
it imports. A daemon's start takes 1.2 s of processor time, or 0.5 s with compiled modules.
``python -m tests.compiled_spark`` puts these beside the sources in the archives of this
environment, as Python would if the archives were folders. The suite also runs without that.
"""

from __future__ import annotations

import os
import py_compile
import tempfile
import zipfile
from pathlib import Path

UNCHECKED = py_compile.PycInvalidationMode.UNCHECKED_HASH


def compile_archive(archive: Path) -> None:
    """Put a compiled module beside each source, and replace the archive when it is whole."""
    with zipfile.ZipFile(archive) as opened:
        names = opened.namelist()
    if any(name.endswith(".pyc") for name in names):
        return
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        new = Path(folder, archive.name)
        new.write_bytes(archive.read_bytes())
        with zipfile.ZipFile(archive) as opened, zipfile.ZipFile(new, "a") as growing:
            growing.compression = zipfile.ZIP_DEFLATED
            for name in names:
                if name.endswith(".py") and "/tests/" not in name:
                    source = opened.extract(name, folder)
                    shown = str(archive / name)  # in tracebacks
                    py_compile.compile(
                        source, f"{source}c", shown, doraise=True, invalidation_mode=UNCHECKED
                    )
                    growing.write(f"{source}c", f"{name}c")
        os.replace(new, archive)


def main() -> None:
    import pyspark

    for archive in Path(pyspark.__path__[0], "python/lib").glob("*.zip"):
        compile_archive(archive)


if __name__ == "__main__":
    main()
