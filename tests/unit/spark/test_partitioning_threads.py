"""Tests that limit_message_rows restores the session's setting, also if two threads use it."""

from __future__ import annotations

import threading

import pytest

from sparkstrom.spark.data import partitioning
from sparkstrom.spark.data.partitioning import ARROW_BATCH_ROWS_KEY, limit_message_rows


class Conf(dict[str, str]):
    """A fake of a session's configuration."""

    def set(self, name: str, value: str) -> None:
        self[name] = value


def test_message_rows_setting_is_restored_with_two_threads() -> None:
    """Two threads use their limits one after the other; then the user's number is restored."""
    conf, seen = Conf({ARROW_BATCH_ROWS_KEY: "10000"}), []

    def second() -> None:
        with limit_message_rows(conf, 32):
            seen.append(conf[ARROW_BATCH_ROWS_KEY])

    with limit_message_rows(conf, 1000):
        assert partitioning._CONF_LOCK.locked()  # a second thread waits
        other = threading.Thread(target=second)
        other.start()
    other.join(10)
    assert seen == ["32"]
    assert conf[ARROW_BATCH_ROWS_KEY] == "10000"


def test_smaller_user_limit_stays_in_force() -> None:
    """A smaller limit of the user stays in force."""
    conf = Conf({ARROW_BATCH_ROWS_KEY: "7"})
    with limit_message_rows(conf, 1000):
        assert conf[ARROW_BATCH_ROWS_KEY] == "7"


@pytest.mark.parametrize("unlimited", ["0", "-1"])
def test_unlimited_session_has_limit_only_within_block(unlimited: str) -> None:
    """A session without a limit has one during the block only."""
    conf = Conf({ARROW_BATCH_ROWS_KEY: unlimited})
    with limit_message_rows(conf, 1000):
        assert conf[ARROW_BATCH_ROWS_KEY] == "1000"
    assert conf[ARROW_BATCH_ROWS_KEY] == unlimited
