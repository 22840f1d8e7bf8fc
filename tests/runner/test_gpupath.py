"""What is said about the path between the two containers' GPUs, from nvidia-smi's own tables (an H200 host)."""

import os

import pytest

from tandem.config import Settings
from tandem.system.gpu_links import describe, topology

TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-31\t0\t\tN/A
GPU1\tNV18\t X \tPHB\tSYS\t0-31\t0\t\tN/A
GPU2\tSYS\tPHB\t X \tSYS\t0-31\t0\t\tN/A
NIC0\tPIX\tSYS\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
"""


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """A program in nvidia-smi's place, of a machine that has so many GPUs."""

    def install(gpus):
        uuids = [f"GPU-{i}{i}{i}{i}" for i in range(gpus)]
        (tmp_path / "topo").write_text(TOPOLOGY)
        (tmp_path / "list").write_text("".join(f"GPU {i}: NVIDIA H200 (UUID: {u})\n" for i, u in enumerate(uuids)))
        (tmp_path / "query").write_text("".join(f"{i}, {u}, 0\n" for i, u in enumerate(uuids)))
        program = tmp_path / "nvidia-smi"
        program.write_text(
            f"#!/bin/sh\ncase $1 in -L) f=list;; topo) f=topo;; *) f=query;; esac\nexec cat {tmp_path}/$f\n"
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return install


def settings(trainer="", inference=""):
    return Settings(device="cuda", trainer_devices=trainer, inference_devices=inference)


def test_the_table_is_read_by_uuid(smi):
    smi(3)
    assert topology() == {
        ("GPU-0000", "GPU-1111"): "NV18", ("GPU-1111", "GPU-0000"): "NV18",
        ("GPU-0000", "GPU-2222"): "SYS", ("GPU-2222", "GPU-0000"): "SYS",
        ("GPU-1111", "GPU-2222"): "PHB", ("GPU-2222", "GPU-1111"): "PHB",
    }  # fmt: skip


def test_everything_is_there(smi, monkeypatch):
    smi(3)
    monkeypatch.setenv("NCCL_HOSTID", "tandem")
    assert describe(settings("0", "1"), "trainer").startswith("NCCL to inference goes by NVLink (NV18), ")
    assert describe(settings("GPU-0", "1"), "inference").startswith("NCCL to trainer goes by NVLink (NV18), ")
    mixed = describe(settings("0,1", "2"), "trainer")
    assert mixed.startswith("NCCL to inference goes by PCIe between CPU sockets or PCIe through the CPU, ")


@pytest.mark.parametrize("named", ["", "1", "GPU-7777"])
def test_other_gpus_that_are_not_visible_mean_tcp(smi, monkeypatch, named):
    smi(1)
    monkeypatch.setenv("NCCL_HOSTID", "tandem")
    line = describe(settings("", named), "trainer")
    assert line.startswith("NCCL to inference would go over TCP: the GPUs of inference are not visible here; ")


def test_without_a_common_host_id_it_is_tcp(smi, monkeypatch):
    smi(3)
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    assert describe(settings("0", "1"), "trainer").startswith("NCCL to inference would go over TCP: NCCL_HOSTID is not")


def test_nothing_is_said_without_gpus(smi):
    smi(0)
    assert describe(Settings(device="auto"), "trainer") is None
    assert describe(Settings(device="cpu"), "trainer") is None
