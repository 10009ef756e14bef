"""Entry point of `python -m sparkstrom.simulation`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sparkstrom.base.errors import SparkstromError
from sparkstrom.simulation import command

EXIT_USAGE_ERROR = 2  # argparse's exit code for wrong arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    A SparkstromError is printed, and the code is then EXIT_USAGE_ERROR.
    """
    parser = argparse.ArgumentParser(
        prog="python -m sparkstrom.simulation", description=command.DESCRIPTION
    )
    command.add_arguments(parser)
    try:
        return command.run(parser.parse_args(argv))
    except SparkstromError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return EXIT_USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main())
