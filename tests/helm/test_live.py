"""What the chart renders starts and works: installed by the real Helm library into the cluster in memory, whose pods
run on a real Docker engine as their specs say (`helm.kubelet`), as a user that no image knows.

The tests go on from one another, in the order they stand here.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator

import httpx
import pytest

from compose_stack import CPU, MAIN, PROGRAMS, TAG, Compose, no_engine
from helm import charts, engine
from helm.cluster import Cluster
from helm.engine import docker
from helm.kubelet import Kubelet
from helm.live import NAMESPACE, RELEASE, RUN, UID, Live

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(600)]
ROLES = ("controller", "trainer", "inference")
OTHER_TAG = f"live-{secrets.token_hex(3)}"


@pytest.fixture(scope="module", autouse=True)
def images() -> Iterator[None]:
    """This checkout's images, and the trainer's under a second tag."""
    if why := no_engine():
        if os.environ.get("TANDEM_REQUIRE_DOCKER") == "1":
            pytest.fail(f"TANDEM_REQUIRE_DOCKER=1, but {why}")
        pytest.skip(f"needs a Docker engine: {why}")
    Compose(MAIN, CPU, project="tandem").run("build", timeout=3000)
    docker("tag", f"tandem-trainer:{TAG}-cpu", f"tandem-trainer:{OTHER_TAG}")
    yield
    docker("rmi", f"tandem-trainer:{OTHER_TAG}", check=False)


@pytest.fixture(scope="module")
def live(request, images) -> Iterator[Live]:
    with Cluster() as cluster, Kubelet(cluster, helper=f"tandem-controller:{TAG}") as node:
        live = Live(cluster, node)
        begin = time.monotonic()
        try:
            charts.install(cluster, live.values, release=RELEASE, namespace=NAMESPACE, wait=True, timeout=300)
        except Exception as error:
            pytest.fail(f"helm install --wait: {error}\n{node.tails()}")
        print(f"\nhelm install --wait took {time.monotonic() - begin:.0f} s")
        failed = request.session.testsfailed
        yield live
        if request.session.testsfailed > failed:
            print(node.tails())
        begin = time.monotonic()
    print(f"\nclearing up took {time.monotonic() - begin:.0f} s")
    assert not docker("ps", "-aq", "--filter", f"label={node.label}").strip()
    assert not docker("volume", "ls", "-q", "--filter", f"label={node.label}").strip()


def test_every_pod_is_ready_at_the_first_try(live):
    for role in ROLES:
        assert live.pod(role)["status"]["phase"] == "Running"
        assert (live.status(role)["ready"], live.status(role)["restartCount"]) == (True, 0)
        for init in live.pod(role)["status"]["initContainerStatuses"]:
            assert (init["state"]["terminated"]["exitCode"], init["restartCount"]) == (0, 0)
        assert "fail" not in live.node.log(live.pod(role)["metadata"]["name"], "preflight")


# ---------------------------------------------------------------- hardened

# Every process's parent, user, groups, capabilities, NoNewPrivs and state.
_STATUS = """
import json, pathlib
found = {}
for entry in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        lines = (entry / "status").read_text().splitlines()
        found[entry.name] = {k: v.strip() for k, v in (line.split(":", 1) for line in lines)}
        found[entry.name]["command"] = (entry / "cmdline").read_text()
    except OSError:
        pass
print(json.dumps(found))
"""


def processes(live: Live, role: str) -> dict[str, dict[str, str]]:
    return json.loads(live.node.exec(f"tandem-{role}", "python", "-c", _STATUS))


def test_processes_have_no_rights(live):
    for role in ROLES:
        found = processes(live, role)
        # No init process: it is the first itself.
        assert "tandem" in found["1"]["command"]
        for status in found.values():
            assert status["Uid"].split() == [str(UID)] * 4
            assert (status["Gid"].split()[0], status["Groups"]) == ("0", "0")
            assert {status[name] for name in ("CapEff", "CapPrm", "CapBnd", "CapInh")} == {"0" * 16}
            assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
        for path in ("/x", "/opt/tandem/x", "/etc/x"):
            assert "Read-only" in live.node.exec(f"tandem-{role}", "sh", "-c", f"echo x >{path}", check=False)


def test_the_first_process_takes_in_orphans(live):
    for role in ("trainer", "inference"):
        live.node.exec(f"tandem-{role}", "sh", "-c", "sleep 0.3 & sleep 0.3 & exit 0")
        live.node.until("no dead process is left",
                        lambda r=role: "Z" not in {s["State"][0] for s in processes(live, r).values()}, 10)  # fmt: skip


def test_containers_have_the_settings_and_secrets_of_their_specs(live):
    for role in ROLES:
        (container,) = live.pod(role)["spec"]["containers"]
        wanted = {v["name"]: v["value"] for v in container["env"]}
        image = docker("image", "inspect", "-f", "{{json .Config.Env}}", container["image"])
        wanted = dict(v.split("=", 1) for v in json.loads(image)) | wanted
        found = live.node.exec(f"tandem-{role}", "cat", "/proc/1/environ").split("\0")
        found = dict(v.split("=", 1) for v in found if v.startswith(("TANDEM_", "HF_", "NVIDIA_")))
        made = {"TANDEM_ROLE", "TANDEM_ALIVE_DIR"}
        assert {k: v for k, v in found.items() if k not in made} == {
            k: v for k, v in wanted.items() if k.startswith(("TANDEM_", "HF_", "NVIDIA_")) and k not in made
        }
        names = {"api_key"} | ({"admin_token"} if role == "inference" else set())
        assert set(live.node.exec(f"tandem-{role}", "ls", "/etc/tandem/secrets").split()) == names
        for name in names:
            path = f"/etc/tandem/secrets/{name}"
            assert live.node.exec(f"tandem-{role}", "cat", path) == live.keys[name]
            assert live.node.exec(f"tandem-{role}", "stat", "-L", "-c", "%u:%g %a", path).strip() == "0:0 440"


# ---------------------------------------------------------------- it works


def test_helm_test(live):
    begin = time.monotonic()
    try:
        result = charts.run_tests(live.cluster, release=RELEASE, namespace=NAMESPACE, timeout=240)
    except Exception as error:
        pytest.fail(f"helm test: {error}\n{live.node.tails()}")
    phases = {hook["name"]: hook["last_run"]["phase"] for hook in result["hooks"]}
    names = ("reach", "volume-write", "volume-read", "job")
    assert phases == {f"tandem-test-{name}": "Succeeded" for name in names}
    assert "helm-test@1 is served" in live.node.log("tandem-test-job", "test")
    print(f"\nhelm test took {time.monotonic() - begin:.0f} s")


def test_upgrade_replaces_inference_and_leaves_a_trainer_that_trains(live):
    """What the new inference pod lacks is said, one after another; then it starts by itself."""
    node, began = live.node, len(live.node.notes)
    live.client.create_run(RUN, lora={"rank": 4, "alpha": 8})
    trainer, controller = (live.pod(role)["metadata"]["uid"] for role in ("trainer", "controller"))
    job = live.submit(epochs=10_000)
    live.set("trainer", image={"tag": OTHER_TAG})
    live.set("inference", extraEnv=[{"name": "TANDEM_MAX_LORA_RANK", "value": "many"}])
    live.upgrade()
    said = node.until("preflight fails", lambda: node.noted("Exited", "tandem-inference", "preflight", began), 60)[0]
    assert said.detail.startswith("1 ")
    assert "TANDEM_MAX_LORA_RANK" in said.log
    (stopped,) = node.noted("Stopped", "tandem-inference", since=began)
    print(f"\nthe old inference pod: {stopped.detail}")
    assert stopped.detail.startswith("0 ")

    # A pod that never became ready is replaced as well.
    live.put_secret(api_key=live.keys["api_key"])
    live.set("inference", extraEnv=[], settings={"maxModelLen": 640})
    live.upgrade()
    (missing,) = node.until("a mount fails", lambda: node.noted("FailedMount", "tandem-inference", since=began), 60)
    assert missing.detail == "references non-existent secret key: admin_token"
    began = len(node.notes)
    live.put_secret(api_key=live.keys["api_key"], admin_token=live.keys["api_key"])
    said = node.until("preflight fails", lambda: node.noted("Exited", "tandem-inference", "preflight", began), 60)[0]
    assert said.detail.startswith("1 ")
    assert "is one of the API keys" in said.log
    live.put_secret(**live.keys)
    node.until("everything is ready again", node.all_ready, 180)

    assert (live.status("inference")["ready"], live.status("inference")["restartCount"]) == (True, 0)
    url = f"http://{node.pod('tandem-inference').address}:8000/v1/models"
    models = httpx.get(url, headers={"Authorization": f"Bearer {live.keys['api_key']}"}, timeout=30).json()["data"]
    assert {m["max_model_len"] for m in models if m["id"] == "base"} == {640}
    # The others were not touched, not even by the new tag; the job noticed nothing.
    assert [live.pod(role)["metadata"]["uid"] for role in ("trainer", "controller")] == [trainer, controller]
    assert live.pod("trainer")["spec"]["containers"][0]["image"] == f"tandem-trainer:{TAG}-cpu"
    steps = live.types(job).count("step")
    node.until("the job goes on", lambda: live.types(job).count("step") > steps, 30)
    assert (live.client.get_job(job).state, live.client.get_job(job).attempt) == ("running", 1)
    live.client.cancel(job)
    node.until("it is cancelled", lambda: live.client.get_job(job).state == "cancelled", 60)
    # What the old pod served, the new one serves.
    live.client.wait_served("helm-test", 1, timeout=60)


def test_a_deleted_trainer_gives_its_job_back_and_comes_with_the_new_image(live):
    node, began = live.node, len(live.node.notes)
    job = live.submit(epochs=200)
    live.cluster.delete(live.pod("trainer"))
    (stopped,) = node.until("it ended", lambda: node.noted("Stopped", "tandem-trainer", since=began), 80)
    print(f"\nthe deleted trainer pod: {stopped.detail}")
    assert stopped.detail.startswith("0 ")
    node.until("the trainer is back", node.all_ready, 120)
    assert live.pod("trainer")["spec"]["containers"][0]["image"] == f"tandem-trainer:{OTHER_TAG}"
    done = live.client.wait_job(job, timeout=120)
    assert (done.state, done.step) == ("succeeded", 1)
    requeued = [event.data for event in live.client.job_events(job) if event.type == "requeued"]
    assert [data["error"]["type"] for data in requeued] == ["runner_stopped"]
    assert "failed" not in live.types(job)
    live.client.wait_served(RUN, 1, timeout=60)


# Sends a signal to the oldest process with a word on its command line, or makes its signs of life old.
_SIGNAL = """
import os, pathlib, sys
for entry in sorted(pathlib.Path("/proc").glob("[0-9]*"), key=lambda e: int(e.name)):
    try:
        words = (entry / "cmdline").read_text().split("\\0")
    except OSError:
        continue
    if sys.argv[1] in words and int(entry.name) != os.getpid():
        os.kill(int(entry.name), int(sys.argv[2]))
        break
else:
    sys.exit("no such process")
"""
_AGE = """
import os, pathlib, time
(path,) = pathlib.Path("/run/tandem").glob("tandem-*/runner.alive")
os.utime(path, (time.time() - 3600,) * 2)
"""


def test_a_runner_that_hangs_is_restarted(live):
    node, began, pod = live.node, len(live.node.notes), "tandem-trainer"
    probe = live.pod("trainer")["spec"]["containers"][0]["livenessProbe"]["exec"]["command"]
    runner = PROGRAMS["runner"]
    node.exec(pod, "python", "-c", _AGE)
    node.until("who is alive says so again", lambda: "is healthy" in node.exec(pod, *probe, check=False), 10)
    node.exec(pod, "python", "-c", _SIGNAL, runner, str(int(signal.SIGSTOP)))
    node.exec(pod, "python", "-c", _AGE)
    assert "runner has not come round its loop for 36" in node.exec(pod, *probe, check=False)
    (container,) = node.pod(pod).containers
    container.hurry("livenessProbe", period=0.5)
    node.until("it is killed", lambda: node.noted("Killing", pod, since=began), 30)
    assert len(node.noted("Unhealthy", pod, since=began)) >= 4
    # It would take its whole grace period, asleep.
    node.exec(pod, "python", "-c", _SIGNAL, runner, str(int(signal.SIGCONT)), check=False)
    node.until("it runs again", lambda: live.status("trainer")["restartCount"] == 1 and node.all_ready(), 120)
    (stopped,) = node.noted("Stopped", pod, since=began)
    print(f"\nthe trainer container: {stopped.detail}")
    assert "is healthy" in node.exec(pod, *probe)


def test_the_controller_is_replaced_alone(live):
    """One after the other, since the volume may be for one node; nothing of it was in memory."""
    node, began = live.node, len(live.node.notes)
    others = [live.pod(role)["metadata"]["uid"] for role in ("trainer", "inference")]
    step = live.client.get_run("helm-test").newest_step
    live.set("controller", settings={"maxRequestBytes": 1 << 20})
    live.upgrade()
    (stopped,) = node.until("it ended", lambda: node.noted("Stopped", "tandem-controller", since=began), 60)
    print(f"\nthe old controller: {stopped.detail}")
    assert stopped.detail.startswith("0 ")
    node.until("everything is ready again", node.all_ready, 90)
    (started,) = node.noted("Started", "tandem-controller", "controller", began)
    assert started.at > stopped.at
    assert [live.pod(role)["metadata"]["uid"] for role in ("trainer", "inference")] == others
    assert live.client.get_run("helm-test").newest_step == step


# ---------------------------------------------------------------- what it takes, and its end


def test_nothing_outgrows_its_limit(live):
    for role in ROLES:
        pod = live.pod(role)
        (container,) = pod["spec"]["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        for volume in pod["spec"]["volumes"]:
            if limit := volume.get("emptyDir", {}).get("sizeLimit"):
                used = int(live.node.exec(f"tandem-{role}", "du", "-sk", mounts[volume["name"]]).split()[0]) * 1024
                assert used < engine.quantity(limit) / 2, f"{role}: {volume['name']} holds {used} bytes of {limit}"
        size = live.node.exec(f"tandem-{role}", "sh", "-c", "cat /sys/fs/cgroup/memory.peak "
                              "/sys/fs/cgroup/memory/memory.max_usage_in_bytes 2>/dev/null", check=False)  # fmt: skip
        print(f"\n{role}: at most {int(size) >> 20 if size.strip() else '?'} MiB of "
              f"{container['resources']['limits']['memory']}")  # fmt: skip


def test_uninstall_leaves_the_data(live):
    node, began = live.node, len(live.node.notes)
    volume = node.claim(NAMESPACE, "tandem-data")
    begin = time.monotonic()
    charts.uninstall(live.cluster, release=RELEASE, namespace=NAMESPACE)
    node.until("every pod is gone", lambda: not node.runs(NAMESPACE, "tandem"), 100)
    print(f"\nuninstall: {time.monotonic() - begin:.0f} s")
    stopped = {note.container: note.detail.split()[0] for note in node.noted("Stopped", since=began)}
    assert stopped == dict.fromkeys(ROLES, "0")
    claims = [claim["metadata"]["name"] for claim in live.cluster.objects("PersistentVolumeClaim")]
    assert claims == ["tandem-data"]
    left = ["volume", "ls", "-q", "--filter", f"label={node.label}"]
    node.until("the cache's volume is gone", lambda: docker(*left).split() == [volume], 20)
    look = subprocess.run(["docker", "run", "--rm", "--network", "none", "--mount", f"type=volume,src={volume},dst=/v",
                           "--entrypoint", "ls", node.helper, f"/v/runs/{RUN}/checkpoints"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert look.stdout.split() == ["00000000", "00000001"]
