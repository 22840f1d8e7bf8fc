"""A stack of containers as `docker compose` starts it, with a name, ports, secrets and volumes of its own, and the
means to look into it and to hurt it."""

import json
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import local_stack
import waiting
from tandem.client import Tandem
from tandem.system import ports

ROOT = Path(__file__).parent.parent
MAIN, CPU, NVLINK, SHARED = (str(ROOT / f"docker-compose{part}.yml") for part in ("", ".cpu", ".nvlink", ".shared"))
SERVICES = ("controller", "trainer", "inference")
TAG = os.environ.get("TANDEM_TAG", "0.1.0")
PROGRAMS = local_stack.PROGRAMS | {"up": "tandem", "supervisord": "supervisor.supervisord"}
# Prints the pids that have a word on their command line, oldest first, and sends them a signal (0: none).
_FIND = """
import os, sys
from contextlib import suppress
from pathlib import Path
word, number, only = sys.argv[1].encode(), int(sys.argv[2]), sys.argv[3] == "oldest"
pids = []
for entry in Path("/proc").glob("[0-9]*"):
    with suppress(OSError):
        if word in (entry / "cmdline").read_bytes().split(b"\\0"):
            pids.append(int(entry.name))
pids = sorted(set(pids) - {1, os.getpid()})[: 1 if only else None]
for pid in pids:
    os.kill(pid, number)
print(*pids)
"""

until = partial(waiting.until, poll=0.3)  # each check runs docker commands


def no_engine() -> str | None:
    """Why no engine can be used; None where one can."""
    if shutil.which("docker") is None:
        return "there is no docker command"
    for command in (["docker", "info"], ["docker", "compose", "version"]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            return f"`{' '.join(command)}` fails: {done.stderr.strip()[-300:]}"
    return None


def docker(*arguments: str, timeout: float = 120, check: bool = True) -> subprocess.CompletedProcess[str]:
    """`docker ...`; AssertionError with what it said where it fails and `check` asks for success."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=timeout, check=False)
    assert not check or done.returncode == 0, f"docker {' '.join(arguments)}: {done.returncode}\n{done.stderr[-4000:]}"
    return done


class Compose:
    """`docker compose` on some of the repository's files, undisturbed by .env and by the caller's variables."""

    def __init__(self, *files: str, project: str = "tandem-test", **variables: str) -> None:
        self.files = files
        self.project = project
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TANDEM_", "COMPOSE_", "HF_", "NCCL_"))}
        self.environment = kept | {"COMPOSE_PROJECT_NAME": project, "TANDEM_TAG": TAG} | variables

    def run(self, *arguments: str, timeout: float = 120, check: bool = True, **variables: str):
        command = ["docker", "compose", "--project-directory", str(ROOT), "--env-file", os.devnull]
        command += ["--progress", "plain"]
        for file in self.files:
            command += ["-f", file]
        done = subprocess.run([*command, *arguments], env=self.environment | variables, capture_output=True, text=True,
                              timeout=timeout, check=False)  # fmt: skip
        assert not check or done.returncode == 0, (
            f"docker compose {' '.join(arguments)}: {done.returncode}\n{(done.stdout + done.stderr)[-4000:]}"
        )
        return done

    def config(self, *profiles: str, **variables: str) -> dict[str, Any]:
        """What these files come to."""
        chosen = [word for profile in profiles for word in ("--profile", profile)]
        return json.loads(self.run(*chosen, "config", "--format", "json", **variables).stdout)


class ComposeStack(Compose):
    """The CPU stack. Nothing is started before `up`; all of it, volumes too, is gone after the `with`."""

    def __init__(self, directory: Path, *overrides: str, **variables: str) -> None:
        self.secrets_dir = directory / "secrets"
        self.secrets_dir.mkdir(parents=True)
        create = shutil.copy(ROOT / "secrets" / "create", self.secrets_dir)
        # A made-up one: it must leak as little as the others.
        (self.secrets_dir / "hf_token").write_text(f"hf_{secrets.token_hex(16)}")
        subprocess.run([create], check=True, capture_output=True)
        with ExitStack() as held:
            published = [held.enter_context(ports.reserve()).port for _ in range(3)]
        self.controller_port, self.inference_port, self.prometheus_port = published
        super().__init__(
            MAIN, CPU, *overrides,
            project=f"tandem-test-{secrets.token_hex(3)}",
            **{
                "TANDEM_SECRETS_DIR": str(self.secrets_dir),
                "TANDEM_MODELS_DIR": str(directory / "models"),
                "TANDEM_CONTROLLER_PORT": str(self.controller_port),
                "TANDEM_INFERENCE_PORT": str(self.inference_port),
                "PROMETHEUS_PORT": str(self.prometheus_port),
                "PROMETHEUS_IMAGE": os.environ.get("PROMETHEUS_IMAGE", "prom/prometheus:stand-in"),
                "TANDEM_HEARTBEAT_SECONDS": "1",
                "TANDEM_LEASE_SECONDS": "10",
                **variables,
            },
        )  # fmt: skip
        self.controller_url = f"http://127.0.0.1:{self.controller_port}"
        self.inference_url = f"http://127.0.0.1:{self.inference_port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.run("--profile", "*", "down", "-v", "--timeout", "5", "--remove-orphans", timeout=180)

    def up(self, *services: str, timeout: float = 300, profiles: Sequence[str] = (), **variables: str) -> float:
        """`up --wait`; the seconds it took. AssertionError with the ends of all logs where it fails."""
        begin = time.monotonic()
        chosen = [word for profile in profiles for word in ("--profile", profile)]
        done = self.run(*chosen, "up", "--wait", "--wait-timeout", str(int(timeout)), *services, check=False,
                        timeout=timeout + 60, **variables)  # fmt: skip
        seconds = time.monotonic() - begin
        # Compose up to 5.5 may end with 0 when the time is up.
        came_up = done.returncode == 0 and seconds < timeout
        assert came_up, f"up --wait: {done.returncode} after {seconds:.0f} s\n{done.stderr[-3000:]}\n{self.tails()}"
        return seconds

    def secret(self, name: str) -> str:
        return (self.secrets_dir / name).read_text()

    @cached_property
    def client(self) -> Tandem:
        return Tandem(self.controller_url, self.secret("api_key"))

    def container(self, service: str) -> str:
        """The id of a service's container, running or not."""
        ids = self.run("ps", "-a", "-q", service).stdout.split()
        assert len(ids) == 1, f"{service} has containers {ids}"
        return ids[0]

    def inspect(self, service: str) -> dict[str, Any]:
        return json.loads(docker("inspect", self.container(service)).stdout)[0]

    def status(self, service: str) -> str:
        """running and healthy | running and starting | exited and - | ..."""
        state = self.inspect(service)["State"]
        return f"{state['Status']} and {state.get('Health', {}).get('Status', '-')}"

    def healthy(self, service: str) -> bool:
        return self.status(service) == "running and healthy"

    def wait_healthy(self, *services: str, timeout: float = 240) -> None:
        for service in services:
            until(f"{service} is healthy, it is {self.status(service)}", lambda s=service: self.healthy(s), timeout, 1)

    def logs(self, service: str) -> str:
        done = docker("logs", self.container(service))
        return done.stdout + done.stderr

    def exits(self, since: float, container: str | None = None) -> dict[str, int]:
        """The latest exit status of each service's container, or of one container, that ended after `since` (Unix
        seconds)."""
        words = ["--since", f"{since:.3f}", "--until", f"{time.time() + 1:.3f}", "--format", "{{json .}}"]
        filters = ["event=die", f"label=com.docker.compose.project={self.project}"]
        for one in filters if container is None else [*filters, f"container={container}"]:
            words += ["--filter", one]
        actors = [json.loads(line)["Actor"]["Attributes"] for line in docker("events", *words).stdout.splitlines()]
        return {actor["com.docker.compose.service"]: int(actor["exitCode"]) for actor in actors}

    def tails(self, characters: int = 3000) -> str:
        """The end of each container's log, with how it is."""
        parts = []
        for identity in self.run("--profile", "*", "ps", "-a", "-q", check=False).stdout.split():
            about = json.loads(docker("inspect", identity).stdout)[0]
            log = docker("logs", identity, check=False)
            state = {key: about["State"].get(key) for key in ("Status", "ExitCode", "OOMKilled", "Error")}
            health = about["State"].get("Health", {})
            state |= {"restarts": about["RestartCount"], "health": health.get("Status")}
            last = [check["Output"][-300:] for check in health.get("Log", [])[-1:]]
            parts.append(f"==== {about['Name']} {state} {last}\n{(log.stdout + log.stderr)[-characters:]}")
        return "\n".join(parts)

    def exec(self, service: str, *command: str, timeout: float = 60, check: bool = True):
        return docker("exec", self.container(service), *command, timeout=timeout, check=check)

    def pids(self, service: str, program: str) -> list[int]:
        """Processes of a program, by their numbers in the container."""
        return self._signal(service, PROGRAMS[program], 0)

    def kill_program(self, service: str, program: str, number: int = signal.SIGKILL) -> int:
        """Signal the oldest process of a program, waiting until there is one; its number in the container."""
        found = until(f"a process of {program}", lambda: self._signal(service, PROGRAMS[program], number, True), 60)
        return found[0]

    def _signal(self, service: str, word: str, number: int, oldest: bool = False) -> list[int]:
        words = [word, str(int(number)), "oldest" if oldest else "all"]
        return [int(pid) for pid in self.exec(service, "python", "-c", _FIND, *words).stdout.split()]

    def kill_first(self, service: str) -> None:
        """kill -9 the container's first process, as the kernel's memory killer would: the engine didn't ask for it."""
        os.kill(self.inspect(service)["State"]["Pid"], signal.SIGKILL)
