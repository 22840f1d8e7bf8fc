"""Turns rollouts of the package verifiers into groups for `train_rl`.

Version 0.4 (`verifiers.v1`): `VerifiersEnvironment` runs an agent on a taskset, and
`trace_to_trajectory` converts any trace. With the old API (versions 0.1 to 0.2, and
`verifiers.legacy` in 0.3), the environment samples through vLLM's path /rollout/v1, and
`outputs_to_groups` converts the environment's outputs. With both APIs, groups contain the tokens
that vLLM sampled and the log-probs that vLLM computed.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from tandem.client.vllm import vllm_url
from tandem.data.inputs import policy_step_of
from tandem.errors import InvalidInput, TandemError
from tandem.vllm_client.sampling import distorting, loop_options

GroupDict = dict[str, list[dict[str, Any]]]


def trace_to_trajectory(trace: Any) -> dict[str, Any] | None:
    """Converts a trace of `verifiers.v1` to a trajectory. Each span of sampled tokens in a
    trainable branch of the trace is a turn.

    Returns None for a trace that failed, for a trace of an agent that is not trained, and for a
    trace without a sampled token. Raises InvalidInput for a trace without token ids, which was not
    sampled through a TrainClientConfig.
    """
    if trace.has_error or not trace.agent.trainable:
        return None
    step = policy_step_of(next((call.model for call in trace.calls), None))
    # Branches have a common beginning, so a turn can be in several branches.
    turns: dict[tuple[int, ...], dict[str, Any]] = {}
    for branch in trace.branches:
        if not branch.trainable:
            continue
        if not branch.token_ids:
            raise InvalidInput(
                "no token ids: sample with vf.TrainClientConfig", field=f"branches.{branch.index}"
            )
        turns |= {
            (*turn["prompt_token_ids"], *turn["token_ids"]): turn
            for turn in _turns(branch.token_ids, branch.sampled_mask, branch.logprobs, step)
        }
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    return (
        {"turns": list(turns.values()), "reward": float(trace.reward), "metrics": metrics}
        if turns
        else None
    )


def outputs_to_groups(
    outputs: Mapping[str, Any] | Sequence[Mapping[str, Any]], step: int | None = None
) -> list[GroupDict]:
    """Groups from the outputs of the old API's `env.generate(..., state_columns=["trajectory"])`,
    one group per example.

    `step`: the step of the run from which the rollouts were sampled. Rollouts with an error are
    left out. Raises InvalidInput if a part of a trajectory has no token ids, because the part was
    not sampled through vLLM's path /rollout/v1.
    """
    groups: dict[Any, list[dict[str, Any]]] = {}
    rollouts = outputs["outputs"] if isinstance(outputs, Mapping) else outputs
    for i, rollout in enumerate(rollouts):
        if rollout.get("error"):
            continue
        turns: list[dict[str, Any]] = []
        for k, part in enumerate(rollout.get("trajectory") or [{}]):
            if not (tokens := part.get("tokens")):
                problem = (
                    'no token ids: sample through /rollout/v1, with state_columns=["trajectory"]'
                )
                raise InvalidInput(problem, field=f"outputs.{i}.trajectory.{k}.tokens")
            prompt = tokens["prompt_ids"]
            mask = [False] * len(prompt) + [bool(sampled) for sampled in tokens["completion_mask"]]
            logprobs = [0.0] * len(prompt) + tokens["completion_logprobs"]
            turns += _turns([*prompt, *tokens["completion_ids"]], mask, logprobs, step)
        if turns:
            trajectory = {
                "turns": turns,
                "reward": float(rollout["reward"]),
                "metrics": rollout.get("metrics") or {},
            }
            groups.setdefault(rollout["example_id"], []).append(trajectory)
    return [{"trajectories": trajectories} for trajectories in groups.values()]


class VerifiersEnvironment:
    """A taskset of `verifiers.v1` with an agent that plays the tasks. The file of `tandem rl` names
    this class by `use = "verifiers:<taskset>"`, and has the other arguments under `arguments`.

    Args:
        name: the taskset's id, or a taskset.
        tokenizer: the base model's directory or hub name.
        inference_url: vLLM's address, by default TANDEM_INFERENCE_URL, else http://127.0.0.1:8000.
            The key is TANDEM_API_KEY.
        harness: the id of the agent's harness. The harness's programs run as processes on this
            machine.
        renderer: a RendererConfig or its fields; by default the model's own renderer.
        sampling: vLLM's sampling options.
        agent: other fields of vf.AgentConfig (`max_turns`, `timeout`).
    """

    def __init__(
        self,
        name: Any,
        *,
        tokenizer: str,
        inference_url: str | None = None,
        harness: str = "null",
        renderer: Any = None,
        sampling: Mapping[str, Any] | None = None,
        **agent: Any,
    ) -> None:
        try:
            import verifiers.v1 as vf
            from verifiers.v1.utils.loaders import load_taskset, taskset_config_type
        except ImportError as error:
            raise ImportError(
                "VerifiersEnvironment needs the package verifiers: pip install 'verifiers>=0.4'"
            ) from error
        self._options = dict(sampling or {})
        if refused := distorting(self._options):
            raise InvalidInput(refused[1], field=f"sampling.{refused[0]}")
        keys = {
            "api_key_var": "TANDEM_API_KEY",
            "renderer": renderer,
            "renderer_model_name": tokenizer,
        }
        client = vf.TrainClientConfig(base_url=f"{vllm_url(inference_url)}/rollout/v1", **keys)
        given = {"harness": {"id": harness}, "runtime": vf.SubprocessConfig(), **agent}
        config = partial(vf.AgentConfig, client=client, **given)
        self._agent: Callable[..., Any] = lambda model, **options: vf.Agent(
            config(model=model, sampling={"temperature": 1.0, **options, **self._options})
        )
        self._taskset = (
            load_taskset(taskset_config_type(name)(id=name)) if isinstance(name, str) else name
        )

    def tasks(self) -> Iterable[Any]:
        return list(self._taskset) if self._taskset.bounded else self._taskset

    async def rollout(self, task: Any, sampler: Any) -> dict[str, Any]:
        """One trajectory, sampled from `sampler.model` with `sampler.options`. Raises TandemError
        if the rollout fails."""
        wanted = loop_options(sampler.options, self._options, "arguments.sampling.temperature")
        trace = await self._agent(sampler.model, **wanted).run(task)
        if (trajectory := trace_to_trajectory(trace)) is None:
            raise TandemError(f"the rollout failed: {_problem(trace)}")
        return trajectory

    async def groups(
        self,
        run: str,
        step: int,
        *,
        group_size: int = 8,
        tasks: Iterable[Any] | None = None,
        concurrency: int = 32,
    ) -> AsyncIterator[GroupDict]:
        """A group of trajectories of `<run>@<step>` for each task, in the order in which the groups
        end. Rollouts that fail are left out. Raises TandemError if all rollouts of a task fail.
        Raises InvalidInput (field `tasks`) if the taskset has no end and no tasks are given.

        Args:
            group_size: rollouts per task.
            tasks: the tasks to play; None: all tasks of the taskset.
            concurrency: the most rollouts at the same time.
        """
        if tasks is None and not self._taskset.bounded:
            raise InvalidInput("the taskset has no end; pass the tasks to play", field="tasks")
        gate = asyncio.Semaphore(concurrency)

        async def group(agent: Any, task: Any) -> GroupDict:
            async def one() -> Any:
                async with gate:
                    return await agent.run(task)

            traces = await asyncio.gather(*(one() for _ in range(group_size)))
            if not (made := [t for trace in traces if (t := trace_to_trajectory(trace))]):
                raise TandemError(
                    f"all rollouts of task {task.data.idx} failed: {_problem(traces[-1])}"
                )
            return {"trajectories": made}

        async with self._agent(f"{run}@{step}") as agent:
            given = self.tasks() if tasks is None else tasks
            groups = [asyncio.ensure_future(group(agent, task)) for task in given]
            try:
                for done in asyncio.as_completed(groups):
                    yield await done
            finally:
                for begun in groups:
                    begun.cancel()


def _problem(trace: Any) -> str:
    error = trace.last_error
    return f"{error.type}: {error.message}" if error else "nothing was sampled"


def _turns(
    ids: list[int], sampled: list[bool], logprobs: list[float], step: int | None
) -> list[dict[str, Any]]:
    """A turn for each span of sampled tokens; all tokens before the span are the turn's prompt.
    `sampled` and `logprobs` have the length of `ids`."""
    turns = []
    for is_sampled, positions in groupby(range(len(ids)), key=sampled.__getitem__):
        if is_sampled:
            first, *rest = positions
            end = rest[-1] + 1 if rest else first + 1
            turn = {
                "prompt_token_ids": ids[:first],
                "token_ids": ids[first:end],
                "logprobs": logprobs[first:end],
            }
            turns.append(turn if step is None else {**turn, "policy_step": step})
    return turns
