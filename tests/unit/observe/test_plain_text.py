"""Tests of text from other processes: control characters are escaped, length and rate limited."""

from __future__ import annotations

import pytest

from sparkstrom.observe.progress import RateLimiter, to_printable_line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("loss 0.25", "loss 0.25"),
        ("Größe 木 ✓", "Größe 木 ✓"),
        ("a\tb", "a   b"),
        ("\x1b[2Jgone", "\\x1b[2Jgone"),
        ("one\ntwo\r", "one\\ntwo\\r"),
        ("\x9b31m", "\\x9b31m"),
        ("left\u202eright", "left\\u202eright"),
        ("lone \ud800", "lone \\ud800"),
    ],
)
def test_control_characters_are_written_out(text: str, shown: str) -> None:
    """Control characters and lone surrogates are shown as escapes; tabs become spaces."""
    assert to_printable_line(text) == shown


@pytest.mark.parametrize("text", ["x" * 10_000_000, "\x00" * 300, "\t" * 300])
def test_a_line_has_an_end(text: str) -> None:
    """A longer text is cut to the maximum length and ends with an ellipsis."""
    shown = to_printable_line(text, 20)
    assert len(shown) == 20
    assert shown.endswith("…")


def test_what_just_fits_is_whole() -> None:
    """A text of exactly the maximum length is not cut."""
    assert to_printable_line("x" * 20, 20) == "x" * 20


def test_some_at_once_then_one_so_often_and_so_many_in_all() -> None:
    """A rate limiter allows a burst, then one call per interval, up to a total."""
    allowance = RateLimiter(burst=3, every_s=2.0, total=6)
    assert [allowance.allows(10.0) for _ in range(5)] == [True] * 3 + [False] * 2
    assert [allowance.allows(10.0 + second) for second in (1, 2, 3, 4)] == [
        False,
        True,
        False,
        True,
    ]
    assert allowance.allows(1000.0)
    assert not allowance.allows(2000.0)
