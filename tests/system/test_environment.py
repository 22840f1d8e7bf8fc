"""Tandem refuses directories that other users can access."""

import os
from pathlib import Path

import pytest

from tandem.config import Settings
from tandem.errors import SpoolUnusable
from tandem.system.environment import compiler_caches, private_directory, trusted_directory
from tandem.trainer.launch.launcher import rank_environment


def test_directories_that_others_can_use_are_refused(tmp_path: Path) -> None:
    (directory := tmp_path / "directory").mkdir(mode=0o700)
    assert private_directory(directory) == trusted_directory(directory) == directory
    for mode, refusing in [
        (0o755, [private_directory]),
        (0o770, [private_directory, trusted_directory]),
        (0o702, [private_directory, trusted_directory]),
    ]:
        directory.chmod(mode)
        for check in refusing:
            with pytest.raises(SpoolUnusable, match=r"directory is not a directory of this user"):
                check(directory)
    assert trusted_directory(tmp_path / "new").stat().st_mode & 0o777 == 0o700
    directory.chmod(0o700)
    (tmp_path / "link").symlink_to(directory)
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    for path in (tmp_path / "link", tmp_path / "nowhere"):
        for check in (private_directory, trusted_directory):
            with pytest.raises(SpoolUnusable, match="remove it"):
                check(path)


@pytest.mark.parametrize("given", [{}, {"TORCHINDUCTOR_CACHE_DIR": "i", "TRITON_CACHE_DIR": "t"}])
def test_compiled_code_lies_in_directories_of_this_user(tmp_path: Path, monkeypatch, given) -> None:
    """torch uses the directory /tmp/torchinductor_<uid> even if another user made it, and unpickles
    the directory's files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, below in given.items():
        (tmp_path / below).mkdir()
        (tmp_path / below).chmod(0o777)
        monkeypatch.setenv(name, str(tmp_path / below))
    environment = rank_environment(Settings())
    caches = compiler_caches(os.environ)
    assert environment.items() >= caches.items()
    for cache in map(Path, caches.values()):
        assert cache.stat().st_mode & 0o777 == 0o700
        cache.chmod(0o777)
        with pytest.raises(SpoolUnusable, match="remove it"):
            rank_environment(Settings())
        cache.chmod(0o700)
