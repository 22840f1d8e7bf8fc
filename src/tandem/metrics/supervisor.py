"""The container's programs, as supervisord sees them."""

import os
from functools import partial
from pathlib import Path

from tandem.config import Settings
from tandem.metrics.collector import Collector
from tandem.metrics.metric import BOTH, OPEN, Metric
from tandem.metrics.samples import Samples
from tandem.supervise.supervisord import statuses
from tandem.system import processes

STATES = ("stopped", "starting", "running", "backoff", "stopping", "exited", "fatal", "unknown")
_PROGRAM = {"program": OPEN}
_measured = partial(Metric, exporters=BOTH, labels=_PROGRAM, perishable=True)


class SupervisorCollector(Collector):
    name = "supervisor"
    metrics = (
        _measured("tandem_supervisor_process_up", "1 if the program runs, else 0.", "supervisord"),
        _measured("tandem_supervisor_process_state", "1 for the state that the program is in, 0 for the other states.",
                  "supervisord", labels=_PROGRAM | {"state": STATES}),
        Metric("tandem_supervisor_process_restarts_total", "How often the program was started again.", "supervisord",
               "counter", BOTH, _PROGRAM),
        _measured("tandem_supervisor_process_start_time_seconds", "When the program's process started.",
                  "/proc/<pid>/stat"),
    )  # fmt: skip
    interval = 2.0

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings = settings
        self._pids: dict[str, int] = {}  # program -> its last process

    def collect(self, gauges: Samples) -> None:
        programs = statuses(self._settings)
        if not programs and self._pids:
            raise RuntimeError("supervisord does not answer any more")
        for program, status in programs.items():
            state = status.state.lower()
            for name in STATES:
                gauges.set("tandem_supervisor_process_state", float(name == state), program=program, state=name)
            gauges.set("tandem_supervisor_process_up", float(state == "running"), program=program)
            if status.pid and (process := processes.read(status.pid)) is not None:
                started = _boot_time() + process.started / os.sysconf("SC_CLK_TCK")
                gauges.set("tandem_supervisor_process_start_time_seconds", started, program=program)
            before = self._pids.get(program, 0)
            restarted = 0 not in (before, status.pid) and before != status.pid
            self.counts.inc("tandem_supervisor_process_restarts_total", float(restarted), program=program)
            self._pids[program] = status.pid or before


def _boot_time() -> float:
    """When the machine booted, in Unix seconds: processes' start times count from then."""
    lines = Path("/proc/stat").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("btime "))
