"""The start of ranks. The devices must be free before a job, and the runner measures their memory
again after the job. The topology's sizes must fit the devices, and each rank gets its share of the
CPU's cores."""

import json

import pytest
from pydantic import ValidationError

from fake_nvml import MIB, gpu
from runner.runner_stack import Stack
from tandem.config import Settings
from tandem.errors import InvalidInput
from tandem.topology.sizes import Sizes
from tandem.trainer.launch import Launch, RankSettings
from tandem.trainer.launch.launcher import rank_environment
from tandem.trainer.runner.loop import with_topology


@pytest.mark.slow
def test_a_job_waits_for_free_devices_and_tells_what_is_left_after_it(nvml, tmp_path):
    nvml.set(gpu("GPU-aaaa1111", 3 * MIB), gpu("GPU-bbbb2222", 70000 * MIB))
    stack = Stack(tmp_path / "spool", "fork")
    stack.environment |= {"TANDEM_DEVICE": "cuda", "TANDEM_TRAINER_DEVICES": "1"}
    try:
        stack.run()
        job_id = stack.submit("run", used=70 * MIB)
        stack.start()
        stack.until(
            lambda: "jobs wait: the devices are not free" in stack.log.read_text(), "the complaint"
        )
        assert stack.spool.jobs.get(job_id)[0] == "queued"
        nvml.set(gpu("GPU-aaaa1111", 3 * MIB), gpu("GPU-bbbb2222", 5 * MIB))
        assert stack.wait(job_id)[0] == "succeeded"
        (released,) = [
            event for event in stack.spool.events.read(job_id) if event.type == "released"
        ]
        # The ranks have reported these bytes.
        assert released.data["before"] == {"GPU-bbbb2222": 70 * MIB}
        assert released.data["devices"] == {"GPU-bbbb2222": 5 * MIB}
        assert released.data["bytes"] == 5 * MIB
    finally:
        stack.close()


def test_ranks_inherit_no_secret(monkeypatch):
    for name in (
        "TANDEM_API_KEY",
        "TANDEM_ADMIN_TOKEN",
        "TANDEM_API_KEY_FILE",
        "TANDEM_ADMIN_TOKEN_FILE",
    ):
        monkeypatch.setenv(name, "s3cret")
    monkeypatch.setenv("TANDEM_ROOT", "kept")
    environment = rank_environment(Settings())
    assert "s3cret" not in environment.values()
    assert environment["TANDEM_ROOT"] == "kept"


NCCL = {"weights": "merged", "transport": "nccl"}


@pytest.mark.parametrize(
    ("settings", "given", "interface"),
    [
        ({}, None, "lo"),
        (NCCL, None, None),  # The ranks choose the interface, depending on vLLM's host.
        ({}, "eth7", "eth7"),
    ],
)
def test_nccl_among_ranks_listens_on_loopback_only(monkeypatch, settings, given, interface):
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    if given is not None:
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", given)
    assert rank_environment(Settings(**settings)).get("NCCL_SOCKET_IFNAME") == interface


@pytest.mark.parametrize(("names", "visible"), [(["1"], "1"), ([], "0")])
def test_ranks_count_gpus_as_the_runner_does(monkeypatch, names, visible):
    """CUDA's default order of GPUs begins with the fastest GPU. NVML, which measures the GPUs,
    orders them by their place on the PCI bus."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    environment = rank_environment(Settings(trainer_devices=names))
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["CUDA_DEVICE_ORDER"]) == (
        visible,
        "PCI_BUS_ID",
    )


@pytest.mark.parametrize(
    ("ranks", "given", "expected"),
    [
        # Three ranks share 16 cores.
        (3, {}, {"OMP_NUM_THREADS": "5", "GOMP_SPINCOUNT": "1000"}),
        (32, {}, {"OMP_NUM_THREADS": "1"}),
        (1, {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": None}),
        (1, {"GOMP_SPINCOUNT": "7"}, {}),
    ],
)
def test_cores_are_divided_and_threads_wait_briefly_unless_the_operator_sets_it(
    monkeypatch, ranks, given, expected
):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    environment = rank_environment(Settings(trainer_ranks=ranks))
    for name, value in (given | expected).items():
        assert environment.get(name) == value


QWEN3_8B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}


def sized(number: int, gib: int) -> dict:
    memory = {"total": gib * 2**30, "free": gib * 2**30, "reserved": 0, "used": 0}
    return gpu(f"GPU-{number}", nvmlDeviceGetMemoryInfo=memory)


@pytest.fixture
def settings(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    for name, value in {
        "BASE_MODEL": str(tmp_path),
        "TRAINER_RANKS": "2",
        "TOPOLOGY": "auto",
    }.items():
        monkeypatch.setenv(f"TANDEM_{name}", value)
    return Settings()


@pytest.mark.parametrize(
    ("gib", "expected"), [((100, 100), Sizes(data=2)), ((100, 16), Sizes(tensor=2, sequence=True))]
)
def test_ranks_have_the_sizes_that_fit_the_smallest_gpu(settings, nvml, gib, expected):
    """The 8 B parameters take 15.3 GiB, so a GPU of 16 GiB has too little memory left for
    training."""
    nvml.set(*(sized(n, size) for n, size in enumerate(gib)))
    chosen = with_topology(settings)
    assert Sizes.of(chosen) == expected == RankSettings.of(chosen).sizes


def test_a_launch_carries_the_settings_of_ranks_and_no_secret(tmp_path):
    settings = Settings(
        api_key="s3cret",
        admin_token="t0ken",
        inference_url="https://user:s3cret@vllm:8443/v1",
        trainer_ranks=4,
        tensor_parallel=2,
        dtype="bfloat16",
        recompute="full",
        base_precision="fp8",
        device="cuda",
    )
    launch = Launch(root=tmp_path, job="j", attempt=1, settings=RankSettings.of(settings))
    sent = launch.model_dump_json()
    assert "s3cret" not in sent
    assert "t0ken" not in sent
    received = Launch.model_validate_json(sent)
    assert received == launch
    assert received.ranks == 4
    assert received.settings == RankSettings(
        sizes=Sizes(tensor=2, data=2),
        device="cuda",
        dtype="bfloat16",
        recompute="full",
        base_precision="fp8",
    )
    with pytest.raises(ValidationError, match="pipelines"):
        RankSettings.model_validate_json('{"sizes": {"pipelines": 2}}')


def test_no_gpu_and_no_fitting_topology_are_refused_and_given_sizes_stay(settings, nvml):
    nvml.set()
    with pytest.raises(InvalidInput, match="plans the memory of GPUs"):
        with_topology(settings)
    nvml.set(*(sized(n, 4) for n in range(2)))
    with pytest.raises(InvalidInput, match="no topology of 2 GPUs fits"):
        with_topology(settings)
    given = settings.model_copy(update={"topology": "given"})
    assert with_topology(given) is given
