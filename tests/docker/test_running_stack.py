"""A running stack trains a model through its published ports, refuses other access, and survives
`down` and `up`.

Each test continues from the state that the test before it left.
"""

import asyncio
import json
import re
import time

import httpx
import pytest
import yes_no_maybe

from compose_stack import SERVICES, ComposeStack, check_processes, docker, until
from monitoring.dashboards import metrics, queries, rules
from monitoring.test_names import KUBE_STATE_METRICS, PROMETHEUS_OWN, RECORDED

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(900)]
RUN = "my-run"
ANOTHER_UID = "54321"


def test_every_container_is_healthy(stack):
    for service in (*SERVICES, "prometheus"):
        assert stack.status(service) == "running and healthy"
        assert stack.inspect(service)["RestartCount"] == 0
    for service in ("preflight", "tiny-model"):
        assert stack.inspect(service)["State"]["ExitCode"] == 0
    for role in ("trainer", "inference"):
        assert re.search(r"ready after \d+ s", stack.logs(role)), (
            "`tandem up` says when it is ready"
        )


def test_the_example_learns_through_the_published_ports(stack, monkeypatch):
    monkeypatch.setenv("TANDEM_URL", stack.controller_url)
    monkeypatch.setenv("TANDEM_INFERENCE_URL", stack.inference_url)
    monkeypatch.setenv("TANDEM_API_KEY_FILE", str(stack.secrets_dir / "api_key"))
    monkeypatch.delenv("TANDEM_API_KEY", raising=False)
    # tests/stack runs all steps of the example.
    report = asyncio.run(yes_no_maybe.train(RUN, rl_steps=6, tell=lambda *_: None))
    assert abs(report["sft_reward"] - 0.75) <= 0.05
    assert report["rl_reward"] > report["sft_reward"] + 0.02
    assert max(row["metrics"]["kl_sampler"] for row in report["steps"]) < 1e-3
    for job in stack.client.list_jobs(RUN):
        assert (job.state, job.attempt) == ("succeeded", 1)


def test_no_process_is_root_and_only_volumes_are_writable(stack):
    for service in SERVICES:
        check_processes(stack, service, "2000")


# `test_real_vllm` sends requests to every route of vLLM.
CLOSED = (
    "/v1/load_lora_adapter",
    "/pause",
    "/sleep",
    "/collective_rpc",
    "/v1/responses",
    "/docs",
    "/openapi.json",
)


def test_admin_routes_of_the_published_port_require_the_admin_token(stack):
    api = stack.api_headers
    wrong = {"X-Tandem-Admin-Token": stack.secret("api_key")}
    for path in CLOSED:
        for method in ("GET", "POST"):
            for headers in ({}, api, api | wrong):
                answer = httpx.request(
                    method, stack.inference_url + path, headers=headers, timeout=30
                )
                assert answer.status_code == 401, (method, path, answer.text)
    admin = api | {"X-Tandem-Admin-Token": stack.secret("admin_token")}
    for path in CLOSED:
        answer = httpx.request("GET", stack.inference_url + path, headers=admin, timeout=30)
        assert answer.status_code != 401, path
    # A request with the admin token reaches vLLM.
    unknown = {"lora_name": "no-such"}
    answer = httpx.post(
        f"{stack.inference_url}/v1/unload_lora_adapter", json=unknown, headers=admin, timeout=30
    )
    assert answer.status_code == 404
    assert httpx.get(f"{stack.inference_url}/v1/models", timeout=30).status_code == 401
    assert httpx.get(f"{stack.controller_url}/v1/runs", timeout=30).status_code == 401


def test_secrets_are_only_in_their_files(stack):
    names = ("api_key", "admin_token", "hf_token", "grafana_password")
    containers = stack.run("--profile", "*", "ps", "-a", "-q").stdout.split()
    assert len(containers) == 6
    output = docker("inspect", *containers).stdout
    for container in containers:
        done = docker("logs", container)
        output += done.stdout + done.stderr
        image = json.loads(docker("inspect", container).stdout)[0]["Image"]
        output += docker("history", "--no-trunc", image).stdout + docker("inspect", image).stdout
    output += stack.client.list_jobs(RUN)[0].model_dump_json()
    output += "".join(stack.client.logs(job.id) for job in stack.client.list_jobs(RUN))
    assert len(output) > 100_000
    for name in names:
        assert stack.secret(name) not in output, name
    places = ["/data", "/cache", "/private-cache", "/tmp", "/run/tandem"]
    for service in SERVICES:
        everything = ["grep", "-rslF", "-D", "skip"]
        assert stack.exec(service, *everything, RUN, *places).stdout, "grep finds existing text"
        for name in stack.exec(service, "ls", "/run/secrets").stdout.split():
            done = stack.exec(
                service, *everything, "-f", f"/run/secrets/{name}", *places, check=False
            )
            assert not done.stdout, f"{service}: {name} is in {done.stdout}"


def ask(stack: ComposeStack, path: str, **parameters: str):
    answer = httpx.get(
        f"http://127.0.0.1:{stack.prometheus_port}/api/v1/{path}", params=parameters, timeout=30
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


def test_prometheus_reaches_every_target(stack):
    def up():
        targets = ask(stack, "targets")["activeTargets"]
        return targets if all(target["health"] == "up" for target in targets) else None

    targets = until("every target is up", up)
    assert {target["labels"]["job"] for target in targets} == {
        "tandem-controller",
        "tandem-trainer",
        "tandem-inference",
        "tandem-vllm",
    }
    assert {target["labels"]["namespace"] for target in targets} == {"compose"}


# Metrics that need a GPU.
GPU_ONLY = re.compile(r"tandem_gpu_|tandem_torch_|tandem_job_gpu_")
# Metrics that a healthy stack's training does not export.
NOT_HERE = {
    "tandem_train_kl": "only where a job measures KL to a reference",
    "tandem_train_held_out_loss": "only where a job has held-out examples",
    "tandem_train_logprob_mismatch_stale": "only where turns are older than their job's base step",
    "tandem_job_waiting_seconds": "only while an attempt waits in a cluster's queue",
    "tandem_session_idle_seconds": "only while a session's job runs",
    "tandem_merged_phase": "only with merged weights",
    "tandem_merged_runs": "only with merged weights",
    **dict.fromkeys(
        (
            "tandem_replica_ready",
            "tandem_replica_steps_behind",
            "tandem_replica_publish_seconds",
            "tandem_replicas_wanted",
        ),
        "only with several inference servers",
    ),
}


@pytest.mark.sample(1, of="long jobs of a running stack")
def test_every_metric_of_rules_and_dashboards_exists(stack):
    used = {name for _, expr in queries() for name in metrics(expr)}
    used |= {name for rule in rules() for name in metrics(rule["expr"])}
    used -= RECORDED | PROMETHEUS_OWN | KUBE_STATE_METRICS
    # Some metrics exist only while a job runs, so the job must last for a scrape or two.
    step = stack.client.get_run(RUN).newest_step
    job = stack.submit(RUN, epochs=600)
    assert stack.client.wait_job(job, timeout=240).state == "succeeded"
    stack.client.wait_served(RUN, step + 1, timeout=120)
    known = set(ask(stack, "label/__name__/values"))
    assert len(used & known) > 60
    assert {name for name in used - known if not GPU_ONLY.match(name)} == set(NOT_HERE)
    assert known >= {name for name in RECORDED if "gpu" not in name and "torch" not in name}


def test_rules_can_be_evaluated_and_nothing_fires(stack):
    groups = ask(stack, "rules")["groups"]
    evaluated = [rule for group in groups for rule in group["rules"]]
    assert len(evaluated) > 20
    assert {
        rule["name"]: rule.get("lastError") for rule in evaluated if rule["health"] != "ok"
    } == {}
    firing = [
        rule["name"]
        for rule in evaluated
        if rule["type"] == "alerting" and rule["state"] == "firing"
    ]
    assert not firing


@pytest.mark.sample(1, of="long jobs of a running stack")
def test_down_in_the_middle_of_a_job_and_up_as_another_user(stack):
    """The job returns to the queue, and the interrupted attempt does not count. Containers of
    another uid continue the job."""
    step = stack.client.get_run(RUN).newest_step
    job = stack.submit(RUN, epochs=400)
    until(
        "the job makes steps", lambda: any(e.type == "step" for e in stack.client.job_events(job))
    )
    begin = time.time()
    stack.run("--profile", "*", "down", timeout=200)
    assert time.time() - begin < 75 + 10
    assert stack.exits(begin) == dict.fromkeys((*SERVICES, "prometheus"), 0)

    stack.environment["TANDEM_UID"] = ANOTHER_UID
    stack.up()
    for service in SERVICES:
        check_processes(stack, service, ANOTHER_UID)
    events = stack.client.job_events(job)
    assert not any(event.type in ("failed", "cancelled") for event in events)
    requeued = [event for event in events if event.type == "requeued"]
    assert [event.data["error"]["type"] for event in requeued] == ["runner_stopped"]
    # The new vLLM serves the old step. The job may end before vLLM is ready.
    stack.client.wait_served(RUN, step, timeout=120)
    until(f"step {step} answers again", lambda: stack.chat_status(f"{RUN}@{step}") == 200)
    done = stack.client.wait_job(job, timeout=240)
    assert (done.state, done.step, done.attempt) == ("succeeded", step + 1, 2)
    stack.client.wait_served(RUN, step + 1, timeout=120)
    assert stack.chat_status(f"{RUN}@{step + 1}") == 200


def test_files_of_one_user_can_be_changed_by_the_next(stack):
    """All files except the base model belong to the group, and the group may write them."""
    here = ("/data", "-path", "/data/models", "-prune", "-o", "-not", "-type", "l")
    for service in SERVICES:
        closed = stack.exec(service, "find", *here, "!", "-perm", "-g=w", "-print").stdout
        assert not closed, f"not the group's: {closed[:1000]}"
        assert stack.exec(service, "find", *here, "!", "-group", "0", "-print").stdout == ""
