"""One YARN for all tests of this folder, where its jars are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.mini_yarn import Cluster, mini_yarn

JARS = os.environ.get("SPARKSTROM_YARN_JARS")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A ResourceManager and two NodeManagers."""
    if not JARS:
        pytest.skip(
            "no YARN here: set SPARKSTROM_YARN_JARS to a directory with "
            "hadoop-client-minicluster, bcpkix-jdk18on, bcutil-jdk18on and jaxb-api"
        )
    with mini_yarn(Path(JARS), tmp_path_factory.mktemp("yarn") / "home") as running:
        yield running
