"""Tests of the benchmark ``benchmarks.start``, which measures the start of a fit."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import start


class SessionOpened(Exception):
    """Raised in place of opening a session."""


@pytest.mark.parametrize(("name", "modules"), [("torch", "torch"), ("dense", None)])
def test_preload_option_sets_executor_variable_and_daemon(
    monkeypatch: pytest.MonkeyPatch, name: str, modules: str | None
) -> None:
    """``--preload`` sets the variable on executors, where the daemon reads it."""

    def local_cluster(workers: int, conf: Any) -> Any:
        raise SessionOpened(conf)

    monkeypatch.setattr(start, "local_cluster", local_cluster)
    with pytest.raises(SessionOpened) as opened:
        next(start.run_session(name, 1, preload=True))
    (conf,) = opened.value.args
    assert conf["spark.python.daemon.module"] == "sparkstrom.spark.daemon"
    assert conf.get("spark.executorEnv.SPARKSTROM_PRELOAD") == modules
    with pytest.raises(SessionOpened) as opened:
        next(start.run_session(name, 1, preload=False))
    assert opened.value.args == ({},)
