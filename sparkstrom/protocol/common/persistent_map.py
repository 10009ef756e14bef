"""Persistent map: an immutable map of whole numbers, whose changed copy shares what did not change.

Keys lie in blocks of neighbours. A change copies one block and the list of blocks, so that it costs
the same in a mesh of 30 and of 30,000 nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

BLOCK = 256  # keys; a full mesh has some 150 blocks, so that both copies are short

Key = TypeVar("Key", bound=int)
Value = TypeVar("Value")
Blocks = dict[int, dict[Key, Value]]  # by key // BLOCK, none of them empty


class PersistentMap(Mapping[Key, Value]):
    """Never changes itself; ``put`` and ``without`` return another one."""

    __slots__ = ("_blocks", "_count")

    def __init__(self, blocks: Blocks[Key, Value] | None = None, count: int = 0) -> None:
        self._blocks, self._count = blocks or {}, count

    def __getitem__(self, key: Key) -> Value:
        return self._blocks[key // BLOCK][key]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, int) and key in self._blocks.get(key // BLOCK, ())

    def __iter__(self) -> Iterator[Key]:
        for block in self._blocks.values():
            yield from block

    def __len__(self) -> int:
        return self._count

    def put(self, key: Key, value: Value) -> PersistentMap[Key, Value]:
        """With this key, new or not."""
        block = self._blocks.get(key // BLOCK, {}) | {key: value}
        return PersistentMap(self._blocks | {key // BLOCK: block}, self._count + (key not in self))

    def without(self, key: Key) -> PersistentMap[Key, Value]:
        """Without this key, which is there."""
        blocks, block = self._blocks.copy(), self._blocks[key // BLOCK].copy()
        del block[key]
        if block:
            blocks[key // BLOCK] = block
        else:
            del blocks[key // BLOCK]
        return PersistentMap(blocks, self._count - 1)
