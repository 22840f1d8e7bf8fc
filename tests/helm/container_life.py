"""One container of a pod: started, probed, restarted and stopped as a kubelet does."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

from helm.cluster_store import Object
from helm.engine import docker

if TYPE_CHECKING:
    from helm.pod_life import PodLife

LONGEST_BACKOFF = 10.0


@dataclass
class Probe:
    """One of a container's probes, with how it went so far."""

    spec: Object
    period: float
    due: float
    failures: int = 0
    successes: int = 0

    @property
    def failed(self) -> bool:
        return self.failures >= self.spec.get("failureThreshold", 3)


@dataclass
class ContainerLife:
    """A container across its restarts. `run` returns with the exit status that ended it for good."""

    pod: PodLife
    spec: Object
    init: bool = False
    id: str = ""
    restarts: int = 0
    started: bool = False
    ready: bool = False
    state: dict[str, Any] = field(default_factory=lambda: {"waiting": {"reason": "PodInitializing"}})
    probes: dict[str, Probe] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.spec["name"]

    def run(self) -> int | None:
        """The last exit status; None if the pod was to go before the container ran."""
        code, backoff = None, self.pod.kubelet.backoff
        while not self.pod.stopping.is_set():
            self._start()
            code = self._attend()
            self._ended(code)
            policy = self.pod.spec.get("restartPolicy", "Always")
            # An init container is tried again unless its pod is never to be.
            if self.pod.stopping.is_set() or policy == "Never" or (code == 0 and (self.init or policy == "OnFailure")):
                break
            self.restarts += 1
            self.state = {"waiting": {"reason": "CrashLoopBackOff" if self.restarts > 1 else "Error"}}
            self.pod.post()
            self.pod.stopping.wait(backoff)
            backoff = min(backoff * 2, LONGEST_BACKOFF)
            if self.init:
                self.pod.refresh_secrets()
        return code

    def hurry(self, kind: str, period: float) -> None:
        """Asks a probe of the running container more often than its spec says."""
        self.probes[kind].period = period
        self.probes[kind].due = time.monotonic()

    # ---------------------------------------------------------------- starting and ending

    def _start(self) -> None:
        arguments = self.pod.arguments(self.spec)
        name = f"{self.pod.prefix}-{self.name}-{self.restarts}"
        self.id = docker("create", "--name", name, *arguments).splitlines()[-1].strip()
        docker("start", self.id)
        self._waiter = subprocess.Popen(["docker", "wait", self.id], stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL, text=True)  # fmt: skip
        self.state = {"running": {"startedAt": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}}
        now = time.monotonic()
        hurry = self.pod.kubelet.hurry
        self.probes = {}
        for kind, unhurried in (("startupProbe", hurry), ("readinessProbe", 1.0), ("livenessProbe", 1.0)):
            if spec := self.spec.get(kind):
                period = spec.get("periodSeconds", 10) / unhurried
                # Sooner asked, as long waited for.
                spec = spec | {"failureThreshold": spec.get("failureThreshold", 3) * unhurried}
                self.probes[kind] = Probe(spec, period, due=now + min(period, 0.5))
        self.started = "startupProbe" not in self.probes
        self.ready = self.started and "readinessProbe" not in self.probes and not self.init
        self.pod.kubelet.note(self.pod, self.name, "Started")
        self.pod.post()

    def _ended(self, code: int) -> None:
        oom = docker("inspect", "-f", "{{.State.OOMKilled}}", self.id).strip() == "true"
        log = docker("logs", self.id)
        self.pod.kubelet.keep_log(self.pod, self.name, log)
        docker("rm", "-f", self.id)
        self.id, self.ready, self.started = "", False, False
        reason = "OOMKilled" if oom else "Completed" if code == 0 else "Error"
        self.state = {"terminated": {"exitCode": code, "reason": reason}}
        self.pod.kubelet.note(self.pod, self.name, "Exited", f"{code} {reason}", log[-2000:])
        self.pod.post()

    def _stop(self, deadline: float) -> int:
        """preStop, SIGTERM, and at the deadline SIGKILL."""
        self.ready = False
        self.pod.post()
        begin = time.monotonic()
        hook = self.spec.get("lifecycle", {}).get("preStop")
        if hook:
            if set(hook) != {"exec"}:
                raise NotImplementedError(f"preStop by {sorted(hook)}")
            docker("exec", self.id, *hook["exec"]["command"], timeout=max(deadline - begin, 1), check=False)
        left = max(round(deadline - time.monotonic()), 2)
        docker("stop", "--time", str(left), self.id, timeout=left + 30)
        code = self._exit_code()
        took = time.monotonic() - begin
        self.pod.kubelet.note(self.pod, self.name, "Stopped", f"{code} after {took:.1f} s of {deadline - begin:.0f}")
        return code

    def _exit_code(self) -> int:
        return int(self._waiter.communicate(timeout=60)[0].split()[0])

    # ---------------------------------------------------------------- while it runs

    def _attend(self) -> int:
        """Probes it until it ends, or ends it: its exit status."""
        while True:
            if self._waiter.poll() is not None:
                return self._exit_code()
            if self.pod.stopping.is_set():
                return self._stop(self.pod.deadline)
            for kind, probe in self.probes.items():
                # Until it has started, nothing else is asked.
                if (kind == "startupProbe") == self.started or time.monotonic() < probe.due:
                    continue
                fatal = self._probe(kind, probe)
                if self.pod.stopping.is_set():
                    break
                if fatal:
                    grace = self.pod.spec.get("terminationGracePeriodSeconds", 30)
                    self.pod.kubelet.note(self.pod, self.name, "Killing", kind)
                    return self._stop(time.monotonic() + grace)
            time.sleep(0.1)

    def _probe(self, kind: str, probe: Probe) -> bool:
        """Whether the container is to be killed for what the probe said."""
        wrong = self._ask(probe.spec)
        if self.pod.stopping.is_set():
            return False
        probe.due = time.monotonic() + probe.period
        if wrong is None:
            probe.failures, probe.successes = 0, probe.successes + 1
            if kind == "startupProbe":
                self.started = True
                self.ready = "readinessProbe" not in self.probes
                for other in self.probes.values():
                    other.due = time.monotonic()
            elif kind == "readinessProbe" and probe.successes >= probe.spec.get("successThreshold", 1):
                self._set_ready(True)
            return False
        probe.failures, probe.successes = probe.failures + 1, 0
        if kind != "startupProbe":
            self.pod.kubelet.note(self.pod, self.name, "Unhealthy", f"{kind}: {wrong[:500]}")
        if kind == "readinessProbe" and probe.failed:
            self._set_ready(False)
        return kind != "readinessProbe" and probe.failed

    def _set_ready(self, ready: bool) -> None:
        if ready != self.ready:
            self.ready = ready
            self.pod.kubelet.note(self.pod, self.name, "Ready" if ready else "NotReady")
            self.pod.post()

    def _ask(self, spec: Object) -> str | None:
        """What is wrong; None if it is well."""
        timeout = spec.get("timeoutSeconds", 1)
        if "httpGet" in spec:
            get = spec["httpGet"]
            port = get["port"]
            if isinstance(port, str):
                port = next(p["containerPort"] for p in self.spec["ports"] if p["name"] == port)
            try:
                url = f"http://{self.pod.address}:{port}{get.get('path', '/')}"
                status = httpx.get(url, timeout=timeout, trust_env=False).status_code
            except httpx.TransportError as error:
                return f"{url}: {error}"
            return None if 200 <= status < 400 else f"{url} answers {status}"
        command = ["docker", "exec", self.id, *spec["exec"]["command"]]
        asked = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        deadline = time.monotonic() + timeout
        while asked.poll() is None:
            if time.monotonic() > deadline or self.pod.stopping.is_set():
                asked.kill()
                asked.communicate()
                return f"no answer within {timeout} s"
            time.sleep(0.05)
        said = asked.communicate()[0].strip()
        return None if asked.returncode == 0 else f"exit {asked.returncode}: {said}"
