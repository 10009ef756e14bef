"""Mutations of valid inputs, and a fuzzer that keeps interesting ones; all depends on one seed."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from sparkstrom.base.errors import WireError
from tests.fuzz.targets import Target

INPUT_BYTES_MAX = 8192
MUTATIONS_MAX = 4  # of one input, per execution
EDGES = (0, 1, 2, 3, 7, 8, 15, 16, 30, 31, 32, 127, 128, 255, 2**15, 2**16 - 1, 2**24, 2**31 - 1)
WIDE_EDGES = (2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 0x7FC00000, 0x80000000)
OUTCOMES_MAX = 2000  # more would mean that the outcome's text contains parts of the input
NUMBERS = re.compile(r"\b[0-9a-f]{16}\b|[0-9.]+|'.*'|\".*\"|`.*`", re.S)

Mutation = Callable[[bytearray, random.Random, list[bytes]], None]


class Fuzzer:
    """A fuzzer that runs a target on mutated inputs and keeps the shortest input of each outcome.

    An outcome is the target's result, or WireError's text without numbers. New outcomes are a
    substitute for measured coverage, which would need an instrumented build.
    """

    def __init__(self, target: Target, corpus: list[bytes], seed: int) -> None:
        self.target, self.executions = target, 0
        self.outcomes: dict[str, bytes] = {}
        self._random = random.Random(seed)
        self._pool = [*target.seeds(), *corpus]
        for data in self._pool:
            self.execute(data)

    def once(self) -> None:
        """Mutate one input and run it; add the input as a note to an unexpected exception."""
        data = bytearray(self._random.choice(self._pool))
        for _ in range(self._random.randint(1, MUTATIONS_MAX)):
            self._random.choice(MUTATIONS)(data, self._random, self._pool)
        self.execute(bytes(data[:INPUT_BYTES_MAX]))

    def execute(self, data: bytes) -> None:
        """Run one input; keep it if its outcome is new, or is known only from longer inputs."""
        self.executions += 1
        try:
            outcome = self.target.run(data)
        except WireError as error:
            outcome = NUMBERS.sub("#", str(error))
        except BaseException as error:
            error.add_note(f"input: {data.hex()}")
            raise
        known = self.outcomes.get(outcome)
        room = known is None and len(self.outcomes) < OUTCOMES_MAX
        if room or (known is not None and len(data) < len(known)):
            self.outcomes[outcome] = data
            self._pool.append(data)


def flip(data: bytearray, draw: random.Random, pool: list[bytes]) -> None:
    if data:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def write(data: bytearray, draw: random.Random, pool: list[bytes]) -> None:
    """Write an edge-case number of some width, mostly near the start, where headers are."""
    width = draw.choice((1, 2, 4, 8))
    number = draw.choice(EDGES + WIDE_EDGES) + draw.choice((0, 0, 1, -1))
    at = draw.randrange(min(len(data), draw.choice((16, 64, INPUT_BYTES_MAX))) + 1)
    data[at : at + width] = (number % 2 ** (8 * width)).to_bytes(width, "little")


def nudge(data: bytearray, draw: random.Random, pool: list[bytes]) -> None:
    if data:
        at = draw.randrange(len(data))
        data[at] = (data[at] + draw.choice((-2, -1, 1, 2))) % 256


def cut(data: bytearray, draw: random.Random, pool: list[bytes]) -> None:
    at = draw.randrange(len(data) + 1)
    del data[at : at + draw.choice((1, 2, 4, 8, len(data)))]


def repeat(data: bytearray, draw: random.Random, pool: list[bytes]) -> None:
    at = draw.randrange(len(data) + 1)
    data[at:at] = data[at : at + draw.choice((1, 4, 16, 64))] * draw.choice((1, 1, 2, 64))


def insert(data: bytearray, draw: random.Random, pool: list[bytes]) -> None:
    at = draw.randrange(len(data) + 1)
    data[at:at] = draw.choice((bytes, draw.randbytes))(draw.choice((1, 2, 4, 8, 200)))


def splice(data: bytearray, draw: random.Random, pool: list[bytes]) -> None:
    other = draw.choice(pool)
    data[draw.randrange(len(data) + 1) :] = other[draw.randrange(len(other) + 1) :]


MUTATIONS: tuple[Mutation, ...] = (flip, write, write, nudge, cut, repeat, insert, splice)
