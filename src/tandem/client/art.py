"""A backend for ART (openpipe-art): `TandemBackend()` takes the place of ART's own backends.

model = art.TrainableModel(name="my-run", project="p", base_model="Qwen/Qwen3-8B")
await model.register(TandemBackend())

Rollouts are sampled through vLLM's path /rollout/v1, so each `Choice` of a trajectory has its
sampled token ids and log-probs. Nothing is tokenised again.
"""

import re
import shutil
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress
from itertools import batched, chain, groupby
from pathlib import Path
from typing import Any

from tandem.client import AsyncTandem, turn_from_openai
from tandem.client.http import connection, raise_if_other
from tandem.client.vllm import vllm_url
from tandem.errors import Conflict, InvalidInput, NotFound, NothingToLearn
from tandem.spool.schema import LoraShape

try:
    from art.metrics_taxonomy import average_metric_samples
    from art.types import TrainResult
except ImportError as error:
    raise ImportError("tandem.client.art needs ART: pip install 'openpipe-art>=0.5.18'") from error

# Options of ART that Tandem does not have -> the only accepted value, at which the option has no
# effect.
_NEUTRAL: dict[str, object] = {
    "advantage_balance": 0.0,
    "mask_prob_ratio": False,
    "kimi_k2_tau": None,
    "kl_ref_adapter_path": None,
    "max_negative_advantage_importance_sampling_weight": None,
    "allow_training_without_logprobs": False,
    "plot_tensors": False,
    "scale_learning_rate_by_reward_std_dev": False,
    "logprob_calculation_chunk_size": 1024,
    "num_trajectories_learning_rate_multiplier_power": 0.0,
}
_PEFT_NEUTRAL: list[tuple[str, object]] = [
    ("lora_dropout", 0),
    ("bias", "none"),
    ("use_rslora", False),
    ("init_lora_weights", True),
    ("loftq_config", None),
    ("loftq_config", {}),
    ("layers_to_transform", None),
    ("layers_pattern", None),
    ("modules_to_save", None),
]
# Options that Tandem ignores, because they do not change what is trained.
_PEFT_SPEED = ("random_state", "use_gradient_checkpointing", "max_seq_length", "temporary_location")
_PEFT_NAMES = {"r": "rank", "lora_alpha": "alpha", "target_modules": "targets"}
_PEFT_DEFAULTS = {"rank": 8, "alpha": 16}
# Keys of a model's `_internal_config` that are ignored, because Tandem's deployment decides them.
_DEPLOYMENTS = (
    "peft_args",
    "engine_args",
    "init_args",
    "trainer_gpu_ids",
    "inference_gpu_ids",
    "rollout_weights_mode",
    "allow_unvalidated_arch",
    "tinker_args",
    "tinker_native_args",
)
_TEMPLATE = "chat_template_kwargs"  # ART's client also sends the key in rollouts' requests
_POLICIES = {"cispo": "cispo", "ppo": "ppo", "importance_sampling": "cispo"}
# No ratio reaches this bound, so nothing is clipped. Unclipped CISPO, sg(ratio) *
# advantage * log-prob, has the gradient of importance sampling, ratio * advantage.
_UNBOUNDED = 1e9
_METRICS = {
    "loss": "loss/train",
    "grad_norm": "loss/grad_norm",
    "learning_rate": "loss/learning_rate",
    "entropy": "loss/entropy",
    "kl_reference": "loss/kl_policy_ref",
    "kl_sampler": "loss/kl_sampler",
    "clip_fraction": "loss/clip_fraction",
    "off_policy_steps_max": "offpolicy/steps_max",
    "off_policy_steps_mean": "offpolicy/steps_mean",
    "trainable_tokens": "data/step_trainer_tokens",
}
_AUTO_BATCH = 8


class TandemBackend:
    """A backend of ART. Each model of ART is trained as the run with the model's name. The model's
    `get_inference_name()` names the newest served step.

    Args:
        url, api_key: the controller's address and key, as for `Tandem`.
        inference_url: vLLM's address; None: TANDEM_INFERENCE_URL, else http://127.0.0.1:8000.
        path: the directory of ART's own files.
        sequence_length: tokens of a packed row, at least the tokens of the longest conversation.
        options: further settings of each job (`stall_seconds`, `labels`, ...).
    """

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        *,
        inference_url: str | None = None,
        path: str = ".art",
        sequence_length: int = 2048,
        **options: Any,
    ) -> None:
        self._tandem = AsyncTandem(url, api_key)
        self._key = (
            connection(url, api_key)["headers"]
            .get("Authorization", "Bearer none")
            .removeprefix("Bearer ")
        )
        self._door = vllm_url(inference_url)
        self._path, self._sequence_length, self._options = path, sequence_length, options
        self._served: dict[str, int] = {}

    async def close(self) -> None:
        await self._tandem.close()

    async def register(self, model: Any) -> None:
        """Create the model's run, or find it, and wait until vLLM serves its newest step."""
        model.base_path = self._path
        if not model.trainable:
            return
        given = _lora(model._internal_config or {})
        lora = _PEFT_DEFAULTS | given if given else None
        try:
            status = await self._tandem.create_run(
                _run(model), base_model=model.base_model, lora=lora
            )
        except Conflict:  # the run has another shape, for example because the run is a fork
            status = await self._tandem.get_run(_run(model))
            asked = LoraShape.model_validate(given).model_dump(include=set(given))
            raise_if_other(status, {"lora": asked}, "peft_args")
        await self._arrived(model, status.newest_step)

    async def delete(self, model: Any) -> None:
        await self._tandem.delete_run(_run(model), cancel_jobs=True)

    async def _prepare_backend_for_training(self, _model: Any, config: Any) -> tuple[str, str]:
        if config:
            raise InvalidInput(
                "Tandem's vLLM runs already; its settings are the deployment's", field="config"
            )
        return f"{self._door}/rollout/v1", self._key

    def _model_inference_name(self, model: Any, step: int | None = None) -> str:
        run = _run(model)
        return f"{run}@{self._served.get(run, 0) if step is None else step}"

    async def _get_step(self, model: Any) -> int:
        return (await self._tandem.get_run(_run(model))).newest_step

    async def _delete_checkpoint_files(self, model: Any, steps_to_keep: list[int]) -> None:
        """Delete the checkpoints in ART's list, except `steps_to_keep` and checkpoints that
        Tandem still needs. ART lists a checkpoint if the checkpoint has a directory, which
        `_arrived` makes."""
        for info in await self._tandem.checkpoints(_run(model)):
            # A checkpoint without a directory may belong to another program or machine.
            if info.step not in steps_to_keep and _marker(model, info.step).is_dir():
                with suppress(Conflict, NotFound):
                    await self._tandem.delete_checkpoint(_run(model), info.step)
                    shutil.rmtree(_marker(model, info.step), ignore_errors=True)

    async def train(
        self,
        model: Any,
        trajectory_groups: Iterable[Any],
        *,
        learning_rate: float = 1e-5,
        **options: Any,
    ) -> TrainResult:
        """Train one job, with one optimizer step over all groups. Returns when vLLM serves the new
        step.

        Raises InvalidInput for an option that Tandem does not have (docs/art.md), and for a choice
        that was not sampled through vLLM's path /rollout/v1. If the rewards have no variance,
        nothing is trained.

        Args:
            trajectory_groups: ART's groups. A group without a trajectory is left out.
            learning_rate: the learning rate of this job, unless the option `adam_params` has one.
            options: the options of ART's `train`.
        """
        groups = [
            {
                "trajectories": [
                    _trajectory(t, f"groups.{g}.trajectories.{i}")
                    for i, t in enumerate(group.trajectories)
                ]
            }
            for g, group in enumerate(group for group in trajectory_groups if group.trajectories)
        ]
        settings = _job_settings(learning_rate, len(groups), self._sequence_length, options)
        try:
            job = await self._tandem.train_rl(
                _run(model), groups, wait="served", **self._with_options(settings)
            )
        except NothingToLearn:
            return TrainResult(step=await self._get_step(model))
        events = await self._tandem.job_events(job.id)
        metrics = average_metric_samples(
            _metrics(event.data) for event in events if event.type == "step"
        )
        return TrainResult(step=await self._arrived(model, job.spec.base_step + 1), metrics=metrics)

    async def _train_sft(
        self,
        model: Any,
        trajectories: Iterable[Any],
        config: Any,
        _dev_config: Any,
        _verbose: bool = False,
    ) -> AsyncIterator[dict[str, float]]:
        """Train consecutive batches with the same learning rate as one job. Yields the metrics of
        each optimizer step."""
        # ART's client renders the rollouts' prompts with the variables under the key `_TEMPLATE`.
        template = (model._internal_config or {}).get(_TEMPLATE) or {}
        size = _AUTO_BATCH if config.batch_size == "auto" else config.batch_size
        batches = list(batched((_example(one, template) for one in trajectories), size))
        rate = config.learning_rate
        rates = rate if isinstance(rate, list) else [rate] * len(batches)
        if len(rates) < len(batches):
            raise InvalidInput(
                f"{len(rates)} learning rates for {len(batches)} batches", field="learning_rate"
            )
        step = None
        for rate, part in groupby(zip(rates, batches, strict=False), key=lambda pair: pair[0]):
            own = {"packing": {"sequence_length": self._sequence_length}}
            own |= {"optimizer": {"learning_rate": rate, "batch_size": size}}
            of_rl = ("loss", "advantage", "max_off_policy_steps")
            options: Any = {
                name: value for name, value in self._with_options(own).items() if name not in of_rl
            }
            job = await self._tandem.train_sft(
                _run(model), list(chain(*(batch for _, batch in part))), **options
            )
            async for event in self._tandem.events(job.id):
                if event.type == "step":
                    yield _metrics(event.data)
            await self._tandem.wait_job(job.id)
            step = job.spec.base_step + 1
            _marker(model, step).mkdir(parents=True, exist_ok=True)
        if step is not None:
            await self._arrived(model, step)

    def _with_options(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The backend's options, joined with the settings of a call. If the backend and the call
        set the same option, the call's value is used, even if it is ART's default."""
        merged = {
            name: {**dict(self._options.get(name, {})), **own} for name, own in settings.items()
        }
        return self._options | merged

    async def _arrived(self, model: Any, step: int) -> int:
        """Waits until vLLM serves `step`, and returns `step`. Makes a directory for the checkpoint,
        because ART lists only checkpoints that have a directory."""
        await self._tandem.wait_served(_run(model), step)
        self._served[_run(model)] = step
        _marker(model, step).mkdir(parents=True, exist_ok=True)
        return step


def _lora(config: Mapping[str, Any]) -> dict[str, Any]:
    """The LoRA shape that a model's `_internal_config` asks for."""
    for name, value in config.items():
        if value and name not in (*_DEPLOYMENTS, _TEMPLATE):
            raise InvalidInput(
                f"Tandem does not have this option ({value!r}); leave it out", field=name
            )
    peft = config.get("peft_args") or {}
    for name, value in peft.items():
        if (
            name not in _PEFT_NAMES
            and name not in _PEFT_SPEED
            and (name, value) not in _PEFT_NEUTRAL
        ):
            raise InvalidInput(
                f"Tandem does not have this option ({value!r})", field=f"peft_args.{name}"
            )
    return {_PEFT_NAMES[name]: value for name, value in peft.items() if name in _PEFT_NAMES}


def _run(model: Any) -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", model.name.lower()).strip("-._")[:64].rstrip("-._")


def _marker(model: Any, step: int) -> Path:
    return Path(model._get_output_dir(), "checkpoints", f"{step:04d}")


def _trajectory(trajectory: Any, where: str) -> dict[str, Any]:
    """ART's trajectory as a trajectory of Tandem: every `Choice` becomes a turn. Each additional
    history becomes a token sequence of its own."""
    turns = []
    for history in (trajectory, *trajectory.additional_histories):
        for i, item in enumerate(history.messages_and_choices):
            if not isinstance(item, Mapping):
                try:
                    turns.append(turn_from_openai(item))
                except InvalidInput as error:
                    at = f"{where}.messages_and_choices.{i}.{error.field}"
                    problem = (
                        f"{error.message}; model.openai_client() goes through Tandem's rollout door"
                    )
                    raise InvalidInput(problem, field=at) from error
    if not turns:
        raise InvalidInput("no Choice among its messages, so nothing was sampled", field=where)
    metrics = {name: float(value) for name, value in trajectory.metrics.items()}
    return {"turns": turns, "reward": float(trajectory.reward), "metrics": metrics}


def _example(trajectory: Any, template: Mapping[str, Any]) -> dict[str, Any]:
    more = {"tools": trajectory.tools, _TEMPLATE: dict(template)}
    return {"messages": trajectory.messages()} | {k: v for k, v in more.items() if v}


def _metrics(step: Mapping[str, Any]) -> dict[str, float]:
    return {name: step["metrics"][own] for own, name in _METRICS.items() if own in step["metrics"]}


def _job_settings(
    learning_rate: float, groups: int, sequence_length: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Tandem's job settings that match the options of ART's `train`. Removes the matched options
    from `options`."""
    take = options.pop
    kind = "ppo" if take("ppo", False) else take("loss_fn", "cispo")
    if kind not in _POLICIES:
        raise InvalidInput(f"{kind!r}: Tandem has {', '.join(_POLICIES)}", field="loss_fn")
    # ART divides the advantages by their mean size, and adds its KL term afterwards.
    loss: dict[str, Any] = {
        "policy": _POLICIES[kind],
        "normalisation": "trajectory",
        "advantage_scale": "mean_abs",
    }
    defaults: dict[str, tuple[float, float | None]] = {
        "cispo": (1.0, 4.0),
        "ppo": (0.2, None),
        "importance_sampling": (1.0, _UNBOUNDED),
    }
    given: list[float | None] = [take("epsilon", None), take("epsilon_high", None)]
    low = defaults[kind][0] if given[0] is None else given[0]
    high = defaults[kind][1] if given[1] is None else given[1]
    bounds = dict(take("loss_fn_config", None) or {})
    loss["clip_low"] = 1 - bounds.pop("clip_low_threshold", 1 - low)
    loss["clip_high"] = bounds.pop("clip_high_threshold", 1 + (low if high is None else high)) - 1
    if bounds:
        raise InvalidInput(
            f"Tandem has no {next(iter(bounds))!r}; leave it out", field="loss_fn_config"
        )
    if (level := take("importance_sampling_level", "token")) not in ("token", "sequence"):
        raise InvalidInput(
            f"{level!r}: Tandem has token and sequence", field="importance_sampling_level"
        )
    loss["ratio_level"] = level
    reference = take("kl_penalty_reference_step", None)
    if coefficient := take("kl_penalty_coef", 0.0):
        kl_reference = "base" if reference is None else reference
        loss |= {"kl_coef": coefficient, "kl_in": "advantage", "kl_reference": kl_reference}
    if cap := take("truncated_importance_sampling", None):
        loss["tis_cap"] = cap
    if take("precalculate_logprobs", False) or cap:
        loss["old_logprobs"] = "trainer"
    scale = all([take("normalize_advantages", True), take("scale_rewards", True)])
    optimizer = {"learning_rate": learning_rate, "batch_size": max(1, groups)}
    if (adam := take("adam_params", None)) is not None:
        names = ("learning_rate", "beta1", "beta2", "eps", "weight_decay")
        optimizer |= {name: getattr(adam, name) for name in names if hasattr(adam, name)}
    rows = take("packed_sequence_length", None) or sequence_length
    for ignored in ("save_checkpoint", "verbose"):  # every job makes a checkpoint
        take(ignored, None)
    for name, value in options.items():
        if name not in _NEUTRAL or value not in (None, _NEUTRAL[name]):
            raise InvalidInput(
                f"Tandem does not have this option of ART ({value!r}); leave it out", field=name
            )
    shape = {"optimizer": optimizer, "packing": {"sequence_length": rows}}
    return {"loss": loss, "advantage": {"scale": "group" if scale else "none"}, **shape}
