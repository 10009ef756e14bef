"""Tests of the warning that a later attempt of an application resumes no checkpoint."""

from __future__ import annotations

from sparkstrom import SharedTrainingMaster
from sparkstrom.fit.trained_network import restart_warnings

SECOND = {"spark.app.attempt.id": "2", "spark.app.id": "application_7_0001"}


def get_restart_warning(**options: object) -> str:
    """Return the only warning of a second attempt with these options."""
    [warning] = restart_warnings(SECOND, SharedTrainingMaster(**options))
    assert warning.startswith("this is attempt 2 of application_7_0001, and it trains from the")
    return warning


def test_first_attempt_has_no_restart_warning() -> None:
    """There is no warning in the first attempt, or if Spark gives no attempt number."""
    first = SECOND | {"spark.app.attempt.id": "1"}
    assert restart_warnings(first, SharedTrainingMaster()) == []
    assert restart_warnings({"spark.app.id": "local-1"}, SharedTrainingMaster()) == []


def test_restart_warning_names_option_that_prevented_resuming() -> None:
    """The warning names the option that prevented resuming."""
    assert "saved nothing; set checkpoint_directory=... on" in get_restart_warning()
    assert "resume=False is set" in get_restart_warning(
        checkpoint_directory="hdfs:///7", resume=False
    )


def test_restart_warning_mentions_other_node_only_for_local_path() -> None:
    """For a local path, the warning adds that the last attempt may have run on another node."""
    for url, may in {"hdfs:///runs/7": False, "/runs/7": True, "file:///runs/7": True}.items():
        warning = get_restart_warning(checkpoint_directory=url, checkpoint_every="2 min")
        assert f"{url!r}: the last attempt ended before the first was written" in warning
        assert "checkpoint_every='2 min'" in warning
        assert ("ran on another node" in warning) == may
