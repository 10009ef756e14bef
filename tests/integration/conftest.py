"""A real Spark Connect server on loopback, and programs that are its clients.

Clients are processes of their own: pyspark talks to one kind of Spark in a process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
CLUSTER = "local-cluster[2,2,1024]"
SETTINGS = (
    "spark.sparkstrom.lease_s=7",
    "spark.python.daemon.module=sparkstrom.spark.daemon",
    "spark.executorEnv.SPARKSTROM_PRELOAD=pyarrow,pandas,torch",
)
CLIENT_S = 900.0
ON_JAX = {"jax": "optax", "keras": "keras"}  # kinds of models, and the library of each
os.environ.setdefault("KERAS_BACKEND", "jax")  # here, of clients, and of executors


def environment(**more: str) -> dict[str, str]:
    """Of the server, its executors and its clients."""
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    own = {"PYTHONPATH": os.pathsep.join(paths), "PYSPARK_PYTHON": sys.executable}
    return {**os.environ, **own, "SPARK_LOCAL_IP": "127.0.0.1", "OMP_NUM_THREADS": "1", **more}


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of one whose application has two executors of two slots each."""
    folder = tmp_path_factory.mktemp("connect")
    command = [sys.executable, str(HERE / "connect_server.py"), CLUSTER]
    with (
        open(folder / "server.log", "wb") as log,
        subprocess.Popen(
            [*command, *SETTINGS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=folder,
            env=environment(),
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            port = process.stdout.readline().decode().strip()
            assert port, (folder / "server.log").read_text()[-4000:]
            yield f"sc://127.0.0.1:{port}"
        finally:
            process.stdin.close()  # it ends, with its executors
            process.wait()


class Answers:
    """What a client said of each part of its program, as JSON in its last line."""

    def __init__(self, answers: dict[str, dict[str, Any]]) -> None:
        self._answers = answers

    def __getitem__(self, part: str) -> dict[str, Any]:
        answer = self._answers[part]
        assert "failed" not in answer, answer["failed"]
        return answer


@pytest.fixture(scope="session")
def client(server: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Answers]:
    """Run parts of a program, which are its arguments.

    Each client has Python workers of its own on the executors: one for many parts.
    """

    def run(program: Path, *parts: str) -> Answers:
        done = subprocess.run(
            [sys.executable, str(program), *parts],
            capture_output=True,
            text=True,
            timeout=CLIENT_S,
            cwd=tmp_path_factory.mktemp("client"),
            env=environment(SPARK_REMOTE=server),
        )
        print(done.stdout, done.stderr[-6000:])
        assert done.returncode == 0
        return Answers(json.loads(done.stdout.splitlines()[-1]))

    return run


@pytest.fixture(scope="session")
def kinds() -> list[str]:
    """The kinds of models whose libraries are installed, of those on JAX."""
    return [kind for kind, library in ON_JAX.items() if find_spec(library)]
