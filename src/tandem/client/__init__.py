"""The Python client: `Tandem` and `AsyncTandem`. Imports httpx and pydantic; no torch, vLLM, transformers or numpy.

from openai import OpenAI
from tandem.client import Tandem, sampling_options, turn_from_openai

tandem = Tandem()                                      # TANDEM_URL and TANDEM_API_KEY
tandem.create_run("my-run")
tandem.wait_served("my-run", 0)
answer = OpenAI(...).chat.completions.create(model="my-run@0", messages=[...], n=8, **sampling_options())
trajectories = [{"turns": [turn_from_openai(answer, i)], "reward": ...} for i in range(8)]
tandem.train_rl("my-run", [{"trajectories": trajectories}], wait="served")
"""

from typing import Any

from tandem.client.aio import AsyncTandem
from tandem.client.calls import LogPart, RLOptions, SFTOptions
from tandem.client.memory import AttemptMemory
from tandem.client.sync import Tandem
from tandem.controller.schemas import CheckpointInfo, JobStatus, RolledBack, RunStatus
from tandem.data.trajectories import Group, SFTExample, Trajectory, TrajectoryBuilder, Turn, turn_from_openai
from tandem.spool.schema import (
    Event,
    JobError,
    LoraShape,
    Manifest,
    OptimizerSettings,
    RankMemory,
    RLLoss,
    RunSpec,
    Served,
    SFTLoss,
)

__all__ = [
    "AsyncTandem",
    "AttemptMemory",
    "CheckpointInfo",
    "Event",
    "Group",
    "JobError",
    "JobStatus",
    "LogPart",
    "LoraShape",
    "Manifest",
    "OptimizerSettings",
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
    """What a chat completion of the openai package needs so that its answer can be trained on: the ids of the prompt's
    and the sampled tokens, and the latter's log-probs. `extra_body` goes along (`top_k`, ...)."""
    return {"logprobs": True, "extra_body": {"return_token_ids": True, **extra_body}}
