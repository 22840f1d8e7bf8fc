"""The Python client (docs/training.md). Imports httpx and pydantic, but not torch, vLLM,
transformers or numpy.

`api.py` has every method and its retries, once for both clients. `art.py` and `verifiers.py` plug
Tandem into the loops of these packages, and `reasoning_gym.py` makes its tasks an environment of
`tandem rl`. `rl/` is `tandem rl`, `track/` writes a run's events to TensorBoard, W&B and MLflow.
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
    """Arguments with which a chat completion of the openai package returns the data that training
    needs: the token ids of the prompt and of the answer, and the answer's log-probs.

    `extra_body` is passed on. Raises InvalidInput for options that change the sampled distribution
    (`top_k`, `top_p`, `min_p`, penalties, ...): the trainer computes the model's own distribution,
    and the log-probs of the two would never agree.
    """
    if refused := distorting(extra_body):
        raise InvalidInput(refused[1], field=refused[0])
    return {"logprobs": True, "extra_body": {"return_token_ids": True, **extra_body}}
