"""Laws of ``PersistentMap``: each version equals a dict, and never changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sparkstrom.protocol.common.topology import BLOCK, PersistentMap

keys = st.sampled_from([0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 10**6])
steps = st.lists(st.tuples(keys, st.integers(0, 9) | st.none()))  # None: remove the key


@given(steps=steps)
def test_map_versions_equal_dict_and_never_change(
    steps: list[tuple[int, int | None]],
) -> None:
    shared, plain = PersistentMap(), dict[int, int]()
    versions = [(shared, plain)]
    for key, value in steps:
        if value is not None:
            shared, plain = shared.put(key, value), plain | {key: value}
        elif key in plain:
            shared, plain = shared.without(key), {k: v for k, v in plain.items() if k != key}
        versions.append((shared, plain))
    for one, other in versions:
        assert one == other
        assert len(one) == len(other)
        assert [key in one for key in (0, BLOCK, 10**6)] == [
            key in other for key in (0, BLOCK, 10**6)
        ]


def test_map_iterates_keys_of_block_in_insertion_order() -> None:
    shared = PersistentMap().put(2, 0).put(3, 0).put(1, 0).without(2).put(2, 1)
    assert list(shared) == [3, 1, 2]
    assert "1" not in shared
