"""Two fits in threads of one session leave its configuration as it was."""

from __future__ import annotations

import threading

from sparkstrom.spark.data.partitioning import BATCH_ROWS, at_most


class Conf(dict[str, str]):
    """A session's configuration."""

    def set(self, name: str, value: str) -> None:
        self[name] = value


def test_the_number_of_rows_is_put_back_whoever_else_changes_it() -> None:
    conf, seen = Conf({BATCH_ROWS: "10000"}), []
    inside = threading.Event()

    def second() -> None:
        with at_most(conf, 32):
            seen.append(conf[BATCH_ROWS])

    with at_most(conf, 1000):
        other = threading.Thread(target=lambda: (inside.set(), second()))
        other.start()
        inside.wait(10)
        assert conf[BATCH_ROWS] == "1000"
    other.join(10)
    assert seen == ["32"]
    assert conf[BATCH_ROWS] == "10000"


def test_fewer_rows_of_the_user_stay_fewer() -> None:
    conf = Conf({BATCH_ROWS: "7"})
    with at_most(conf, 1000):
        assert conf[BATCH_ROWS] == "7"
