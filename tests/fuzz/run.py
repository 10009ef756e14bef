"""Fuzz one decoder for a given time, with bounds checks compiled into the kernels.

    python -m tests.fuzz.run gaps --seconds 600 --corpus tests/fuzz/corpus

Prints one JSON object: executions, executions per second, outcomes. Ends with exit code 1 at the
first input that raises anything but WireError, and prints the command that repeats it. Short inputs
with a new outcome are added to the corpus, a JSON file of hex strings per target. Payloads lie
before an inaccessible page, so a kernel that reads beyond them ends the process; the input is then
in the file that was printed at the start, as its length (u32) and bytes.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import mmap
import os
import resource
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.fuzz.targets import Target

KEPT_BYTES_MAX = 256  # of an input in the corpus
KEPT_MAX = 60  # inputs per target
MEMORY_BYTES = 256 * 2**20  # in addition to the process's memory at the start
HANG_S = 60
BATCH = 1000
NOTE_BYTES = 1 << 20
SCRATCH = Path(tempfile.gettempdir()) / f"sparkstrom-fuzz-{os.getuid()}"


def main() -> int:
    """Run one target."""
    args = parse_arguments()
    check_bounds()
    from tests.fuzz.mutation import Fuzzer
    from tests.fuzz.targets import TARGETS

    warnings.simplefilter("error")
    target = TARGETS[args.target]
    if args.input:
        print(target.run(bytes.fromhex(args.input)))
        return 0
    path = Path(args.corpus) / f"{args.target}.json"
    fuzzer = Fuzzer(record_last_input(args.target, target), read_corpus(path), args.seed)
    limit_memory()
    began_s = time.monotonic()
    try:
        while time.monotonic() - began_s < args.seconds:
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            for _ in range(BATCH):
                fuzzer.once()
    except Exception as error:
        traceback.print_exc()
        data = error.__notes__[-1].removeprefix("input: ")
        print(f"repeat with: python -m tests.fuzz.run {args.target} --input {data}")
        return 1
    faulthandler.cancel_dump_traceback_later()
    seconds = time.monotonic() - began_s
    print(
        json.dumps(
            {
                "target": args.target,
                "seed": args.seed,
                "executions": fuzzer.executions,
                "per_second": round(fuzzer.executions / seconds),
                "outcomes": len(fuzzer.outcomes),
            }
        )
    )
    write_corpus(path, fuzzer.outcomes)
    return 0


def record_last_input(name: str, target: Target) -> Target:
    """Return a target that writes each input to a file before it runs the input."""
    path = SCRATCH / f"{name}.last"
    path.write_bytes(bytes(NOTE_BYTES))
    with path.open("r+b") as file:
        note = mmap.mmap(file.fileno(), NOTE_BYTES)
    print(f"last input in {path}", file=sys.stderr, flush=True)
    faulthandler.enable()

    def run(data: bytes) -> str:
        note[: 4 + len(data)] = len(data).to_bytes(4, "little") + data
        return target.run(data)

    return replace(target, run=run)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", help="a decoder, by its name in tests/fuzz/targets.py")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--corpus", default=str(Path(__file__).parent / "corpus"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--input", help="run this input alone (hex)")
    return parser.parse_args()


def check_bounds() -> None:
    """Make Numba check every index, with a separate cache from that of training."""
    SCRATCH.mkdir(exist_ok=True)
    os.environ["NUMBA_BOUNDSCHECK"] = "1"
    os.environ["NUMBA_CACHE_DIR"] = str(SCRATCH)


def limit_memory() -> None:
    """Limit memory, so that a decoder which allocates what an input announces gets MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def read_corpus(path: Path) -> list[bytes]:
    """Return the inputs that are kept for one target."""
    return [bytes.fromhex(data) for data in json.loads(path.read_text())] if path.exists() else []


def write_corpus(path: Path, outcomes: dict[str, bytes]) -> None:
    """Write the shortest inputs of the outcomes, up to a number and size."""
    kept = sorted((data.hex() for data in outcomes.values()), key=lambda text: (len(text), text))
    small = [text for text in kept if len(text) <= 2 * KEPT_BYTES_MAX][:KEPT_MAX]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(small, indent=0) + "\n")


if __name__ == "__main__":
    sys.exit(main())
