"""Looks: rounds wait at an epoch's end for two of them, and for nobody who does not judge."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from sparkstrom.runtime.looks import Looks

LIMIT_S = 10.0


class Rounds:
    """A thread that is at an epoch's end."""

    def __init__(self, looks: Looks) -> None:
        self._thread = threading.Thread(target=looks.await_judgement, daemon=True)
        self._thread.start()

    def go_on(self, within_s: float = LIMIT_S) -> bool:
        self._thread.join(within_s)
        return not self._thread.is_alive()


@pytest.fixture
def looks() -> Iterator[Looks]:
    made = Looks(judged=True)
    yield made
    made.end()


def test_the_second_look_has_done_what_followed_from_the_first(looks: Looks) -> None:
    looks.add()  # of an earlier moment
    rounds = Rounds(looks)
    assert not rounds.go_on(0.1)
    looks.add()
    assert not rounds.go_on(0.1)
    looks.add()
    assert rounds.go_on()


def test_who_gives_up_judges_no_more(looks: Looks) -> None:
    rounds = Rounds(looks)
    assert not rounds.go_on(0.1)
    looks.end()
    assert rounds.go_on()
    assert Rounds(looks).go_on()


def test_where_nobody_judges_nobody_is_waited_for() -> None:
    assert Rounds(Looks(judged=False)).go_on()
