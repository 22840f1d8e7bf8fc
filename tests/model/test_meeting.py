"""The file through which ranks and vLLM's workers connect to each other
(`TANDEM_TRANSPORT=nccl`)."""

import os
from pathlib import Path

import pytest

from listening import listening
from tandem.model.transfer.channel import join_meeting, make_meeting


def test_a_meeting_is_a_new_file_of_its_owner_and_group(tmp_path: Path) -> None:
    """`make_meeting` refuses a path that already has a file or a link. The ranks and vLLM's workers
    find each other through the file only, so no socket listens for them."""
    before = listening(os.getpid())
    path, others = tmp_path / "meeting", tmp_path / "others"
    umask = os.umask(0)
    try:
        store = make_meeting(path)
    finally:
        os.umask(umask)
    store.set("key", "value")
    assert join_meeting(path).get("key") == b"value"
    assert path.stat().st_mode & 0o7777 == 0o660
    assert listening(os.getpid()) == before
    others.write_bytes(b"")
    (tmp_path / "link").symlink_to(others)
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    for taken in (path, others, tmp_path / "link", tmp_path / "nowhere"):
        with pytest.raises(FileExistsError):
            make_meeting(taken)
    for wrong in (tmp_path / "link", tmp_path / "absent"):
        with pytest.raises(OSError, match=wrong.name):
            join_meeting(wrong)
    assert not (tmp_path / "absent").exists()
