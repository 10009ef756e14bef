"""News: is there something that the next report should not wait for?"""

from __future__ import annotations


class News:
    """One mark: every part sets it, and the report, which tells all, takes it away."""

    __slots__ = ("waits",)

    def __init__(self) -> None:
        self.waits = False

    def add(self) -> None:
        """Something has changed that others should hear of soon."""
        self.waits = True
