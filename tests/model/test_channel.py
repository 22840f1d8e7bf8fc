"""Processes that find each other through a file send whole weights. A process of another user can't
take part."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from listening import LOOPBACK, watched
from tandem.config import Settings
from tandem.model.transfer.channel import make_meeting
from tandem.trainer.launch.launcher import rank_environment

END = Path(__file__).parent / "channel_end.py"


@pytest.mark.slow
@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_weights_arrive_and_all_sockets_are_loopbacks(tmp_path: Path, where: str) -> None:
    if where == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    environment = rank_environment(Settings(weights="merged", transport="nccl"))
    # The module `way_to_vllm` chooses loopback if ranks and vLLM are on one host.
    environment["NCCL_SOCKET_IFNAME"] = "lo"
    command = [sys.executable, str(END), str(tmp_path)]
    with watched(os.getpid()) as found:
        ends = [
            subprocess.Popen([*command, str(rank), "2", where], env=environment)
            for rank in range(2)
        ]
        assert [end.wait(timeout=120) for end in ends] == [0, 0]
    assert found, "no socket was seen"
    assert set(found) <= LOOPBACK, found


def test_only_its_owner_and_group_can_join_a_meeting(tmp_path: Path) -> None:
    make_meeting(tmp_path / "meeting")
    assert (tmp_path / "meeting").stat().st_mode & 0o007 == 0
    with pytest.raises(FileExistsError):
        make_meeting(tmp_path / "meeting")
