"""The command line against a real controller, while the test acts as the runner."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from itertools import count
from pathlib import Path

import pytest
from rich.console import Console
from typer.main import get_command

from api_server import KEY, claim, fail, groups, rl_request, run_one, serve, sft_request
from fake_vllm import FakeVllm
from tandem.cli import app
from tandem.cli.common import table
from tandem.cli.train import apply_setting, read_request
from tandem.controller.routes_jobs import LOG_PART_BYTES
from tandem.errors import InvalidInput
from waiting import until

_numbers = count()


@pytest.fixture(autouse=True)
def request_file(tmp_path, monkeypatch):
    """Writes request.json into a new working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "request.json").write_text(json.dumps(rl_request()))


@pytest.fixture
def run(tandem) -> str:
    name = f"run-{next(_numbers)}"
    assert tandem("run", "create", name, "--rank", "2")[0] == 0
    return name


@pytest.fixture
def as_json(tandem):
    """Runs a command that succeeds; returns its JSON."""

    def run(*arguments: str) -> object:
        status, out, err = tandem(*arguments, "--json")
        assert status == 0, err
        return json.loads(out)

    return run


def train(tandem, run: str) -> str:
    """Queues the job of request.json; returns its id."""
    return json.loads(tandem("train", "job", run, "request.json", "--wait", "no", "--json")[1])[
        "id"
    ]


def train_while(action, tandem, server, *arguments: str) -> tuple[int, str, str]:
    """Runs `tandem train`. When the command's job is queued, a thread calls `action`, which does
    the work of the other programs."""
    with ThreadPoolExecutor() as threads:
        queued = threads.submit(
            until, "it is queued", lambda: server.spool.jobs.list(states=("queued",))
        )
        others = threads.submit(lambda: (queued.result(), action()))
        result = tandem("train", "job", *arguments)
        others.result()
        return result


def test_runs(tandem, as_json, run, server):
    created = as_json("run", "create", f"{run}-b", "--rank", "4", "--target", "q_proj")
    assert created["spec"]["lora"] == {"rank": 4, "alpha": 8.0, "targets": ["q_proj"]}
    assert {run, f"{run}-b"} <= {status["spec"]["name"] for status in as_json("run", "list")}
    assert run in tandem("run", "list")[1]
    status, out, _ = tandem("run", "show", run)
    assert (status, "rank 2, alpha 4" in out, "KiB" in out) == (0, True, True)
    serve(
        server.spool,
        run,
        0,
        weights="merged",
        transport="merge",
        seconds={"load": 0.25, "swap": 0.0213},
    )
    out = tandem("run", "show", run)[1]
    assert "merged, by merge" in out
    assert "load 0.25 s, swap 0.021 s" in out


def test_commands_that_documents_name_exist():
    root = Path(__file__).parents[2]
    for path in (
        root / "README.md",
        *root.glob("docs/*.md"),
        *root.glob("images/prometheus/rules/*.yml"),
        *root.glob(".github/ISSUE_TEMPLATE/*.yml"),
    ):
        for words in re.findall(r"`tandem ([a-z][^`]*)`", path.read_text()):
            command = get_command(app)
            for word in words.split():
                if not hasattr(command, "commands") or word.endswith(".toml") or word == "CONFIG":
                    break  # an argument
                assert word in command.commands, f"{path.name}: tandem {words}"
                command = command.commands[word]


def test_a_run_is_deleted(tandem, as_json, run):
    train(tandem, run)
    status, _, err = tandem("run", "delete", run)
    assert (status, "cancel" in err) == (1, True)
    assert as_json("run", "delete", run, "--cancel") == {"deleted": run}
    assert tandem("run", "show", run)[0] == 1


def test_refusals_name_the_field_on_stderr(tandem):
    status, out, err = tandem("run", "create", "x", "--rank", "0")
    assert (status, out, "lora.rank" in err) == (1, "", True)
    status, out, err = tandem("run", "show", "nobody", "--json")
    assert (status, out, json.loads(err)["error"]["field"]) == (1, "", "run")
    assert tandem("run", "nonsense")[0] == 2
    status, _, err = tandem("run", "create", "x", "--full", "--rank", "8")
    assert (status, "leave --rank" in err) == (2, True)
    assert tandem("jobs", "list", "--state", "sleeping")[0] == 1


def test_the_first_column_of_a_table_is_whole():
    """Users type the names of the first column into later commands, so a narrow terminal must not
    cut the names off."""
    printed, job = StringIO(), "sft-0123456789abcdef0123.00000"
    row = (job, "a-run-with-a-name", "succeeded")
    Console(width=50, file=printed).print(table("Jobs", ["job", "run", "state"], [row]))
    assert job in printed.getvalue()


def test_an_unreachable_controller_is_exit_status_5(tandem, monkeypatch):
    monkeypatch.setenv("TANDEM_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("tandem.cli.common.PATIENCE", 0.2)
    status, _, err = tandem("run", "list")
    assert (status, "TANDEM_URL" in err) == (5, True)


@pytest.mark.parametrize("url", ["localhost:8080", "http://a:b", "http://"])
def test_an_address_that_is_no_url_is_refused_at_once(tandem, monkeypatch, url):
    monkeypatch.setenv("TANDEM_URL", url)
    status, _, err = tandem("run", "list")
    assert (status, f"TANDEM_URL: {url!r} is not a URL" in err) == (1, True), err


def test_the_reach_of_a_stack(tandem, monkeypatch, server):
    vllm = FakeVllm()
    vllm.start()
    monkeypatch.setattr("fake_vllm.API_KEY", KEY)
    reach = ["smoke", "reach", "--inference", f"{vllm.url}/v1", "--patience", "0.1"]
    try:
        status, out, err = tandem(
            *reach, "--closed", f"{vllm.url}/sleep", "--metrics", f"{server.url}/metrics"
        )
        assert status == 0, err
        assert f"vLLM {vllm.url}: serves base" in out
        status, _, err = tandem(*reach, "--closed", f"{vllm.url}/version")
        assert (status, "answers 200 to an API key" in err) == (1, True)
        for option in ("--closed", "--metrics"):
            status, _, err = tandem(*reach, option, "http://127.0.0.1:9/")
            assert (status, "does not answer" in err) == (5, True)
    finally:
        vllm.stop()


def test_the_reach_of_a_stack_asks_tandems_vllm_and_no_other_provider(tandem, monkeypatch, server):
    """`tandem smoke reach` sends the key only to Tandem's vLLM."""
    vllm, provider = FakeVllm(), FakeVllm()
    vllm.start()
    provider.start()
    monkeypatch.setattr("fake_vllm.API_KEY", KEY)
    monkeypatch.setenv("OPENAI_BASE_URL", f"{provider.url}/v1")
    try:
        for address in (vllm.url, f"{vllm.url}/v1"):
            monkeypatch.setenv("TANDEM_INFERENCE_URL", address)
            status, out, err = tandem("smoke", "reach", "--patience", "0.1")
            assert (status, f"vLLM {vllm.url}: serves base" in out) == (0, True), err
        assert provider.calls == []
        provider.stop()
        monkeypatch.delenv("TANDEM_INFERENCE_URL")
        monkeypatch.setenv("TANDEM_INFERENCE_PORT", "9")
        status, _, err = tandem("smoke", "reach", "--patience", "0.1")
        assert (status, "TANDEM_INFERENCE_URL" in err, provider.url in err) == (5, True, False)
        monkeypatch.setenv("TANDEM_API_KEY", "wrong")
        status, _, err = tandem("smoke", "reach", "--patience", "0.1")
        assert (status, "refuses our key" in err) == (1, True)
    finally:
        vllm.stop()
        provider.stop()


ENVIRONMENT = """
class Task:
    def tasks(self):
        return [1, 2]
    async def rollout(self, task, sampler):
        raise AssertionError("nothing is to be sampled")
"""


def test_a_refused_step_ends_rl_with_a_status_of_its_own(tandem, run, server, tmp_path):
    train(tandem, run)
    run_one(server.spool)
    reason = {"refused_step": 1, "refused_reason": "vLLM holds other tensors"}
    serve(server.spool, run, 0, **reason)
    (tmp_path / "refused_task.py").write_text(ENVIRONMENT)
    config = tmp_path / "c.toml"
    config.write_text(
        f'[run]\nname = "{run}"\nlora = {{rank = 2}}\n[rl]\nsteps = 1\n'
        '[[rl.environment]]\nuse = "refused_task:Task"\n'
    )
    status, _, err = tandem("rl", str(config))
    assert status == 6, err
    assert f"the publisher refused {run}@1: vLLM holds other tensors. vLLM serves step 0." in err
    assert f"tandem rl {config} --from-served discards it" in err


def test_train_from_json_lines_until_served(tandem, as_json, run, server, tmp_path):
    (tmp_path / "groups.jsonl").write_text("\n".join(json.dumps(g) for g in groups(2)) + "\n")
    status, out, err = train_while(
        lambda: (run_one(server.spool), serve(server.spool, run, 1)),
        tandem,
        server,
        run,
        str(tmp_path / "groups.jsonl"),
        "--set",
        "packing.sequence_length=64",
        "--set",
        "loss.policy=ppo",
        "--id",
        f"{run}-job",
        "--json",
    )
    assert status == 0, err
    job = json.loads(out)
    assert (job["id"], job["state"], job["spec"]["loss"]["policy"]) == (
        f"{run}-job",
        "succeeded",
        "ppo",
    )
    assert job["spec"]["data"]["num_groups"] == 2

    for command in (["jobs", "show", job["id"]], ["jobs", "list", "--run", run]):
        status, out, _ = tandem(*command)
        assert (status, job["id"] in out, "succeeded" in out) == (0, True, True)
    assert as_json("jobs", "list", "--run", run, "--state", "queued") == []


def test_logs_and_memory_of_a_job(tandem, as_json, run, server):
    job = train(tandem, run)
    run_one(server.spool)
    printed = f"rank 0 trains {job}\n"
    assert tandem("logs", job)[1] == printed
    lines = [json.loads(line) for line in tandem("logs", "-f", job, "--json")[1].splitlines()]
    assert [line["event"]["type"] for line in lines if "event" in line][-1] == "succeeded"
    assert "".join(line.get("log", "") for line in lines) == printed
    # the log's first part ends between the two bytes of é
    longer = "-" * (LOG_PART_BYTES - 1) + "é\n"
    server.spool.paths.log_file(job).write_text(longer, encoding="utf-8")
    _, out, err = tandem("logs", "-f", job)
    assert out.endswith("-é\n")
    assert "step 2/2 loss=0.5" in err

    phases = {"build": {"allocated": 3 * 2**20}}
    memory = {"0": {"uuid": "cpu", "phases": phases, "highest": {}}}
    server.spool.events.append(job, "released", attempt=1, memory=memory)
    (attempt,) = as_json("memory", job)
    assert (attempt["attempt"], attempt["device"], attempt["released"]) == (1, "cpu", True)
    assert attempt["ranks"]["0"]["phases"] == phases
    assert re.search(r"build +│ +0 +│ +3\.0 MiB", tandem("memory", job)[1])
    assert tandem("memory", "nobody")[0] == 1


def test_a_failing_job_is_exit_status_3(tandem, run, server, tmp_path):
    (tmp_path / "sft.json").write_text(json.dumps(sft_request()))
    status, _, err = train_while(
        lambda: fail(server.spool, claim(server.spool)), tandem, server, run, "sft.json"
    )
    assert (status, "rank_crashed" in err, "boom" in err) == (3, True, True)
    job = server.spool.jobs.list(run=run)[0][1].spec.id
    assert tandem("logs", "-f", job)[0] == 3


def test_queue_and_cancel(tandem, as_json, run):
    job = train(tandem, run)
    assert as_json("jobs", "show", job)["state"] == "queued"
    assert as_json("jobs", "cancel", job)["state"] == "cancelled"
    for arguments, problem in (
        (["request.json", "--base-step", "7"], "base_step"),
        (["missing.json"], "FILE"),
    ):
        status, _, err = tandem("train", "job", run, *arguments, "--wait", "no")
        assert (status, problem in err) == (1, True)


def test_a_download_that_peft_would_misread_says_so(tandem, run, monkeypatch):
    """In this test `misread_by_peft` reports every adapter as misread. PEFT itself reads adapters
    in `test_same_as_peft.py`."""
    assert "PEFT" not in tandem("checkpoints", "download", run, "0", "good")[2]
    names = []
    monkeypatch.setattr("tandem.cli.runs.misread_by_peft", lambda keys: names.extend(keys) or True)
    status, _, err = tandem("checkpoints", "download", run, "0", "adapter")
    assert (status, f"tandem export {run} 0 DIR" in err) == (0, True)
    assert any(name.endswith("lora_A.weight") for name in names)


def test_checkpoints(tandem, as_json, run, server, tmp_path):
    train(tandem, run)
    run_one(server.spool)
    assert [info["step"] for info in as_json("checkpoints", "list", run)] == [0, 1]
    assert "the base model" in tandem("checkpoints", "list", run)[1]
    assert tandem("checkpoints", "download", run, "1", "adapter")[0] == 0
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
    assert tandem("checkpoints", "download", run, "1", "adapter")[0] == 1
    assert as_json("checkpoints", "fork", run, "1", f"{run}-f")["newest_step"] == 0
    assert as_json("checkpoints", "pin", run, "1") == {"pinned": f"{run}@1"}
    assert "pinned" in tandem("checkpoints", "list", run)[1]
    assert tandem("checkpoints", "unpin", run, "1")[0] == 0
    assert "pinned" not in tandem("checkpoints", "list", run)[1]
    assert as_json("checkpoints", "rollback", run, "0")["discarded"] == [1]


EXAMPLE, GROUP = sft_request()["examples"][0], groups()[0]


def test_files_for_train():
    line = json.dumps(EXAMPLE)
    assert read_request(json.dumps([GROUP])) == {"kind": "rl", "groups": [GROUP]}
    assert read_request(line) == {"kind": "sft", "examples": [EXAMPLE]}
    assert read_request(f"{line}\n\n{line}") == {"kind": "sft", "examples": [EXAMPLE] * 2}
    whole = {"groups": [GROUP], "loss": {}}
    assert read_request(json.dumps(whole)) == {"kind": "rl", **whole}
    assert read_request('{"pairs": []}') == {"kind": "dpo", "pairs": []}
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert read_request(json.dumps(pair)) == {"kind": "dpo", "pairs": [pair]}
    for example in ({"prompt": "a", "completion": "b"}, {"text": "abc"}):
        assert read_request(json.dumps(example)) == {"kind": "sft", "examples": [example]}
    wrong = {"": "FILE", "[]": "FILE", f"{line}\n{{": "FILE line 2", f"{line}\n3": "FILE line 2"}
    for text, field in (
        wrong | {json.dumps([EXAMPLE, GROUP]): "FILE", json.dumps([pair, EXAMPLE]): "FILE"}
    ).items():
        with pytest.raises(InvalidInput) as refused:
            read_request(text)
        assert refused.value.field == field, text


def test_settings_on_the_command_line():
    request = {"kind": "rl"}
    apply_setting(request, "optimizer.learning_rate=1e-3")
    apply_setting(request, "labels.note=a=b")
    assert request == {
        "kind": "rl",
        "optimizer": {"learning_rate": 1e-3},
        "labels": {"note": "a=b"},
    }
    for wrong in ("kind", "=1", "kind.x=1"):
        with pytest.raises(InvalidInput):
            apply_setting(request, wrong)


@pytest.mark.parametrize(
    ("role", "weights", "device", "named"),
    [
        ("all", "adapter", "cpu", True),
        ("inference", "adapter", "cpu", True),
        ("trainer", "adapter", "cpu", False),
        ("all", "merged", "cpu", False),
        ("all", "adapter", "cuda", False),
    ],
)
def test_up_names_merged_where_adapters_are_slow(
    command, monkeypatch, role, weights, device, named
):
    monkeypatch.setattr("tandem.supervise.up.up", lambda settings, role: 0)
    for name, value in (("BASE_MODEL", "m"), ("WEIGHTS", weights), ("DEVICE", device)):
        monkeypatch.setenv(f"TANDEM_{name}", value)
    status, _, err = command("up", "--role", role)
    assert (status, "TANDEM_WEIGHTS=merged samples faster" in err) == (0, named), err


def test_up_with_wrong_settings_is_exit_status_2(command, monkeypatch, tmp_path):
    monkeypatch.setenv("TANDEM_ROOT", str(tmp_path / "spool"))
    for name, value in (
        ("BASE_MODEL", str(tmp_path / "model")),
        ("CONTROLLER_HOST", "0.0.0.0"),
        ("LAUNCH", "rocket"),
    ):
        monkeypatch.setenv(f"TANDEM_{name}", value)
        status, _, err = command("up")
        assert (status, f"TANDEM_{name}: " in err) == (2, True), err
    assert not (tmp_path / "spool").exists()
