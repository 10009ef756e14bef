"""Tests of links' rates and of the token buckets that limit them."""

from __future__ import annotations

import pytest

from benchmarks.hosts import bucket
from benchmarks.slow_link.running import Narrowing
from sparkstrom.base.units import parse_rate


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("100mbit", 100_000_000),
        ("1gbit", 10**9),
        ("1.5mbit", 1_500_000),
        ("500Kbit", 500_000),
        ("1mibit", 1 << 20),
        ("12mbps", 96_000_000),
        ("9600", 9600),
        (" 10mbit ", 10_000_000),
    ],
)
def test_parse_rate_accepts_units_of_tc(text: str, bits: int) -> None:
    assert parse_rate(text) == bits


@pytest.mark.parametrize("text", ["", "fast", "10mbit/s", "-1mbit", "0mbit", "10 mbit x", "mbit"])
def test_parse_rate_rejects_other_text(text: str) -> None:
    with pytest.raises(ValueError, match="write it as tc does") as caught:
        parse_rate(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("bits", "burst", "latency"),
    [
        (10**9, "500000b", "50ms"),  # the bytes of a tick of 4 ms
        (10**8, "50000b", "50ms"),
        (10**7, "32768b", "210ms"),  # a queue of 256 KiB
        (10**6, "32768b", "400ms"),  # at most this latency
    ],
)
def test_bucket_burst_and_latency_follow_rate(bits: int, burst: str, latency: str) -> None:
    """The bucket's burst and queue depend on the rate, within limits."""
    assert bucket(bits) == ["tbf", "rate", f"{bits}bit", "burst", burst, "latency", latency]


def test_narrowing_parses_rate_seconds_and_host() -> None:
    """A text such as "1mbit@2.5:3" gives the rate, the seconds and optionally the host."""
    assert Narrowing.parse("10mbit@20") == Narrowing("10mbit", 20.0, None)
    assert Narrowing.parse("1mbit@2.5:3") == Narrowing("1mbit", 2.5, 3)


@pytest.mark.parametrize("text", ["10mbit", "10mbit@", "10mbit@soon", "10mbit@20:x", "fast@20"])
def test_narrowing_rejects_malformed_text(text: str) -> None:
    """A text that is not RATE@SECONDS[:HOST] is refused."""
    with pytest.raises(ValueError, match="write"):
        Narrowing.parse(text)
