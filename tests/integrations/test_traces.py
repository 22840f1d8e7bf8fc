"""The tests check how rollouts of verifiers become trajectories, and how ART's backend uses its
options. The tests need neither verifiers nor ART."""

import asyncio
import sys
from contextlib import aclosing
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tandem.client.verifiers import VerifiersEnvironment, outputs_to_groups, trace_to_trajectory
from tandem.data.inputs import Trajectory
from tandem.errors import Conflict, InvalidInput, NotFound, TandemError
from tandem.spool.schema import LoraShape


def branch(ids: list[int], sampled: list[int], *, trainable: bool = True) -> SimpleNamespace:
    mask = [position in sampled for position in range(len(ids))]
    logprobs = [-position / 8 if on else 0.0 for position, on in enumerate(mask)]
    return SimpleNamespace(
        index=0, trainable=trainable, token_ids=ids, sampled_mask=mask, logprobs=logprobs
    )


def trace(*branches: SimpleNamespace, **changed: Any) -> SimpleNamespace:
    usual = {
        "has_error": False,
        "agent": SimpleNamespace(trainable=True),
        "calls": [SimpleNamespace(model="run@4")],
        "branches": branches,
        "metrics": {"length": 2.0, "missing": None},
        "reward": 1.5,
    }
    return SimpleNamespace(**{**usual, **changed})


def test_each_sampled_span_is_a_turn() -> None:
    made = trace_to_trajectory(trace(branch([1, 2, 3, 4, 5, 6], [2, 3, 5])))
    assert made == {
        "turns": [
            {
                "prompt_token_ids": [1, 2],
                "token_ids": [3, 4],
                "logprobs": [-0.25, -0.375],
                "policy_step": 4,
            },
            {
                "prompt_token_ids": [1, 2, 3, 4, 5],
                "token_ids": [6],
                "logprobs": [-0.625],
                "policy_step": 4,
            },
        ],
        "reward": 1.5,
        "metrics": {"length": 2.0},
    }
    Trajectory.model_validate(made)


def test_what_branches_share_is_trained_once_and_what_is_not_trained_is_left_out() -> None:
    made = trace_to_trajectory(
        trace(
            branch([1, 2, 3, 4], [1, 3]),
            branch([1, 2, 7, 8], [1, 3]),
            branch([9, 9], [1], trainable=False),
        )
    )
    assert made is not None
    assert [turn["token_ids"] for turn in made["turns"]] == [[2], [4], [8]]
    assert trace_to_trajectory(trace(branch([1, 2], [1]), has_error=True)) is None
    assert (
        trace_to_trajectory(trace(branch([1, 2], [1]), agent=SimpleNamespace(trainable=False)))
        is None
    )
    assert trace_to_trajectory(trace(branch([1, 2], []))) is None
    with pytest.raises(InvalidInput, match="TrainClientConfig"):
        trace_to_trajectory(trace(branch([], [])))


def output(example: int, reward: float, **changed: Any) -> dict[str, Any]:
    tokens = {
        "prompt_ids": [1, 2],
        "completion_ids": [3],
        "completion_mask": [1],
        "completion_logprobs": [-0.5],
    }
    return {
        "example_id": example,
        "reward": reward,
        "trajectory": [{"tokens": tokens}],
        "metrics": {},
        **changed,
    }


def test_outputs_of_one_example_are_a_group() -> None:
    outputs = [
        output(7, 1.0),
        output(8, 0.0),
        output(7, 0.5),
        output(8, 0.0, error={"error": "timeout"}),
    ]
    groups = outputs_to_groups({"outputs": outputs, "metadata": {}}, 4)
    assert [[t["reward"] for t in group["trajectories"]] for group in groups] == [[1.0, 0.5], [0.0]]
    turn = {"prompt_token_ids": [1, 2], "token_ids": [3], "logprobs": [-0.5], "policy_step": 4}
    assert groups[0]["trajectories"][0]["turns"] == [turn]
    for wrong in ({"trajectory": [{"tokens": None}]}, {"trajectory": None}):
        with pytest.raises(InvalidInput, match="rollout") as refused:
            outputs_to_groups([output(7, 1.0), output(7, 0.0, **wrong)])
        assert refused.value.field == "outputs.1.trajectory.0.tokens"


class Agent:
    """An agent that plays task 0 at once, with or without an error. Every other task never ends."""

    def __init__(self, *, fails: bool) -> None:
        self.fails, self.running = fails, 0

    async def __aenter__(self) -> "Agent":
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def run(self, task: Any) -> SimpleNamespace:
        if task.data.idx:
            self.running += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.running -= 1
        await asyncio.sleep(0.01)
        return trace(branch([1, 2], [1]), has_error=self.fails, last_error=None)


def environment(agent: Agent, *, bounded: bool = True) -> VerifiersEnvironment:
    made = object.__new__(VerifiersEnvironment)
    made._agent, made._taskset = lambda model: agent, SimpleNamespace(bounded=bounded)
    return made


@pytest.mark.parametrize("fails", [False, True])
def test_no_rollout_outlives_the_groups_that_were_taken(fails: bool) -> None:
    agent = Agent(fails=fails)
    tasks = [SimpleNamespace(data=SimpleNamespace(idx=number)) for number in range(3)]

    async def scene() -> None:
        async with aclosing(
            environment(agent).groups("run", 0, group_size=2, tasks=tasks)
        ) as groups:
            if fails:
                with pytest.raises(TandemError, match="all rollouts of task 0 failed"):
                    await anext(groups)
            else:
                assert len((await anext(groups))["trajectories"]) == 2
                assert agent.running == 4
        await asyncio.sleep(0.05)
        assert agent.running == 0

    asyncio.run(scene())


def test_a_rollout_samples_with_the_options_of_the_loop() -> None:
    made, wanted = environment(Agent(fails=False)), []
    made._agent = lambda model, **options: wanted.append(options) or Agent(fails=False)
    task = SimpleNamespace(data=SimpleNamespace(idx=0))
    sampler = SimpleNamespace(model="run@1", options={"temperature": 0.6, "max_tokens": 9})
    for own in ({}, {"temperature": 0.6, "top_logprobs": 1}):
        made._options = own
        assert asyncio.run(made.rollout(task, sampler))["turns"]
    assert wanted == [sampler.options] * 2
    made._options = {"temperature": 1.0}
    with pytest.raises(InvalidInput, match=r"1.0 is not the loss's 0.6") as refused:
        asyncio.run(made.rollout(task, sampler))
    assert refused.value.field == "arguments.sampling.temperature"


def test_all_tasks_of_a_taskset_without_an_end_are_refused() -> None:
    async def first() -> object:
        return await anext(environment(Agent(fails=False), bounded=False).groups("run", 0))

    with pytest.raises(InvalidInput, match="pass the tasks"):
        asyncio.run(first())


@pytest.fixture
def backend_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Imports `tandem.client.art` with an empty package in place of ART."""
    for name, content in {
        "art": {},
        "art.metrics_taxonomy": {"average_metric_samples": dict},
        "art.types": {"TrainResult": dict},
    }.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "tandem.client.art", raising=False)
    return import_module("tandem.client.art")


def test_arts_defaults_stand_for_what_peft_args_leave_out(
    backend_module: ModuleType, tmp_path: Path
) -> None:
    """The defaults of ART 0.5.18's `get_model_config` are r=8 and lora_alpha=16."""
    lora = backend_module._lora
    assert (
        lora({})
        == lora({"peft_args": {"random_state": 1}, "engine_args": {"max_num_seqs": 4}})
        == {}
    )
    made = dict[str, Any]()

    class Controller:
        """A controller with one run, which has LoRA rank 64 and alpha 32."""

        async def create_run(
            self, _run: str, *, base_model: str, lora: dict[str, Any] | None
        ) -> None:
            made["lora"] = lora
            raise Conflict("it exists")

        async def get_run(self, _run: str) -> Any:
            spec = SimpleNamespace(name="run", lora=LoraShape(rank=64, alpha=32), trainable="lora")
            return SimpleNamespace(spec=spec, newest_step=0)

        async def wait_served(self, *_: object) -> None: ...

    backend = backend_module.TandemBackend("http://nowhere", path=str(tmp_path))
    backend._tandem = Controller()

    def register(**peft: Any) -> dict[str, Any]:
        model = SimpleNamespace(
            name="run",
            base_model="m",
            trainable=True,
            _internal_config={"peft_args": peft},
            _get_output_dir=lambda: tmp_path,
        )
        asyncio.run(backend.register(model))
        return made["lora"]

    assert register(r=64) == {
        "rank": 64,
        "alpha": 16,
    }, "and the run, which has another alpha, goes on"
    assert register(random_state=1) is None
    with pytest.raises(Conflict, match="exists and trains a LoRA of rank=64"):
        register(target_modules=["q_proj"])
    assert made["lora"] == {"rank": 8, "alpha": 16, "targets": ["q_proj"]}
    assert lora({"chat_template_kwargs": {"enable_thinking": False}, "trainer_args": {}}) == {}
    for field, config in {
        "trainer_args": {"trainer_args": {"adam_beta2": 0.9}},
        "chat_template": {"chat_template": "{{ messages }}"},
        "peft_args.use_dora": {"peft_args": {"use_dora": True}},
    }.items():
        with pytest.raises(InvalidInput) as refused:
            lora(config)
        assert refused.value.field == field


def test_an_epsilon_of_zero_counts(backend_module: ModuleType) -> None:
    loss = backend_module._job_settings(1e-5, 1, 256, {"ppo": True, "epsilon": 0.0})["loss"]
    assert (loss["clip_low"], loss["clip_high"]) == (0.0, 0.0)


def test_an_sft_job_of_arts_backend_has_no_options_of_rl(backend_module: ModuleType) -> None:
    backend = backend_module.TandemBackend(
        "http://nowhere",
        loss={"temperature": 0.7},
        advantage={"scale": "none"},
        max_off_policy_steps=2,
        labels={},
    )
    sent, examples = dict[str, Any](), list[Any]()

    async def train_sft(_run: str, given: list[Any], **options: Any) -> None:
        sent.update(options)
        examples.extend(given)
        raise NotFound("no run", field="run")

    backend._tandem.train_sft = train_sft
    trajectory = SimpleNamespace(messages=list, tools=None)
    config = SimpleNamespace(batch_size="auto", learning_rate=1e-4)
    model = SimpleNamespace(name="run", _internal_config=None)
    variables = {"enable_thinking": False}
    for internal in (None, {"chat_template_kwargs": variables}):
        model._internal_config = internal
        with pytest.raises(NotFound):
            asyncio.run(anext(backend._train_sft(model, [trajectory], config, None)))
    assert sent.keys() == {"labels", "optimizer", "packing"}
    # SFT's prompts equal the rollouts' prompts.
    assert examples == [{"messages": []}, {"messages": [], "chat_template_kwargs": variables}]
