"""Buffer sizes: the directory for logs, term lengths, windows and socket buffers."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkstrom.base.errors import SetupError
from sparkstrom.transport.aeron.channel_settings import (
    KIB,
    MIB,
    TERM_LENGTHS,
    LogDirectory,
    choose_buffer_sizes,
    choose_log_directory,
    read_socket_buffer_limits,
    required_log_bytes,
)

MEMORY, DISK = Path("/memory"), Path("/disk")
PLENTY = 4 * MIB, 4 * MIB


@pytest.mark.parametrize("terms", TERM_LENGTHS)
def test_longest_terms_that_fit_are_chosen(terms: tuple[int, int]) -> None:
    """The longest terms whose logs fit the free space are chosen."""
    exactly = LogDirectory(MEMORY, required_log_bytes(9, *terms))
    assert choose_log_directory([exactly], 9) == (exactly, terms)


def test_one_missing_byte_selects_shorter_terms() -> None:
    tight = LogDirectory(MEMORY, required_log_bytes(9, *TERM_LENGTHS[0]) - 1)
    assert choose_log_directory([tight], 9) == (tight, TERM_LENGTHS[1])


def test_shared_memory_is_preferred_to_larger_disk() -> None:
    """Shared memory with the shortest terms is preferred to a disk with more space."""
    memory, disk = (
        LogDirectory(MEMORY, required_log_bytes(2, *TERM_LENGTHS[-1])),
        LogDirectory(DISK, 1 << 40),
    )
    assert choose_log_directory([memory, disk], 2) == (memory, TERM_LENGTHS[-1])


def test_no_space_error_names_free_and_needed_bytes() -> None:
    """The error has the free bytes of each directory and the bytes needed."""
    with pytest.raises(SetupError) as caught:
        choose_log_directory([LogDirectory(MEMORY, 1_000), LogDirectory(DISK, 2_000)], 9)
    for words in (
        "/memory has 1,000 bytes",
        "/disk has 2,000",
        f"{required_log_bytes(9, *TERM_LENGTHS[-1]):,}",
    ):
        assert words in str(caught.value)


@pytest.mark.parametrize("terms", TERM_LENGTHS)
@pytest.mark.parametrize("edges", [1, 4, 9, 100])
@pytest.mark.parametrize("limit", [212_992, 4 * MIB, 64 * MIB])
def test_window_plus_frame_fits_half_term(terms: tuple[int, int], edges: int, limit: int) -> None:
    """A receive window plus one frame fits half a term, and the window the socket buffer."""
    sizes = choose_buffer_sizes(edges, terms, (limit, limit))
    assert sizes.window + sizes.data_frame_bytes_max <= sizes.data_term // 2
    assert sizes.window <= sizes.receive_buffer <= limit


@pytest.mark.parametrize("edges", [1, 2, 9, 12, 40])
def test_windows_of_all_edges_fit_socket_buffer(edges: int) -> None:
    """The windows of all edges together fit the socket's receive buffer."""
    sizes = choose_buffer_sizes(edges, TERM_LENGTHS[0], PLENTY)
    assert edges * (sizes.window + sizes.control_term // 2) <= sizes.receive_buffer


def test_small_kernel_limit_keeps_minimum_window() -> None:
    """With a small kernel limit and many edges, windows keep their minimum of 16 KiB."""
    sizes = choose_buffer_sizes(50, TERM_LENGTHS[0], (212_992, 212_992))
    assert sizes.window == 16 * KIB
    assert sizes.receive_buffer == 212_992


def test_frame_limits_follow_term_lengths() -> None:
    """Terms of 1 MiB and 128 KiB allow frames of 64 KiB and 16 KiB."""
    sizes = choose_buffer_sizes(1, (1 * MIB, 128 * KIB), PLENTY)
    assert (sizes.data_frame_bytes_max, sizes.control_frame_bytes_max) == (64 * KIB, 16 * KIB)


def test_unreadable_kernel_limits_default_to_kernel_values(tmp_path: Path) -> None:
    """Unreadable kernel limits are replaced by the kernel's defaults."""
    assert read_socket_buffer_limits(tmp_path) == (212_992, 212_992)
    (tmp_path / "rmem_max").write_text("4194304\n")
    assert read_socket_buffer_limits(tmp_path) == (4_194_304, 212_992)
