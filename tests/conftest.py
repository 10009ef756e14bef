"""Settings of all tests: loopback, one Python for all processes, and a check for leaked threads."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Generator, Iterator
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
os.environ.setdefault("SPARKSTROM_RUNS", "")  # tests that want run logs set it

settings.register_profile("sparkstrom", deadline=None)  # a kernel's first call compiles it
settings.load_profile("sparkstrom")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also what is marked slow, as CI does")
    parser.addoption(
        "--claims",
        type=Path,
        metavar="DIRECTORY",
        help="run only files that no other run has claimed in this directory, and claim them",
    )
    parser.addoption("--backwards", action="store_true", help="begin with the last file")


def pytest_configure(config: pytest.Config) -> None:
    """Select slow tests only if all are wanted, or if the command names what to run."""
    named = config.args_source is pytest.Config.ArgsSource.ARGS or config.option.keyword
    if not (named or config.option.all or config.option.markexpr):
        config.option.markexpr = "not slow"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Make garbage collections rare, and exclude the million objects that tests import."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(50_000, 20, 20)
        gc.enable()


@pytest.fixture(autouse=True)
def check_no_leftover_threads() -> Iterator[None]:
    """Fail a test that leaves a thread which would keep the interpreter alive."""
    before = set(threading.enumerate())
    yield
    left = [thread.name for thread in threading.enumerate() if _would_linger(thread, before)]
    assert not left, f"threads left running: {left}"


def _would_linger(thread: threading.Thread, before: set[threading.Thread]) -> bool:
    """Return whether a thread was started by the test and would keep the interpreter alive."""
    return thread not in before and thread.is_alive() and not thread.daemon


SLOW_LEGS = ("gpu", "integration")  # run last, so that quick results come first
# Files whose tests share one Spark Connect client: the same run of pytest claims all of them.
OF_ONE_CLIENT = (
    "tests/integration/connect/test_connect.py",
    "tests/integration/connect/test_connect_averaging.py",
    "tests/integration/rounds/test_backends.py",
)
ENDS_THE_SESSION = "test_mesh_spark.py"  # stops the session that others share


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order tests by folder, with slow legs last and Spark's own first among them."""
    items.sort(
        key=lambda item: (
            _is_slow(item),
            item.path.name == ENDS_THE_SESSION,
            _is_slow(item) and _path(item) not in OF_ONE_CLIENT,  # OF_ONE_CLIENT takes longest
            _is_slow(item) and "spark" not in item.path.parts,
        )
    )
    if config.option.backwards:
        files = [list(file) for _, file in groupby(items, _claim)]
        items[:] = [item for file in reversed(files) for item in file]


def _claim(item: pytest.Item) -> str:
    """Return what a run of pytest claims as a whole: a file, or the files that share a client."""
    path = _path(item)
    return "one client" if path in OF_ONE_CLIENT else path.replace("/", ".")


def _path(item: pytest.Item) -> str:
    return str(item.path.relative_to(item.config.rootpath))


def _is_slow(item: pytest.Item) -> bool:
    return any(leg in item.path.parts for leg in SLOW_LEGS)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> object:
    """Run the tests like pytest, but only files that no run with the same directory has claimed.

    One run begins with the first file and one with the last, so that they end at the same time.
    """
    claims = session.config.option.claims
    if claims is None or session.config.option.collectonly or session.testsfailed:
        return None
    items = _claimed(session, claims)
    item = next(items, None)
    while item is not None:
        following = next(items, None)  # determines which fixtures end
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        item = following
    return True


def _claimed(session: pytest.Session, claims: Path) -> Iterator[pytest.Item]:
    """Claim the session's files one by one, and yield the tests of those that were free."""
    for claim, items in groupby(session.items, _claim):
        try:
            (claims / claim).mkdir()
        except FileExistsError:
            continue
        yield from items
