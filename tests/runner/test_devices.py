"""What nvidia-smi says decides: which devices are ours, whether they are free, and that jobs wait until they are."""

import os

import pytest

from runner.runner_stack import Stack
from tandem.config import Settings
from tandem.errors import InvalidInput
from tandem.system.gpus import FREE_BYTES, MIB, Devices

ROWS = "0, GPU-aaaa1111, 3\n1, GPU-bbbb2222, 70000\n2, GPU-bbcc3333, 0\n"


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """A program in nvidia-smi's place that prints a file."""
    table = tmp_path / "table"
    table.write_text(ROWS)
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nexec cat {table}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return table


def devices(*names: str) -> Devices:
    return Devices(Settings(device="cuda", trainer_devices=list(names)), "trainer")


def test_devices_are_known_by_uuid(smi, monkeypatch):
    assert devices().uuids == ("GPU-aaaa1111", "GPU-bbbb2222", "GPU-bbcc3333")
    assert devices("1", "GPU-aa").uuids == ("GPU-bbbb2222", "GPU-aaaa1111")
    with pytest.raises(InvalidInput, match="TANDEM_TRAINER_DEVICES: '7' is none"):
        devices("7")
    with pytest.raises(InvalidInput):
        devices("GPU-bb")  # two begin so
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert devices().uuids == ("GPU-bbcc3333",)


def test_in_use_and_not_answering_are_both_not_free(smi):
    ours = devices("0", "1")
    assert ours.used() == {"GPU-aaaa1111": 3 * MIB, "GPU-bbbb2222": 70000 * MIB}
    assert list(ours.busy()) == ["GPU-bbbb2222"]
    smi.write_text("Unable to determine the device handle for GPU0000:19:00.0: Unknown Error\n")
    assert ours.busy() == {"GPU-aaaa1111": None, "GPU-bbbb2222": None}


def test_what_may_stay_in_use_is_no_trouble(smi):
    ours = devices("0", "1")
    assert ours.busy({"GPU-bbbb2222": 70000 * MIB - FREE_BYTES}) == {"GPU-bbbb2222": 70000 * MIB}
    floor = {"GPU-bbbb2222": 70000 * MIB - FREE_BYTES + 1}
    assert ours.busy(floor) == {}
    assert ours.wait_free(0, floor)["GPU-bbbb2222"] == 70000 * MIB
    smi.write_text("Unknown Error\n")
    assert list(ours.busy(floor)) == ["GPU-aaaa1111", "GPU-bbbb2222"]


def test_no_gpu_where_one_is_asked_for_is_refused(smi):
    smi.write_text("")
    with pytest.raises(InvalidInput, match="TANDEM_DEVICE"):
        devices()
    assert Devices(Settings(device="auto"), "trainer").uuids == ()


def test_a_job_waits_for_free_devices_and_tells_what_is_left_after_it(smi, tmp_path):
    stack = Stack(tmp_path / "spool", "fork")
    stack.environment |= {"TANDEM_DEVICE": "cuda", "TANDEM_TRAINER_DEVICES": "1"}
    try:
        stack.run()
        job_id = stack.submit("run", used=70 * MIB)
        stack.start()
        stack.until(lambda: "jobs wait: the devices are not free" in stack.log.read_text(), 60, "the complaint")
        assert stack.spool.jobs.get(job_id)[0] == "queued"
        smi.write_text(ROWS.replace("70000", "5"))
        assert stack.wait(job_id)[0] == "succeeded"
        (released,) = [event for event in stack.spool.events.read(job_id) if event.type == "released"]
        assert released.data["before"] == {"GPU-bbbb2222": 70 * MIB}  # as the ranks saw it
        assert released.data["devices"] == {"GPU-bbbb2222": 5 * MIB}
        assert released.data["bytes"] == 5 * MIB
    finally:
        stack.close()
