"""Run Python programs one after the other in one Spark application, for tests and scripts/matrix.

Each argument is a program's command line, which may begin with variables as in a shell. The output
has a JSON object per program, with its exit status and its output. ``stop()`` of a session does
nothing, so that all programs use the same session.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import shlex
import sys
import traceback
from itertools import takewhile
from typing import Any
from unittest.mock import patch


def run(command: str) -> tuple[int, str]:
    """Run a program as ``__main__``; return its exit status and its standard output."""
    words, printed = shlex.split(command), io.StringIO()
    variables = dict(word.split("=", 1) for word in takewhile(lambda word: "=" in word, words))
    sys.argv = words[len(variables) :]
    with patch.dict(os.environ, variables), contextlib.redirect_stdout(printed):
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            return int(end.code or 0), printed.getvalue()
        except Exception:
            traceback.print_exc(file=printed)
            return 1, printed.getvalue()
    return 0, printed.getvalue()


def read_answers(printed: str) -> list[dict[str, Any]]:
    """Return the JSON objects from an application's output, in the order of the programs."""
    return [json.loads(line) for line in printed.splitlines() if line.startswith('{"command"')]


def main() -> None:
    """Run the programs of the command line in one session."""
    from pyspark.sql import SparkSession

    session = SparkSession.builder.getOrCreate()
    kind, stop = type(session), session.stop  # Spark Connect has another class
    kind.stop = lambda self: None
    for command in sys.argv[1:]:
        status, printed = run(command)
        print(json.dumps({"command": command, "status": status, "printed": printed}), flush=True)
    stop()


if __name__ == "__main__":
    main()
