"""Make this environment's Python import pyspark from its folder, not from Spark's archives.

Spark puts ``pyspark.zip``, Py4J's archive and a jar on the import path of all Python processes that
it starts. The archives contain only sources, which each process compiles, and Python 3.11 reads the
directories of all three again for every task: a third of the processor time of the suite's Python
workers. ``python -m tests.pyspark_folder`` writes a path file (``.pth``) that removes them from the
import path when Python starts; pyspark is installed here anyway. The suite also runs without it.
"""

from __future__ import annotations

import site
from pathlib import Path

PATH_FILE = "pyspark_from_its_folder.pth"
VARIABLE = "SPARKSTROM_SUITE"  # without it, as in benchmarks, the path file does nothing
# Python executes the lines of a path file that begin with "import".
LINE = f"""import os, sys; [(sys.path.remove(path), sys.path_importer_cache.pop(path, None)) \
for path in sys.path[:] if "{VARIABLE}" in os.environ \
and "/pyspark/" in path and path.endswith((".zip", ".jar"))]
"""


def write_path_file(folder: Path) -> None:
    """Write the path file into a folder of installed packages."""
    (folder / PATH_FILE).write_text(LINE)


if __name__ == "__main__":
    write_path_file(Path(site.getsitepackages()[0]))
