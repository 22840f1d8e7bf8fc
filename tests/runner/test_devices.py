"""The runner starts a job only on free devices, and measures what is left on them after it."""

from fake_nvml import MIB, gpu
from runner.runner_stack import Stack


def test_a_job_waits_for_free_devices_and_tells_what_is_left_after_it(nvml, tmp_path):
    nvml.set(gpu("GPU-aaaa1111", 3 * MIB), gpu("GPU-bbbb2222", 70000 * MIB))
    stack = Stack(tmp_path / "spool", "fork")
    stack.environment |= {"TANDEM_DEVICE": "cuda", "TANDEM_TRAINER_DEVICES": "1"}
    try:
        stack.run()
        job_id = stack.submit("run", used=70 * MIB)
        stack.start()
        stack.until(lambda: "jobs wait: the devices are not free" in stack.log.read_text(), 60, "the complaint")
        assert stack.spool.jobs.get(job_id)[0] == "queued"
        nvml.set(gpu("GPU-aaaa1111", 3 * MIB), gpu("GPU-bbbb2222", 5 * MIB))
        assert stack.wait(job_id)[0] == "succeeded"
        (released,) = [event for event in stack.spool.events.read(job_id) if event.type == "released"]
        assert released.data["before"] == {"GPU-bbbb2222": 70 * MIB}  # as the ranks saw it
        assert released.data["devices"] == {"GPU-bbbb2222": 5 * MIB}
        assert released.data["bytes"] == 5 * MIB
    finally:
        stack.close()
