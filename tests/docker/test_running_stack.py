"""A running stack learns through its published ports, is closed where it should be, and outlives `down` and `up`.

Each test goes on from the state that the one before it left.
"""

from __future__ import annotations

import asyncio
import json
import re
import time

import httpx
import pytest
import yes_no_maybe

from compose_stack import SERVICES, ComposeStack, docker, until
from monitoring.dashboards import metrics, queries, rules
from monitoring.test_names import ELSEWHERE, EXPORTED, KUBE_STATE_METRICS, PROMETHEUS_OWN, RECORDED

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(900)]
RUN = "my-run"
ANOTHER_UID = "54321"


def test_every_container_is_healthy(stack):
    for service in (*SERVICES, "prometheus"):
        assert stack.status(service) == "running and healthy"
        assert stack.inspect(service)["RestartCount"] == 0
    for service in ("preflight", "tiny-model"):
        assert stack.inspect(service)["State"]["ExitCode"] == 0
    stats = docker("stats", "--no-stream", "--format", "{{.Name}} {{.MemUsage}}").stdout
    print("\n" + "\n".join(line for line in stats.splitlines() if stack.project in line))
    for role in ("trainer", "inference"):
        found = re.search(r"ready after \d+ s", stack.logs(role))
        assert found, "`tandem up` says when it is ready"
        print(f"{role}: {found[0]}")


def test_the_example_learns_through_the_published_ports(stack, monkeypatch):
    monkeypatch.setenv("TANDEM_URL", stack.controller_url)
    monkeypatch.setenv("OPENAI_BASE_URL", f"{stack.inference_url}/v1")
    monkeypatch.setenv("TANDEM_API_KEY_FILE", str(stack.secrets_dir / "api_key"))
    monkeypatch.delenv("TANDEM_API_KEY", raising=False)
    report = asyncio.run(yes_no_maybe.train(RUN, tell=lambda *_: None))
    assert abs(report["sft_reward"] - 0.75) <= 0.05
    assert report["rl_reward"] >= 0.95
    assert max(row["metrics"]["kl_sampler"] for row in report["steps"]) < 1e-3
    for job in stack.client.list_jobs(RUN):
        assert (job.state, job.attempt) == ("succeeded", 1)


# ---------------------------------------------------------------- hardened

# Every process's user, capabilities and NoNewPrivs.
_STATUS = """
import pathlib
for status in pathlib.Path("/proc").glob("[0-9]*/status"):
    try:
        found = dict(line.split(":", 1) for line in status.read_text().splitlines())
    except OSError:
        continue
    print(*found["Uid"].split(), found["Gid"].split()[0], *(found[c].strip() for c in ("CapEff", "CapPrm", "CapBnd")),
          found["NoNewPrivs"].strip(), found["Seccomp"].strip())
"""


def held(stack: ComposeStack, uid: str) -> None:
    for service in SERVICES:
        lines = stack.exec(service, "python", "-c", _STATUS).stdout.splitlines()
        none = "0" * 16
        assert len(lines) >= 3
        assert set(lines) == {" ".join([uid] * 4 + ["0", none, none, none, "1", "2"])}, service
        for path in ("/x", "/opt/tandem/x", "/usr/bin/x", "/etc/x", "/entrypoint"):
            done = stack.exec(service, "sh", "-c", f"echo x >>{path}", check=False)
            assert done.returncode != 0
            # What is there already is refused for its mode, before that.
            reason = "Permission denied" if path == "/entrypoint" else "Read-only file system"
            assert reason in done.stderr, (service, path)


def test_no_user_is_root_and_nothing_but_volumes_can_be_written(stack):
    held(stack, "2000")


def test_containers_see_only_their_secrets(stack):
    expected = {
        "controller": {"api_key", "hf_token"},
        "trainer": {"api_key", "hf_token"},
        "inference": {"api_key", "admin_token", "hf_token"},
    }
    for service, names in expected.items():
        assert set(stack.exec(service, "ls", "/run/secrets").stdout.split()) == names


CLOSED = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/pause", "/resume", "/sleep", "/wake_up",
          "/collective_rpc", "/update_weights", "/init_weight_transfer_engine", "/reset_prefix_cache", "/server_info",
          "/adapters", "/start_profile", "/v1/responses", "/docs", "/openapi.json")  # fmt: skip


def test_admin_routes_of_the_published_port_want_the_admin_token(stack):
    api = {"Authorization": f"Bearer {stack.secret('api_key')}"}
    wrong = {"X-Tandem-Admin-Token": stack.secret("api_key")}
    for path in CLOSED:
        for method in ("GET", "POST"):
            for headers in ({}, api, api | wrong):
                answer = httpx.request(method, stack.inference_url + path, headers=headers, timeout=30)
                assert answer.status_code == 401, (method, path, answer.text)
    admin = api | {"X-Tandem-Admin-Token": stack.secret("admin_token")}
    for path in CLOSED:
        answer = httpx.request("GET", stack.inference_url + path, headers=admin, timeout=30)
        assert answer.status_code != 401, path
    # What they do is not asked for, but that one is let through to vLLM.
    gone = {"lora_name": "no-such"}
    answer = httpx.post(f"{stack.inference_url}/v1/unload_lora_adapter", json=gone, headers=admin, timeout=30)
    assert answer.status_code == 404
    assert httpx.get(f"{stack.inference_url}/v1/models", timeout=30).status_code == 401
    assert httpx.get(f"{stack.controller_url}/v1/runs", timeout=30).status_code == 401


def test_nothing_but_the_public_ports_can_be_reached_from_the_host(stack):
    for service in (*SERVICES, "prometheus"):
        published = {port for port, to in stack.inspect(service)["NetworkSettings"]["Ports"].items() if to}
        expected = {"controller": {"8080/tcp"}, "inference": {"8000/tcp"}, "prometheus": {"9090/tcp"}}
        assert published == expected.get(service, set())


def test_secrets_are_nowhere_but_in_their_files(stack):
    names = ("api_key", "admin_token", "hf_token", "grafana_password")
    containers = stack.run("--profile", "*", "ps", "-a", "-q").stdout.split()
    assert len(containers) == 6
    said = docker("inspect", *containers).stdout
    for container in containers:
        done = docker("logs", container)
        said += done.stdout + done.stderr
        image = json.loads(docker("inspect", container).stdout)[0]["Image"]
        said += docker("history", "--no-trunc", image).stdout + docker("inspect", image).stdout
    said += stack.client.list_jobs(RUN)[0].model_dump_json()
    said += "".join(stack.client.logs(job.id) for job in stack.client.list_jobs(RUN))
    assert len(said) > 100_000
    for name in names:
        assert stack.secret(name) not in said, name
    places = ["/data", "/cache", "/tmp", "/run/tandem"]
    for service in SERVICES:
        everything = ["grep", "-rslF", "-D", "skip"]
        assert stack.exec(service, *everything, RUN, *places).stdout, "what is there can be found"
        for name in stack.exec(service, "ls", "/run/secrets").stdout.split():
            done = stack.exec(service, *everything, "-f", f"/run/secrets/{name}", *places, check=False)
            assert not done.stdout, f"{service}: {name} stands in {done.stdout}"
    # The admin token, which most have not, in what all share and in what the inference container alone has: done above.


# ---------------------------------------------------------------- monitored


def ask(stack: ComposeStack, path: str, **parameters: str):
    answer = httpx.get(f"http://127.0.0.1:{stack.prometheus_port}/api/v1/{path}", params=parameters, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


def test_prometheus_reaches_every_target(stack):
    def up():
        targets = ask(stack, "targets")["activeTargets"]
        return targets if all(target["health"] == "up" for target in targets) else None

    targets = until("every target is up", up, 60)
    assert {target["labels"]["job"] for target in targets} == {
        "tandem-controller", "tandem-trainer", "tandem-inference", "tandem-vllm",
    }  # fmt: skip
    assert {target["labels"]["namespace"] for target in targets} == {"compose"}


# What needs a GPU: a scrape of one has it, tests/monitoring/recorded.
GPU_ONLY = re.compile(r"tandem_gpu_|tandem_torch_|tandem_job_gpu_")
# What no scrape of a stack that trains and is well has.
NOT_HERE = {"tandem_train_kl": "only where a job measures KL to a reference"}


def test_every_metric_of_rules_and_dashboards_exists(stack):
    used = {name for _, expr in queries() for name in metrics(expr)}
    used |= {name for rule in rules() for name in metrics(rule["expr"])}
    used -= RECORDED | PROMETHEUS_OWN | KUBE_STATE_METRICS
    # Some exist only while a job runs, which must last for a scrape or two: what counts is the stack's whole life.
    step = stack.client.get_run(RUN).newest_step
    job = submit(stack, RUN, epochs=600)
    assert stack.client.wait_job(job, timeout=240).state == "succeeded"
    stack.client.wait_served(RUN, step + 1, timeout=120)
    known = set(ask(stack, "label/__name__/values"))
    assert len(used & known) > 60
    missing = used - known
    assert {name for name in missing if not GPU_ONLY.match(name)} == set(NOT_HERE)
    assert missing - set(NOT_HERE) <= EXPORTED | set(ELSEWHERE)
    assert known >= {name for name in RECORDED if "gpu" not in name and "torch" not in name}


def test_rules_can_be_evaluated_and_nothing_fires(stack):
    groups = ask(stack, "rules")["groups"]
    evaluated = [rule for group in groups for rule in group["rules"]]
    assert len(evaluated) > 20
    assert {rule["name"]: rule.get("lastError") for rule in evaluated if rule["health"] != "ok"} == {}
    firing = [rule["name"] for rule in evaluated if rule["type"] == "alerting" and rule["state"] == "firing"]
    assert not firing


# ---------------------------------------------------------------- down and up

EXAMPLES = [
    {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
    for q in ("Is it?", "Was it?")
    for a in ("yes", "no")
]


def submit(stack: ComposeStack, run: str, epochs: int) -> str:
    job = stack.client.train_sft(run, examples=EXAMPLES, packing={"sequence_length": 128},
                                 optimizer={"learning_rate": 1e-4, "epochs": epochs})  # fmt: skip
    return job.spec.id


def test_down_in_the_middle_of_a_job_and_up_as_another_user(stack):
    """Nothing is lost: the job goes back to the queue uncounted, and who comes next, whatever its uid, goes on."""
    step = stack.client.get_run(RUN).newest_step
    job = submit(stack, RUN, epochs=400)
    until("the job makes steps", lambda: any(e.type == "step" for e in stack.client.job_events(job)), 60)
    begin = time.time()
    took = time.monotonic()
    stack.run("--profile", "*", "down", timeout=200)
    took = time.monotonic() - took
    print(f"\ndown took {took:.1f} s")
    assert took < 75 + 10
    assert stack.exits(begin) == dict.fromkeys((*SERVICES, "prometheus"), 0)

    stack.environment["TANDEM_UID"] = ANOTHER_UID
    print(f"up again took {stack.up():.0f} s")
    held(stack, ANOTHER_UID)
    events = stack.client.job_events(job)
    assert not any(event.type in ("failed", "cancelled") for event in events)
    requeued = [event for event in events if event.type == "requeued"]
    assert [event.data["error"]["type"] for event in requeued] == ["runner_stopped"]
    # What was served is served by the new vLLM, though the job may be done before vLLM is up; and the run goes on.
    stack.client.wait_served(RUN, step, timeout=120)
    until(f"step {step} answers again", lambda: asked(stack, step) == 200, 60)
    done = stack.client.wait_job(job, timeout=240)
    assert (done.state, done.step, done.attempt) == ("succeeded", step + 1, 2)
    stack.client.wait_served(RUN, step + 1, timeout=120)
    assert asked(stack, step + 1) == 200


def asked(stack: ComposeStack, step: int) -> int:
    """The status of a chat with the policy of `step`, as a user asks."""
    words = {"model": f"{RUN}@{step}", "max_tokens": 4, "messages": [{"role": "user", "content": "Is it?"}]}
    key = {"Authorization": f"Bearer {stack.secret('api_key')}"}
    return httpx.post(f"{stack.inference_url}/v1/chat/completions", json=words, headers=key, timeout=60).status_code


def test_files_of_one_user_can_be_changed_by_the_next(stack):
    """What both users wrote is the group's. The base model is only read."""
    here = ("/data", "-path", "/data/models", "-prune", "-o", "-not", "-type", "l")
    for service in SERVICES:
        closed = stack.exec(service, "find", *here, "!", "-perm", "-g=w", "-print").stdout
        assert not closed, f"not the group's: {closed[:1000]}"
        assert stack.exec(service, "find", *here, "!", "-group", "0", "-print").stdout == ""
