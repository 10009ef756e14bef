"""Tests of text from other processes: control characters are escaped, length and rate limited."""

from __future__ import annotations

import pytest

from sparkstrom.observe.progress import RateLimiter, to_printable_line
from sparkstrom.observe.reporting.summary_rendering import format_bytes, format_number


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
def test_control_characters_are_escaped(text: str, shown: str) -> None:
    """Control characters and lone surrogates are shown as escapes; tabs become spaces."""
    assert to_printable_line(text) == shown


@pytest.mark.parametrize("text", ["x" * 10_000_000, "\x00" * 300, "\t" * 300])
def test_long_line_is_cut_with_ellipsis(text: str) -> None:
    """A longer text is cut to the maximum length and ends with an ellipsis."""
    shown = to_printable_line(text, 20)
    assert len(shown) == 20
    assert shown.endswith("…")


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (999, "999 bytes"),
        (1000, "1 kB"),
        (999_499, "999 kB"),
        (999_600, "1 MB"),
        (2e15, "2e+03 TB"),
    ],
)
def test_format_bytes_chooses_unit_after_rounding(size: float, shown: str) -> None:
    """Before, 999,600 bytes were 1e+03 kB."""
    assert format_bytes(size) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.00051, "0.00051"), (0.1236, "0.1236"), (9999.0, "9999"), (12_345.6, "12,346"),
     (-98_765.4, "-98,765"), (1.5e6, "1.5e+06"), (0.0, "0")],
)  # fmt: skip
def test_format_number_uses_no_exponent_for_five_digits(value: float, shown: str) -> None:
    """Before, a throughput of 12,345.6 was shown as 1.235e+04."""
    assert format_number(value) == shown


def test_line_of_maximum_length_is_not_cut() -> None:
    """A text of exactly the maximum length is not cut."""
    assert to_printable_line("x" * 20, 20) == "x" * 20


def test_rate_limiter_allows_burst_then_interval_up_to_total() -> None:
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
