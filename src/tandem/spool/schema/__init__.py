"""The records on the volume: JSON, strict, versioned, without secrets.

Every path in a record is relative to the spool's root, because containers may mount the volume at different places.
"""

# ruff: noqa: I001 (a line for each name says nothing more)
from tandem.spool.schema.base import PENDING, SCHEMA_VERSION, STEPS, TERMINAL, JobId, JobState, Record, RunName
from tandem.spool.schema.jobs import (
    Beat, DPOJob, Event, EventType, Hold, HoldPhase, Job, JobError, JobKey, JobKind, JobResult, JobSpec, Lease,
    RankMemory, RLJob, RunnerInfo, SFTJob,
)  # fmt: skip
from tandem.spool.schema.runs import (
    LORA_TARGETS, LongProbe, LoraShape, LoraTarget, Manifest, Origin, Probe, RunSpec, Served, Serving, Trainable,
)  # fmt: skip
from tandem.spool.schema.training import (
    AskedRLLoss,
    Loss,
    OptimizerSettings,
    PackedData,
    PreferenceLoss,
    RLLoss,
    Schedule,
    SFTLoss,
)

__all__ = [
    "LORA_TARGETS",
    "PENDING",
    "SCHEMA_VERSION",
    "STEPS",
    "TERMINAL",
    "AskedRLLoss",
    "Beat",
    "DPOJob",
    "Event",
    "EventType",
    "Hold",
    "HoldPhase",
    "Job",
    "JobError",
    "JobId",
    "JobKey",
    "JobKind",
    "JobResult",
    "JobSpec",
    "JobState",
    "Lease",
    "LongProbe",
    "LoraShape",
    "LoraTarget",
    "Loss",
    "Manifest",
    "OptimizerSettings",
    "Origin",
    "PackedData",
    "PreferenceLoss",
    "Probe",
    "RLJob",
    "RLLoss",
    "RankMemory",
    "Record",
    "RunName",
    "RunSpec",
    "RunnerInfo",
    "SFTJob",
    "SFTLoss",
    "Schedule",
    "Served",
    "Serving",
    "Trainable",
]  # fmt: skip
