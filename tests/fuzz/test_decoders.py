"""Short runs of each fuzz target, starting from the corpus of earlier longer runs."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from sparkstrom.base.errors import WireError
from tests.fuzz.mutation import Fuzzer
from tests.fuzz.run import read_corpus
from tests.fuzz.targets import TARGETS, Target

CORPUS = Path(__file__).parent / "corpus"
EXECUTIONS = 2000
MEMORY_BYTES_MAX = 2**20  # inputs are of at most 8 KiB


def fuzz(fuzzer: Fuzzer, executions: int) -> None:
    for _ in range(executions):
        fuzzer.once()


@pytest.mark.parametrize("name", TARGETS)
def test_decoder_raises_only_wire_errors(name: str) -> None:
    """From mutated inputs, decoders raise nothing but ``WireError``."""
    fuzzer = Fuzzer(TARGETS[name], read_corpus(CORPUS / f"{name}.json"), seed=1)
    fuzz(fuzzer, EXECUTIONS)
    assert len(fuzzer.outcomes) > 3


@pytest.mark.parametrize("name", TARGETS)
def test_decoder_accepts_its_seed_inputs(name: str) -> None:
    """Each target's seeds are accepted by its decoder."""
    outcomes = [TARGETS[name].run(data) for data in TARGETS[name].seeds()]
    assert len(outcomes) >= 4


@pytest.mark.parametrize("name", TARGETS)
def test_decoder_memory_is_bounded_despite_announced_size(name: str) -> None:
    """Memory is proportional to the input, not to what the input announces."""
    fuzzer = Fuzzer(TARGETS[name], read_corpus(CORPUS / f"{name}.json"), seed=2)
    worst = 0  # growth during one input, without earlier garbage
    tracemalloc.start()
    try:
        for _ in range(EXECUTIONS // 4):
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            fuzzer.once()
            worst = max(worst, tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    assert 0 < worst < MEMORY_BYTES_MAX


def test_fuzzer_inputs_are_determined_by_seed() -> None:
    """The same seed gives the same inputs, and another seed gives others."""
    seen: list[list[bytes]] = []
    for seed in (3, 3, 4):
        inputs: list[bytes] = []
        target = TARGETS["messages"]

        def noted(data: bytes, inputs: list[bytes] = inputs, target: Target = target) -> str:
            inputs.append(data)
            return target.run(data)

        fuzzer = Fuzzer(Target(target.seeds, noted), [], seed)
        fuzz(fuzzer, 50)
        seen.append(inputs)
    assert seen[0] == seen[1] != seen[2]


def test_fuzzer_notes_input_on_unexpected_exception() -> None:
    """Another exception is raised with the input as a note."""

    def trusting(data: bytes) -> str:
        if len(data) != 4:
            raise WireError("not four bytes")
        return str(data[4])

    fuzzer = Fuzzer(Target(lambda: [b"abc"], trusting), [], seed=1)
    with pytest.raises(IndexError) as caught:
        fuzz(fuzzer, 1000)
    (note,) = caught.value.__notes__
    assert len(bytes.fromhex(note.removeprefix("input: "))) == 4
