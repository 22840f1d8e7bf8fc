"""Real ranks on two hosts, which share the spool alone: a runner, and an agent in each of two
network namespaces. All three have another time."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.agent_stack import AgentStack
from agent.namespaces import ADDRESSES, inside, two_hosts
from rank import jobs
from tandem.spool.attempt import Attempt
from tandem.trainer.launch import DEFAULT_ENTRY

HUB_NAME = "tandem-tests/tiny"
TOPOLOGIES = sorted(jobs.TOPOLOGIES)
DEFAULT = {"dp", "tp"}
ORDERS = {"epochs": 2, "grad_accumulation_sequences": 2}
LONG = ORDERS | {"epochs": 100}
CLOCKS = ("86400", "-7200")
"""By how many seconds each host's clock differs from the runner's."""


def hub_cache(directory: Path, model: Path) -> Path:
    """A cache of the hub's files in which `HUB_NAME` is `model`."""
    revision = directory / "hub" / f"models--{HUB_NAME.replace('/', '--')}"
    (revision / "refs").mkdir(parents=True)
    (revision / "refs" / "main").write_text("0" * 40)
    shutil.copytree(model, revision / "snapshots" / ("0" * 40))
    return directory


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[AgentStack]:
    """Two hosts with an agent each; both have the base model in a hub cache of their own."""
    directory = tmp_path_factory.mktemp("hosts")
    with two_hosts() as names:
        stack = AgentStack(
            directory / "spool",
            entry=DEFAULT_ENTRY,
            TANDEM_HOST_ADDRESS="",
            HF_HUB_OFFLINE="1",
            HF_HOME=str(hub_cache(directory / "runner", model)),
        )
        try:
            for host, name in enumerate(names):
                stack.prefixes[host] = inside(name)
                cache = hub_cache(directory / name, model)
                own = {"HF_HOME": str(cache), "TEST_CLOCK_SECONDS": CLOCKS[host]}
                stack.agents[host] = stack.start_agent(host, **own)
            yield stack
        finally:
            stack.close()


@pytest.fixture(scope="module")
def alone(stack: AgentStack, model: Path, request: pytest.FixtureRequest) -> dict[str, Path]:
    """Topology -> the checkpoint that two ranks of one host make."""
    wanted = TOPOLOGIES if request.config.option.all_cases else sorted(DEFAULT)
    experts = jobs.make_model(model.with_name("experts"), "qwen3_moe") if "ep" in wanted else None
    for name in wanted:
        base = experts if name == "ep" else None
        for run in ("one", "two"):
            own = str(base or (model if run == "one" else HUB_NAME))
            jobs.make_run(stack.spool, base or model, f"{name}-{run}", base_model=own)
        jobs.submit_sft(stack.spool, f"{name}-one", f"{name}-one", **ORDERS)
    topologies = {f"{name}-one": name for name in wanted}
    if request.config.option.all_cases:
        for run in ("cut-one", "cut-two"):
            jobs.make_run(stack.spool, model, run)
        topologies[jobs.submit_sft(stack.spool, "cut-one", "cut-one", **LONG)] = "dp"
    made = jobs.run_two_ranks(stack.spool, topologies)
    return {job_id.removesuffix("-one"): checkpoint for job_id, (checkpoint, _) in made.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_two_hosts_train_what_one_host_trains(
    stack: AgentStack, alone: dict[str, Path], name: str
) -> None:
    if name not in alone:
        pytest.skip("runs with --all-cases")
    sizes = jobs.TOPOLOGIES[name]
    stack.environment |= sizes.variables()
    stack.start()
    job_id = jobs.submit_sft(stack.spool, f"{name}-two", f"{name}-two", **ORDERS)
    addresses = stack.until(lambda: stack.addresses(job_id), "both hosts' records")
    state, job = stack.wait(job_id)
    assert (state, job.attempt) == ("succeeded", 1), stack.job_log(job_id)
    assert stack.stop() == 0
    assert addresses == ADDRESSES
    assert jobs.same_bytes(alone[name], stack.spool.checkpoints.path(f"{name}-two", 1))
    assert stack.event(job_id, "started")["topology"]["world_size"] == 2
    assert stack.event(job_id, "released")["hosts"].keys() == {"0", "1"}


@pytest.mark.slow
def test_a_host_whose_cable_is_cut_is_noticed_and_the_next_attempt_makes_the_same_bytes(
    stack: AgentStack, alone: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing tells the other end; both hosts' agents still reach the volume."""
    if "cut" not in alone:
        pytest.skip("runs with --all-cases")
    monkeypatch.setattr(jobs, "STALL_SECONDS", 20.0)
    stack.environment |= jobs.TOPOLOGIES["dp"].variables()
    stack.start()
    job_id = jobs.submit_sft(stack.spool, "cut-two", "cut-two", **LONG)
    attempt = Attempt(stack.spool, job_id, 1)

    def trains() -> bool:
        beats = attempt.beats()
        return len(beats) == 2 and all(beat.step > 2 for beat in beats.values())

    stack.until(trains, "the first steps")
    cable = ["ip", "-n", stack.prefixes[1][3], "link", "set", "eth0"]
    subprocess.run([*cable, "down"], check=True)
    try:
        error = stack.until(lambda: stack.spool.jobs.get(job_id)[1].last_error, "its end")
    finally:
        subprocess.run([*cable, "up"], check=True)
    assert error.type in ("rank_hung", "rank_error"), error.message
    state, job = stack.wait(job_id)
    assert (state, job.attempt) == ("succeeded", 2), stack.job_log(job_id)
    assert stack.stop() == 0
    assert jobs.same_bytes(alone["cut"], stack.spool.checkpoints.path("cut-two", 1))
