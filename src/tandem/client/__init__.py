"""The Python client (docs/training.md). The package imports httpx and pydantic, but not torch,
vLLM, transformers or numpy.

`api.py` has the methods of the two clients, `Tandem` and `AsyncTandem`, with their retries.
`art.py` plugs Tandem into the training loop of the package ART, and `verifiers.py` into the loop of
the package verifiers. `reasoning_gym.py` is an environment of `tandem rl` whose tasks
come from the package reasoning-gym. `rl/` implements `tandem rl`. `track/` writes a run's events to
TensorBoard, W&B and MLflow.
"""

from typing import Any

from tandem.client.clients import AsyncTandem, Tandem
from tandem.client.memory import AttemptMemory
from tandem.client.types import DPOOptions, LogPart, RLOptions, SFTOptions
from tandem.controller.schemas import CheckpointInfo, JobStatus, RolledBack, RunStatus
from tandem.data.examples import PreferencePair, SFTExample
from tandem.data.inputs import Group, Trajectory, TrajectoryBuilder, Turn, turn_from_openai
from tandem.errors import InvalidInput
from tandem.spool.schema import (
    Event,
    JobError,
    LoraShape,
    Manifest,
    OptimizerSettings,
    PreferenceLoss,
    RankMemory,
    RLLoss,
    RunSpec,
    Served,
    SFTLoss,
)
from tandem.vllm_client.sampling import distorting

__all__ = [
    "AsyncTandem",
    "AttemptMemory",
    "CheckpointInfo",
    "DPOOptions",
    "Event",
    "Group",
    "JobError",
    "JobStatus",
    "LogPart",
    "LoraShape",
    "Manifest",
    "OptimizerSettings",
    "PreferenceLoss",
    "PreferencePair",
    "RLLoss",
    "RLOptions",
    "RankMemory",
    "RolledBack",
    "RunSpec",
    "RunStatus",
    "SFTExample",
    "SFTLoss",
    "SFTOptions",
    "Served",
    "Tandem",
    "Trajectory",
    "TrajectoryBuilder",
    "Turn",
    "sampling_options",
    "turn_from_openai",
]


def sampling_options(**extra_body: Any) -> dict[str, Any]:
    """Arguments for a chat completion of the openai package. The arguments make vLLM return the
    data that training needs: the token ids of the prompt and of the answer, and the answer's
    log-probs.

    `extra_body` is passed on to vLLM. Raises InvalidInput for options that change the sampled
    distribution (`top_k`, `top_p`, `min_p`, penalties, ...). The trainer computes the model's own
    distribution, so the trainer's log-probs would not agree with the sampled log-probs.
    """
    if refused := distorting(extra_body):
        raise InvalidInput(refused[1], field=refused[0])
    return {"logprobs": True, "extra_body": {"return_token_ids": True, **extra_body}}
