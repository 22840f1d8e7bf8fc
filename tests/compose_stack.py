"""Stacks of containers that `docker compose` starts, each with its own name, ports, secrets and
volumes.

Tests inspect the containers of the stacks and kill the containers' processes.
"""

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

import local_stack
import waiting
from free_ports import free_ports
from tandem.client import Tandem

ROOT = Path(__file__).parent.parent
MAIN, CPU, NVLINK, SHARED, HOSTS = (
    str(ROOT / f"docker-compose{part}.yml") for part in ("", ".cpu", ".nvlink", ".shared", ".hosts")
)
SERVICES = ("controller", "trainer", "inference")
TAG = os.environ.get("TANDEM_TAG", "0.1.0")
PROGRAMS = local_stack.PROGRAMS | {"supervisord": "supervisor.supervisord"}
"""Program → a word on its processes' command lines."""
# Prints the fields of every process's /proc status, as JSON by pid.
PROCESSES = """
import json, pathlib
processes = {}
for entry in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        lines = (entry / "status").read_text().splitlines()
        processes[entry.name] = {k: v.strip() for k, v in (line.split(":", 1) for line in lines)}
    except OSError:
        pass
print(json.dumps(processes))
"""

# The tests poll only every 0.3 s, because each check runs docker commands.
until = partial(waiting.until, poll=0.3)


LEAST_COMPOSE = (2, 24)  # the compose files use `!reset` and `!override`


def require_engine() -> None:
    """Skip the test if there is no Docker engine or no Compose. If TANDEM_REQUIRE_DOCKER=1, fail
    the test instead."""
    require_compose()
    if os.environ.get("TANDEM_REQUIRE_DOCKER") == "1":
        until("the Docker engine answers", lambda: _answer("info") is not None)
    elif _answer("info") is None:
        pytest.skip("needs a Docker engine: `docker info` gets no answer from one")


def require_compose() -> None:
    """Skip the test if there is no Compose that can read this repository's files. If
    TANDEM_REQUIRE_DOCKER=1, fail the test instead. Reading the files needs no Docker engine."""
    if problem := _compose_problem():
        if os.environ.get("TANDEM_REQUIRE_DOCKER") == "1":
            pytest.fail(problem)
        pytest.skip(problem)


def _compose_problem() -> str | None:
    """The reason why `docker compose` can't read the files; None if `docker compose` can read
    them."""
    least = ".".join(map(str, LEAST_COMPOSE))
    if not shutil.which("docker"):
        return f"needs Docker Compose {least}: no program `docker` is on PATH"
    answer = _answer("compose", "version", "--short")
    version = re.match(r"v?(\d+)\.(\d+)", answer or "")
    if version is None:
        return f"needs Docker Compose {least}: `docker compose version` gives no version"
    if tuple(map(int, version.groups())) < LEAST_COMPOSE:
        return f"needs Docker Compose {least}: this is {version[0]}"
    return None


def _answer(*arguments: str) -> str | None:
    """The output of `docker ...`; None if it fails or takes a minute."""
    try:
        done = subprocess.run(
            ["docker", *arguments], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def build_images() -> None:
    """Build the CPU images of this checkout.

    BuildKit in Docker 20.10 crashes the engine if one build moves BuildKit's metadata while another
    build reads the metadata. `.ci/run` starts the engine again, and the second try continues from
    the stages that the first try built.
    """
    build = partial(Compose(MAIN, CPU, project="tandem").run, "build", timeout=3000)
    if build(check=False).returncode:
        require_engine()
        build()


def docker(
    *arguments: str, stdin: str | None = None, timeout: float = 120, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run `docker ...`. Raises AssertionError with the command's errors if `check` is set and the
    command fails."""
    done = subprocess.run(
        ["docker", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
        check=False,
    )
    assert not check or done.returncode == 0, (
        f"docker {' '.join(arguments)}: {done.returncode}\n{done.stderr[-4000:]}"
    )
    return done


def _profiles(names: Sequence[str]) -> list[str]:
    return [word for name in names for word in ("--profile", name)]


class Compose:
    """`docker compose` on some files, without .env and the caller's variables.

    `up` starts the stack. The end of the context removes the stack with its volumes.
    """

    def __init__(self, *files: str, project: str = "tandem-test", **variables: str) -> None:
        self.files = files
        self.project = project
        kept = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("TANDEM_", "COMPOSE_", "HF_", "NCCL_"))
        }
        self.environment = kept | {"COMPOSE_PROJECT_NAME": project, "TANDEM_TAG": TAG} | variables

    def run(self, *arguments: str, timeout: float = 120, check: bool = True, **variables: str):
        command = [
            "docker",
            "compose",
            "--project-directory",
            str(ROOT),
            "--env-file",
            os.devnull,
            "--progress",
            "plain",
            *(word for file in self.files for word in ("-f", file)),
        ]
        done = subprocess.run(
            [*command, *arguments],
            env=self.environment | variables,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert not check or done.returncode == 0, (
            f"docker compose {' '.join(arguments)}:"
            f" {done.returncode}\n{(done.stdout + done.stderr)[-4000:]}"
        )
        return done

    def config(self, *profiles: str, **variables: str) -> dict[str, Any]:
        """The merged configuration."""
        return json.loads(
            self.run(*_profiles(profiles), "config", "--format", "json", **variables).stdout
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.run("--profile", "*", "down", "-v", "--timeout", "5", "--remove-orphans", timeout=180)

    def up(
        self, *services: str, timeout: float = 300, profiles: Sequence[str] = (), **variables: str
    ) -> float:
        """Run `up --wait`. Returns the duration of the command in seconds. Raises AssertionError
        with the ends of all logs if the command fails."""
        begin = time.monotonic()
        words = [
            *_profiles(profiles),
            "up",
            "--wait",
            "--wait-timeout",
            str(int(timeout)),
            *services,
        ]
        done = self.run(*words, check=False, timeout=timeout + 60, **variables)
        seconds = time.monotonic() - begin
        # Compose up to version 5.5 may exit with 0 when `up --wait` reaches its timeout.
        came_up = done.returncode == 0 and seconds < timeout
        assert came_up, (
            f"up --wait: {done.returncode} after {seconds:.0f}"
            f" s\n{done.stderr[-3000:]}\n{self.tails()}"
        )
        return seconds

    def container(self, service: str) -> str:
        """The id of a service's container, running or not."""
        ids = self.run("ps", "-a", "-q", service).stdout.split()
        assert len(ids) == 1, f"{service} has containers {ids}"
        return ids[0]

    def inspect(self, service: str) -> dict[str, Any]:
        return json.loads(docker("inspect", self.container(service)).stdout)[0]

    def status(self, service: str) -> str:
        """`<state> and <health>`, such as `running and healthy`. A container without a health check
        has `-` as its health."""
        state = self.inspect(service)["State"]
        return f"{state['Status']} and {state.get('Health', {}).get('Status', '-')}"

    def healthy(self, service: str) -> bool:
        return self.status(service) == "running and healthy"

    def wait_healthy(self, *services: str, timeout: float = 240) -> None:
        for service in services:
            until(
                f"{service} is healthy, it is {self.status(service)}",
                partial(self.healthy, service),
                timeout,
                poll=2,
            )

    def logs(self, service: str) -> str:
        done = docker("logs", self.container(service))
        return done.stdout + done.stderr

    def exits(self, since: float, container: str | None = None) -> dict[str, int]:
        """For each service, the exit status of the last container that ended after `since` (Unix
        seconds). If `container` is given, only this container counts."""
        words = [
            "--since",
            f"{since:.3f}",
            "--until",
            f"{time.time() + 1:.3f}",
            "--format",
            "{{json .}}",
        ]
        filters = ["event=die", f"label=com.docker.compose.project={self.project}"]
        for one in filters if container is None else [*filters, f"container={container}"]:
            words += ["--filter", one]
        actors = [
            json.loads(line)["Actor"]["Attributes"]
            for line in docker("events", *words).stdout.splitlines()
        ]
        return {actor["com.docker.compose.service"]: int(actor["exitCode"]) for actor in actors}

    def tails(self, characters: int = 3000) -> str:
        """The end of each container's log, with the container's state."""
        parts = []
        for identity in self.run("--profile", "*", "ps", "-a", "-q", check=False).stdout.split():
            about = json.loads(docker("inspect", identity).stdout)[0]
            log = docker("logs", identity, check=False)
            state = {
                key: about["State"].get(key) for key in ("Status", "ExitCode", "OOMKilled", "Error")
            }
            health = about["State"].get("Health", {})
            state |= {"restarts": about["RestartCount"], "health": health.get("Status")}
            last = [check["Output"][-300:] for check in health.get("Log", [])[-1:]]
            parts.append(
                f"==== {about['Name']} {state} {last}\n{(log.stdout + log.stderr)[-characters:]}"
            )
        return "\n".join(parts)

    def exec(self, service: str, *command: str, timeout: float = 60, check: bool = True):
        return docker("exec", self.container(service), *command, timeout=timeout, check=check)

    def pids(self, service: str, program: str, then: str = "") -> list[int]:
        """The pids of a program's processes in the container; `then`: a shell command for each
        `$pid`."""
        word = PROGRAMS[program]
        # The brackets keep `grep` from finding its own process.
        find = f"grep -lzx '[{word[0]}]{word[1:]}' /proc/[0-9]*/cmdline"
        script = f"for pid in $({find} | cut -d/ -f3); do echo $pid; {then or ':'}; done"
        return [
            int(pid) for pid in self.exec(service, "sh", "-c", script, check=False).stdout.split()
        ]

    def kill_program(self, service: str, program: str, number: int = signal.SIGKILL) -> None:
        """Wait for a program's process and signal it."""
        kill = f"kill -{int(number)} $pid"
        until(f"a process of {program}", lambda: self.pids(service, program, kill))

    def kill_first(self, service: str) -> None:
        """Kill the container's first process as the kernel's OOM killer does, without the
        engine."""
        os.kill(self.inspect(service)["State"]["Pid"], signal.SIGKILL)

    def kill_container(self, service: str) -> None:
        """`docker kill`, after which the engine does not restart the container."""
        docker("kill", self.container(service))
        assert self.inspect(service)["State"]["ExitCode"] == 137


def check_processes(stack: Compose, service: str, uid: str) -> None:
    """Check that every process has the user `uid` and no capabilities, and that the root file
    system is read-only."""
    for status in json.loads(stack.exec(service, "python", "-c", PROCESSES).stdout).values():
        if status["Name"].startswith("runc:"):
            # This process is a health check whose rights runc has not yet dropped completely.
            continue
        assert status["Uid"].split() == [uid] * 4
        assert status["Gid"].split()[0] == "0"
        assert {status[name] for name in ("CapEff", "CapPrm", "CapBnd", "CapInh")} == {"0" * 16}
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    for path in ("/x", "/opt/tandem/x", "/usr/bin/x", "/etc/x"):
        done = stack.exec(service, "sh", "-c", f"echo x >>{path}", check=False)
        assert "Read-only file system" in done.stderr, (service, path)


@cache
def everything(*files: str, **variables: str) -> dict[str, Any]:
    """The output of `docker compose config` for all profiles."""
    return Compose(*files).config("*", **variables)


class ComposeStack(Compose):
    """The CPU stack, with ports, secrets and a client of its own."""

    def __init__(self, directory: Path, *overrides: str, **variables: str) -> None:
        self.secrets_dir = directory / "secrets"
        self.secrets_dir.mkdir(parents=True)
        create = shutil.copy(ROOT / "secrets" / "create", self.secrets_dir)
        (self.secrets_dir / "hf_token").write_text(f"hf_{secrets.token_hex(16)}")
        subprocess.run([create], check=True, capture_output=True)
        self.controller_port, self.inference_port, self.prometheus_port = free_ports(3)
        super().__init__(
            MAIN,
            CPU,
            *overrides,
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
        )
        self.controller_url = f"http://127.0.0.1:{self.controller_port}"
        self.inference_url = f"http://127.0.0.1:{self.inference_port}"

    def secret(self, name: str) -> str:
        return (self.secrets_dir / name).read_text()

    @cached_property
    def client(self) -> Tandem:
        return Tandem(self.controller_url, self.secret("api_key"))

    def submit(self, run: str, epochs: int, **options: Any) -> str:
        return local_stack.train(self.client, run, epochs, learning_rate=1e-4, **options)

    @property
    def api_headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.secret('api_key')}"}

    def chat_status(self, model: str) -> int | None:
        """The HTTP status of a chat; None without an answer."""
        body = {
            "model": model,
            "max_tokens": 4,
            "messages": [{"role": "user", "content": "Is it?"}],
        }
        url = f"{self.inference_url}/v1/chat/completions"
        try:
            return httpx.post(url, json=body, headers=self.api_headers, timeout=60).status_code
        except httpx.TransportError:
            return None
