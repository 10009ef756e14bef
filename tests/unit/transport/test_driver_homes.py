"""Media drivers' locks and directories; two descriptors take the place of two processes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from sparkstrom.base.errors import DriverLost, SetupError
from sparkstrom.transport.aeron import media_driver
from sparkstrom.transport.aeron.driver_directories import (
    CLIENTS_LOCK,
    DRIVER_LOCK,
    START_LOCK,
    DriverHome,
    hold_start_lock,
    is_driver_in_use,
    is_locked,
    make_private_directory,
    open_lock,
    remove_stale_homes,
    resolve_home,
    try_lock,
)
from sparkstrom.transport.aeron.media_driver import DriverOptions


@contextmanager
def hold_lock(path: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold the lock at ``path`` during the block, as another process would."""
    descriptor = open_lock(path)
    assert try_lock(descriptor, shared=shared)
    yield
    os.close(descriptor)


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    """Two directories for homes: shared memory and scratch."""
    memory, scratch = tmp_path / "memory", tmp_path / "scratch"
    memory.mkdir()
    scratch.mkdir()
    return memory, scratch


@pytest.fixture
def home(roots: tuple[Path, Path]) -> DriverHome:
    return resolve_home("job-1", *roots)


def test_clients_lock_is_shared_among_clients(tmp_path: Path) -> None:
    """Clients share a lock, and the driver finds it locked while any of them holds it."""
    path = tmp_path / CLIENTS_LOCK
    with hold_lock(path, shared=True), hold_lock(path, shared=True):
        assert is_locked(path)
    assert not is_locked(path)
    assert not is_locked(tmp_path / "missing")


def test_stalled_driver_holding_clients_lock_counts_as_lost(
    home: DriverHome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that holds the clients' lock for too long is treated as lost."""
    monkeypatch.setattr(media_driver, "DRIVER_TIMEOUT_MS", 10)
    with hold_lock(tmp_path / CLIENTS_LOCK), pytest.raises(DriverLost, match="has stalled"):
        media_driver._join_driver(home, tmp_path, DriverOptions())


def test_start_lock_is_exclusive(home: DriverHome) -> None:
    """Only one process at a time holds the start lock."""
    with hold_start_lock(home.path, 0) as first, hold_start_lock(home.path, 0.05) as second:
        assert first
        assert not second
    with hold_start_lock(home.path, 0) as third:
        assert third


def test_removed_start_lock_does_not_block_new_one(home: DriverHome) -> None:
    """A held start lock whose file was removed does not block a new one."""
    with hold_start_lock(home.path, 0) as old:
        assert old
        (home.path / START_LOCK).unlink()
        with hold_start_lock(home.path, 0) as new:
            assert new


def test_directories_of_dead_drivers_and_empty_home_are_removed(home: DriverHome) -> None:
    """The directories of dead drivers are removed, and then the empty home."""
    with hold_start_lock(home.path, 0):
        for root in home.roots:
            directory = home.create_driver_directory(root)
            (directory / "endpoint.json").write_text("{}")
            home.set_current(directory)
        home.remove_dead_drivers()
    assert [list(root.iterdir()) for root in home.roots] == [[], []]


@pytest.mark.parametrize(("lock", "shared"), [(DRIVER_LOCK, False), (CLIENTS_LOCK, True)])
def test_driver_directory_with_locked_file_is_kept(
    home: DriverHome, lock: str, shared: bool
) -> None:
    """A driver directory stays, and stays current, while a driver or client has its lock."""
    with hold_start_lock(home.path, 0):
        used, dead = (home.create_driver_directory(home.roots[1]) for _ in range(2))
        home.set_current(used)
        with hold_lock(used / lock, shared=shared):
            assert is_driver_in_use(used)
            home.remove_dead_drivers()
            assert used.exists()
            assert not dead.exists()
            assert home.current() == used


def test_stale_home_removal_keeps_used_foreign_and_own_homes(
    roots: tuple[Path, Path],
) -> None:
    """``remove_stale_homes`` keeps homes in use, of other users, and the one named ``keep``."""
    dead, busy, own = (resolve_home(key, *roots) for key in ("dead", "busy", "own"))
    directories = [home.create_driver_directory(roots[0]) for home in (dead, busy, own)]
    foreign = roots[0] / f"sparkstrom-{os.getuid() + 1}-job"
    foreign.mkdir()
    with hold_lock(directories[1] / DRIVER_LOCK):
        remove_stale_homes(roots, keep=own.name)
    assert [directory.exists() for directory in directories] == [False, True, True]
    assert not dead.path.exists()
    assert foreign.exists()


def test_stale_home_removal_keeps_home_with_held_start_lock(roots: tuple[Path, Path]) -> None:
    """``remove_stale_homes`` keeps a home whose start lock is held."""
    starting = resolve_home("starting", *roots)
    with hold_start_lock(starting.path, 0):
        directory = starting.create_driver_directory(roots[1])
        remove_stale_homes(roots, keep="another")
        assert directory.exists()


def test_current_driver_can_be_replaced_and_cleared(home: DriverHome) -> None:
    """``set_current`` replaces the current driver, and ``clear_current`` removes it."""
    assert home.current() is None
    with hold_start_lock(home.path, 0):
        for name in ("one", "two"):
            home.set_current(Path(name))
            assert home.current() == Path(name)
        home.clear_current()
    assert home.current() is None


def test_symlink_in_place_of_private_directory_is_rejected(tmp_path: Path) -> None:
    """A symbolic link instead of the directory is a SetupError."""
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "home").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SetupError, match="is not a directory of user"):
        make_private_directory(tmp_path / "home")


def test_directory_with_permissions_for_others_is_rejected(tmp_path: Path) -> None:
    """A directory with permissions for others is a SetupError."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home").chmod(0o750)
    with pytest.raises(SetupError, match="chmod 700"):
        make_private_directory(tmp_path / "home")


def plant_path(path: Path, what: str, victim: Path) -> None:
    """Create at ``path`` what another user could create under our name in a shared directory."""
    if what == "a link":
        path.symlink_to(victim)
    elif what == "a file":
        path.touch()
    else:
        path.mkdir()
        (path / "00000000").mkdir()
        path.chmod(0o777 if what == "an open directory" else 0o700)
    if os.getuid() == 0:
        os.chown(path, 12345, 12345, follow_symlinks=False)


PLANTED = ["a link", "a file", "an open directory", "a directory of another user"]


@pytest.mark.parametrize("what", PLANTED)
@pytest.mark.parametrize("at", [0, 1])
def test_stale_home_removal_ignores_planted_paths_and_link_targets(
    roots: tuple[Path, Path], tmp_path: Path, what: str, at: int
) -> None:
    """``remove_stale_homes`` removes nothing that others planted, nor what a link points to."""
    if what == PLANTED[3] and os.getuid() != 0:
        pytest.skip("only root can make another user's directory")
    victim = tmp_path / "victim"
    for name in ("documents", "0123abcd"):  # the second is named as a media driver's directory
        (victim / name).mkdir(parents=True)
    victim.chmod(0o700)
    dead = resolve_home("dead", *roots)
    dead.create_driver_directory(roots[0])
    planted = roots[at] / f"sparkstrom-{os.getuid()}-x"
    plant_path(planted, what, victim)
    remove_stale_homes(roots, keep="another")
    assert sorted(path.name for path in victim.iterdir()) == ["0123abcd", "documents"]
    assert os.path.lexists(planted)
    assert planted.is_symlink() or planted.is_file() or (planted / "00000000").exists()
    assert not dead.path.exists()


@pytest.mark.parametrize("what", PLANTED)
@pytest.mark.parametrize("at", [0, 1])
def test_home_with_planted_name_gets_another_name(
    roots: tuple[Path, Path], tmp_path: Path, what: str, at: int
) -> None:
    """If a home's name is planted, all workers agree on another, even after further planting."""
    if "directory" in what and os.getuid() != 0:
        pytest.skip("only root can make another user's directory")
    (tmp_path / "victim").mkdir(mode=0o700)
    plant_path(roots[at] / f"sparkstrom-{os.getuid()}-job", what, tmp_path / "victim")
    home = resolve_home("job", *roots)
    assert home.roots == roots
    with hold_start_lock(home.path, 0) as locked:
        assert locked
        home.create_driver_directory(roots[1])
        assert resolve_home("job", *roots) == home  # later workers use the same home
    plant_path(roots[1 - at] / f"sparkstrom-{os.getuid()}-job", what, tmp_path / "victim")
    assert resolve_home("job", *roots) == home


def test_used_home_keeps_name_planted_under_other_root(
    roots: tuple[Path, Path],
) -> None:
    """A home in use keeps its name if that is planted under the other root, which is left alone."""
    home = resolve_home("job", *roots)
    with hold_start_lock(home.path, 0):
        (roots[1] / home.name).touch()
        assert resolve_home("job", *roots) == DriverHome(home.name, roots[:1])
        home.remove_dead_drivers()
    assert (roots[1] / home.name).exists()


def test_dead_driver_removal_does_not_follow_symlinked_home(
    home: DriverHome, tmp_path: Path
) -> None:
    """Nothing is removed through a link in place of the home."""
    (tmp_path / "victim" / "0123abcd").mkdir(parents=True)
    (tmp_path / "victim").chmod(0o700)
    home.path.symlink_to(tmp_path / "victim")
    home.remove_dead_drivers()
    assert (tmp_path / "victim" / "0123abcd").exists()


def test_home_is_in_scratch_without_shared_memory(tmp_path: Path) -> None:
    home = resolve_home("key", tmp_path / "missing", tmp_path)
    assert home.roots == (tmp_path,)


def test_no_writable_root_raises_setup_error(tmp_path: Path) -> None:
    """Without any writable root, resolving a home is a SetupError."""
    with pytest.raises(SetupError, match="scratch directory"):
        resolve_home("key", tmp_path / "missing", tmp_path / "too")


def test_failed_driver_start_raises_setup_error_and_closes_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is a SetupError, which a fit may survive, and no descriptor stays open."""
    options = DriverOptions(scratch=tmp_path, shared_memory=tmp_path)

    def refuse(*arguments: object, **settings: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(media_driver, "start_module", refuse)
    monkeypatch.setattr(media_driver, "load_library", lambda: SimpleNamespace(path="none"))
    opened = set(os.listdir("/proc/self/fd"))
    with pytest.raises(
        SetupError, match=r"cannot be started: \[Errno 11\] Resource .*; free memory"
    ):
        media_driver.ensure_driver("crowded", options)
    assert set(os.listdir("/proc/self/fd")) == opened
