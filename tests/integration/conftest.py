"""Fixtures with a real Spark Connect server on loopback and the results of its client programs.

Clients are separate processes: pyspark supports only one kind of Spark session per process.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from scripts.several_examples import read_answers

HERE, ROOT = Path(__file__).parent / "connect", Path(__file__).parents[2]
CLUSTER = "local-cluster[2,2,1024]"
SETTINGS = (
    "spark.sparkstrom.lease_s=7",
    "spark.python.daemon.module=sparkstrom.spark.daemon",
)
CLIENT_S = 1500.0  # time limit of the client that runs all programs
ON_JAX = {"jax": "optax", "keras": "keras"}  # the library that each kind of model needs
FITS, ROUNDS = HERE / "fits_of_a_client.py", HERE / "rounds_of_a_client.py"
BACKENDS = ROOT / "tests/integration/rounds/cases.py"
os.environ.setdefault("KERAS_BACKEND", "jax")  # in this process, its clients and the executors


def environment(**more: str) -> dict[str, str]:
    """Return environment variables for the server, its executors and its clients."""
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    own = {"PYTHONPATH": os.pathsep.join(paths), "PYSPARK_PYTHON": sys.executable}
    return {**os.environ, **own, "SPARK_LOCAL_IP": "127.0.0.1", "OMP_NUM_THREADS": "1", **more}


@pytest.fixture(scope="session")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The URL of a server whose application has two executors of two slots each."""
    folder = tmp_path_factory.mktemp("connect")
    slow = any(item.get_closest_marker("slow") for item in request.session.items)
    preloaded = "pyarrow,pandas" + ",torch" * slow  # the quick parts train no torch model
    command = [sys.executable, str(HERE / "connect_server.py"), CLUSTER, *SETTINGS]
    command += [f"spark.executorEnv.SPARKSTROM_PRELOAD={preloaded}"]
    with (
        open(folder / "server.log", "wb") as log,
        subprocess.Popen(
            command,
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
            process.stdin.close()  # ends the server and its executors
            process.wait()


class Answers:
    """The results of a client program by part, from the JSON in the last line that it printed."""

    def __init__(self, status: int, printed: str) -> None:
        self._status, self._printed = status, printed

    def __getitem__(self, part: str) -> dict[str, Any]:
        assert self._status == 0, self._printed
        answer: dict[str, Any] = json.loads(self._printed.splitlines()[-1])[part]
        assert "failed" not in answer, answer["failed"]
        return answer


@pytest.fixture(scope="session")
def answers(
    server: str,
    kinds: list[str],
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[Path, Answers]:
    """The results of the client process, by program; each program belongs to one test file.

    Each client starts its own Python workers on the executors, hence one client for all files.
    """
    from tests.integration.rounds.cases import CASES

    programs = {  # by test file: a program, its parts for quick tests, and those for slow ones
        "connect/test_connect.py": (
            FITS,
            ("dense",),
            ("large", "torch", "jax", "keras", "dies", "estimator", "rehearsal", "refusals"),
        ),
        "rounds/test_backends.py": (BACKENDS, (), tuple(CASES)),
        # From the part "dies" on, messages are cut into small pieces, as for a large model.
        "connect/test_connect_averaging.py": (
            ROUNDS,
            ("union",),
            ("torch", "ends", "jax", "dies", "diloco", "keras"),
        ),
    }
    commands = {}
    for file, (program, quick_parts, slow_parts) in programs.items():
        path = ROOT / "tests/integration" / file
        items = [item for item in request.session.items if item.path == path]
        slow = any(item.get_closest_marker("slow") for item in items)
        wanted = quick_parts + (slow_parts if slow else ())
        wanted = [part for part in wanted if part in kinds or part not in ON_JAX]
        if items and wanted:
            commands[program] = shlex.join([str(program), *wanted])
    try:
        done = subprocess.run(
            [sys.executable, str(ROOT / "scripts/several_examples.py"), *commands.values()],
            capture_output=True,
            text=True,
            timeout=CLIENT_S,
            cwd=tmp_path_factory.mktemp("client"),
            env=environment(SPARK_REMOTE=server),
            check=True,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(error.stdout, error.stderr)
        raise
    print(done.stdout, done.stderr[-6000:])
    ended = {answer.pop("command"): Answers(**answer) for answer in read_answers(done.stdout)}
    return {program: ended[command] for program, command in commands.items()}


@pytest.fixture(scope="session")
def kinds() -> list[str]:
    """The kinds of models on JAX whose libraries are installed."""
    return [kind for kind, library in ON_JAX.items() if find_spec(library)]
