"""Settings of one deployment, from the environment (`TANDEM_*`). Secrets come from environment
variables or from files."""

import math
import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AliasChoices,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from tandem.errors import InvalidInput
from tandem.system.api_keys import split_name
from tandem.system.environment import REPLICA_PATTERN
from tandem.system.loopback import is_loopback as is_loopback

Way = Literal["merge", "nccl", "volume"]
"""How merged weights reach vLLM. `nccl` is NCCL between GPUs, and Gloo between CPUs."""


class Settings(BaseSettings):
    """Every setting of a deployment. The page docs/settings.md describes each setting.

    If a variable has an alias, the alias is the variable's name in OpenPipe/ART, Tandem's ancestor.
    """

    model_config = SettingsConfigDict(
        env_prefix="TANDEM_",
        extra="ignore",
        frozen=True,
        populate_by_name=True,
        env_ignore_empty=True,
    )

    # ---- shared
    root: Path = Path("tandem-data")
    base_model: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gpu_mode: Literal["dedicated", "shared"] = "dedicated"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    free_gpu_bytes: int = Field(default=256 * 2**20, ge=2**20)
    """The default is less than a CUDA context takes and more than the driver's own bookkeeping."""
    log_dir: Path | None = None
    """None: `logs` under the root, or `logs/<role>` for one role."""
    log_format: Literal["text", "json"] = "text"

    # ---- secrets
    api_key: SecretStr | None = None
    api_key_file: Path | None = None
    admin_token: SecretStr | None = None
    admin_token_file: Path | None = None

    # ---- controller
    controller_host: str = "127.0.0.1"
    controller_port: int = Field(default=8080, ge=1, le=65535)
    max_request_bytes: int = Field(default=256 * 2**20, ge=2**20)
    keep_checkpoints: int | None = Field(default=None, ge=1)
    """None: all stay."""
    keep_every: int | None = Field(default=None, ge=1)
    keep_days: float | None = Field(default=None, gt=0)
    """None: for ever."""

    # ---- trainer
    launch: Literal["fork", "torchrun", "resident"] = "fork"
    exit_after_job: bool | None = Field(
        default=None,
        validation_alias=AliasChoices("TANDEM_EXIT_AFTER_JOB", "MEGATRON_EXIT_AFTER_JOB"),
    )
    docker: bool = Field(default=False, validation_alias=AliasChoices("TANDEM_DOCKER", "RL_DOCKER"))
    trainer_ranks: int = Field(default=1, ge=1)
    executor: Literal["local", "hosts", "kubernetes", "slurm"] = "local"
    parallel_jobs: int = Field(default=1, ge=1)
    linger_seconds: float = Field(default=0.0, ge=0)
    job_template: Path | None = None
    slurm_args: str = ""
    trainer_hosts: int = Field(default=1, ge=1)
    host_index: int | None = Field(default=None, ge=0)
    host_address: str | None = None
    """None: the address of the interface that leads to other machines."""
    start_seconds: float = Field(default=900.0, gt=0)
    orphan_seconds: float = Field(default=900.0, gt=0)
    topology: Literal["given", "auto"] = "given"
    tensor_parallel: int = Field(default=1, ge=1)
    sequence_parallel: bool = False
    pipeline_parallel: int = Field(default=1, ge=1)
    context_parallel: int = Field(default=1, ge=1)
    expert_parallel: int = Field(default=1, ge=1)
    expert_tensor_parallel: int = Field(default=1, ge=1)
    trainer_devices: Annotated[list[str], NoDecode] = Field(default_factory=list)
    recompute: Literal["auto", "none", "full"] = "auto"
    base_precision: Literal["same", "fp8"] = "same"
    heartbeat_seconds: float = Field(default=5.0, gt=0)
    lease_seconds: float = Field(default=60.0, gt=0)
    session_idle_seconds: float = Field(default=60.0, ge=0)

    # ---- inference
    inference_host: str = "127.0.0.1"
    inference_port: int = Field(default=8000, ge=1, le=65535)
    inference_url: str | None = None
    """None: http://inference_host:inference_port."""
    inference_tensor_parallel: int = Field(default=1, ge=1)
    inference_devices: Annotated[list[str], NoDecode] = Field(default_factory=list)
    inference_replicas: int = Field(default=1, ge=1, le=64)
    replica: str | None = Field(default=None, pattern=REPLICA_PATTERN)
    """None: this vLLM is the only one of its spool."""
    publish_seconds: float = Field(default=60.0, gt=0)
    weights: Literal["adapter", "merged"] = "adapter"
    transport: Literal["auto", Way] = "auto"
    second_copy: Literal["auto", "device", "host"] = "auto"
    swap_requests: Literal["keep", "wait"] = "keep"
    swap_seconds: float = Field(default=120.0, gt=0)
    max_model_len: int | None = Field(default=None, ge=66)
    max_loras: int = Field(default=4, ge=1)
    max_lora_rank: int = Field(default=64, ge=1)
    expert_lora: bool = False
    gpu_memory_utilization: float = Field(default=0.85, gt=0, lt=1)
    enforce_eager: bool = False
    vllm_args: str = ""
    vllm_stall_seconds: float = Field(default=300.0, gt=0)
    verify_tolerance: float | None = Field(default=None, gt=0)
    """None: the rule alone decides (`inference.publisher.verify.Tolerance`)."""
    keep_served: int = Field(default=2, ge=1)

    # ---- metrics
    metrics_host: str = "127.0.0.1"
    metrics_port: int = Field(default=9400, ge=1, le=65535)

    @field_validator("trainer_devices", "inference_devices", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return (
            [part.strip() for part in value.split(",") if part.strip()]
            if isinstance(value, str)
            else value
        )

    @field_validator("inference_url")
    @classmethod
    def _is_url(cls, value: str | None) -> str | None:
        with suppress(ValueError):  # an invalid port raises ValueError
            parts = urlsplit(value or "http://default")
            if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
                return value
        raise ValueError(f"{value!r} is not a URL such as http://127.0.0.1:8000")

    @model_validator(mode="after")
    def _launch_by_the_ancestors_names(self) -> Self:
        """Sets `launch` from ART's settings. Only this method reads `exit_after_job` and `docker`.

        If `exit_after_job` is false, the ranks are resident. If `exit_after_job` is true, the ranks
        exit after each job. If `docker` is true, torchrun starts new ranks for each job. A value of
        `launch` overrides `docker`. A value of `launch` must not contradict `exit_after_job`.
        """
        if "launch" not in self.model_fields_set:
            launch = "torchrun" if self.docker else self.launch
            launch = "resident" if self.exit_after_job is False else launch
            object.__setattr__(self, "launch", launch)
        elif self.exit_after_job is not None and self.exit_after_job == (self.launch == "resident"):
            raise ValueError(
                f"TANDEM_EXIT_AFTER_JOB={int(self.exit_after_job)} contradicts"
                f" TANDEM_LAUNCH={self.launch}; unset one of them"
            )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.keep_every is not None and self.keep_checkpoints is None:
            raise ValueError(
                "TANDEM_KEEP_EVERY does nothing without TANDEM_KEEP_CHECKPOINTS; set both or none"
            )
        self._check_ranks()
        self._check_executor()
        self._check_transport()
        self._check_replicas()
        trainer, inference = set(self.trainer_devices), set(self.inference_devices)
        both = "TANDEM_TRAINER_DEVICES and TANDEM_INFERENCE_DEVICES"
        if self.gpu_mode == "dedicated":
            if names := ", ".join(sorted(trainer & inference)):
                raise ValueError(f"{both} both name {names}: each needs devices of its own")
        elif self.device == "cpu":
            raise ValueError(
                "TANDEM_GPU_MODE=shared: with TANDEM_DEVICE=cpu there is no GPU to share; unset one"
            )
        elif differ := ", ".join(sorted(trainer ^ inference)):
            raise ValueError(
                f"TANDEM_GPU_MODE=shared: {both} must name the same GPUs or none; only one has"
                f" {differ}"
            )
        return self

    def _check_ranks(self) -> None:
        """Checks that the number of ranks and the parallel sizes are consistent.
        `planning.checks.check_sizes` compares the parallel sizes with the model."""
        ranks, of = self.trainer_ranks, f"TANDEM_TRAINER_RANKS={self.trainer_ranks}"
        model = ("tensor_parallel", "context_parallel", "pipeline_parallel")
        for names in (model, ("pipeline_parallel", "expert_tensor_parallel", "expert_parallel")):
            given = [
                f"TANDEM_{name.upper()}={getattr(self, name)}"
                for name in names
                if getattr(self, name) > 1
            ]
            if ranks % math.prod(getattr(self, name) for name in names):
                raise ValueError(f"{of} is not a multiple of {' times '.join(given)}")
        chosen = {*model, "sequence_parallel", "expert_tensor_parallel", "expert_parallel"}
        chosen &= self.model_fields_set
        if self.topology == "auto" and chosen:
            wrong = ", ".join(f"TANDEM_{name.upper()}" for name in sorted(chosen))
            raise ValueError(
                f"TANDEM_TOPOLOGY=auto chooses the sizes, but {wrong} is set too; unset one of them"
            )
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError(
                "TANDEM_SEQUENCE_PARALLEL=1 needs TANDEM_TENSOR_PARALLEL above 1; unset it"
            )

    def _check_executor(self) -> None:
        ranks, hosts = self.trainer_ranks, f"TANDEM_TRAINER_HOSTS={self.trainer_hosts}"
        several, orphan = self.executor != "local", f"TANDEM_ORPHAN_SECONDS={self.orphan_seconds:g}"
        for wrong, problem in (
            (not several and self.trainer_hosts > 1, f"has one host; unset {hosts}"),
            (ranks % self.trainer_hosts, f"{hosts} does not divide TANDEM_TRAINER_RANKS={ranks}"),
            (several and self.launch != "fork", f"forks; unset TANDEM_LAUNCH={self.launch}"),
            (
                self.parallel_jobs > 1 and self.executor in ("local", "hosts"),
                f"runs one job at a time; unset TANDEM_PARALLEL_JOBS={self.parallel_jobs}",
            ),
            (several and self.gpu_mode == "shared", "can't share GPUs; unset TANDEM_GPU_MODE"),
            (several and self.topology == "auto", "needs given sizes; unset TANDEM_TOPOLOGY=auto"),
            (
                self.executor == "slurm" and self.trainer_devices,
                "Slurm chooses the GPUs; unset TANDEM_TRAINER_DEVICES",
            ),
            (self.orphan_seconds <= self.heartbeat_seconds, f"{orphan} is below the heartbeat"),
            (
                self.linger_seconds and self.executor != "kubernetes",
                "has no pods that could stay; unset TANDEM_LINGER_SECONDS",
            ),
        ):
            if wrong:
                raise ValueError(f"TANDEM_EXECUTOR={self.executor}: {problem}")

    def _check_transport(self) -> None:
        way = f"TANDEM_TRANSPORT={self.transport}"
        if self.transport != "auto" and self.weights != "merged":
            raise ValueError(
                f"{way} is for merged weights; set TANDEM_WEIGHTS=merged, or leave it out"
            )
        if self.way != "merge" and self.base_precision == "fp8":
            raise ValueError(
                f"{way} sends the base weights, which TANDEM_BASE_PRECISION=fp8 quantises; use"
                " merge"
            )
        if self.transport == "nccl" and self.gpu_mode == "shared":
            raise ValueError(
                f"{way}: vLLM sleeps while a job trains (TANDEM_GPU_MODE=shared); use merge or"
                " volume"
            )

    def _check_replicas(self) -> None:
        if self.inference_replicas == 1 and self.replica is None:
            return
        several = f"TANDEM_INFERENCE_REPLICAS={self.inference_replicas}"
        if self.replica is not None:
            several = f"TANDEM_REPLICA={self.replica}"
        if self.gpu_mode == "shared":
            raise ValueError(
                f"{several} needs GPUs of its own for each vLLM; set TANDEM_GPU_MODE=dedicated, or"
                " one replica"
            )

    @property
    def ranks_per_host(self) -> int:
        return self.trainer_ranks // self.trainer_hosts

    @property
    def local_replicas(self) -> int:
        """The number of inference servers on this machine; 1 if `replica` is set."""
        return 1 if self.replica is not None else self.inference_replicas

    @property
    def way(self) -> Way:
        """How merged weights reach vLLM."""
        return "merge" if self.transport == "auto" else self.transport

    @property
    def resolved_inference_url(self) -> str:
        host = f"[{self.inference_host}]" if ":" in self.inference_host else self.inference_host
        return self.inference_url or f"http://{host}:{self.inference_port}"

    def model_path(self) -> str:
        """The base model's path in this container, or its hub name. Raises InvalidInput if no base
        model is set."""
        if self.base_model is None:
            raise InvalidInput(
                "not set: name a Hugging Face directory or a hub name", field="TANDEM_BASE_MODEL"
            )
        return resolve_model(self.root, self.base_model)

    def check_bind(self, server: Literal["controller", "inference"] = "controller") -> None:
        """Raises InvalidInput if other machines may reach the server and no API key is set."""
        host = self.controller_host if server == "controller" else self.inference_host
        if not self.api_keys and not is_loopback(host):
            problem = f"no API key is set, and {host} can be reached from other machines"
            remedy = "set TANDEM_API_KEY (or TANDEM_API_KEY_FILE), or bind to 127.0.0.1"
            raise InvalidInput(f"{problem}; {remedy}", field=f"TANDEM_{server.upper()}_HOST")

    @property
    def api_keys(self) -> list[str]:
        """The deployment's API keys. Commas or whitespace separate the keys in the variable or
        file, so that a file may have one key per line."""
        return list(self.named_keys)

    @property
    def named_keys(self) -> dict[str, str]:
        """Maps each API key to the key's name (`name:key` in the file); the default is empty.
        Several keys may have the same name, so that an old and a new key can be valid at once."""
        entries = [key for key in re.split(r"[,\s]+", self.secret("api_key") or "") if key]
        if self.api_key is not None:
            return dict.fromkeys(entries, "")
        pairs = [split_name(entry) for entry in entries]
        keys = {key: name for name, key in pairs}
        for name, key in pairs:
            if keys[key] != name:
                raise InvalidInput(
                    f"{name or 'no name'} and {keys[key] or 'no name'} have the same key; give each"
                    " its own",
                    field="TANDEM_API_KEY_FILE",
                )
        return keys

    @property
    def inference_key(self) -> str | None:
        """The first API key. vLLM itself accepts only this key. The middleware `ApiKeys` accepts
        every key. A key on vLLM's command line would be visible to other users, so vLLM gets the
        first key from an environment variable."""
        return next(iter(self.api_keys), None)

    def secret(self, name: Literal["api_key", "admin_token"]) -> str | None:
        """The secret's value, from its variable or from the file that the variable `<NAME>_FILE`
        names; None if neither variable is set. Raises InvalidInput if the file can't be read, or if
        the value has characters that an HTTP header can't carry."""
        value: SecretStr | None = getattr(self, name)
        path: Path | None = getattr(self, f"{name}_file")
        field = f"TANDEM_{name.upper()}"
        if value is not None:
            text = value.get_secret_value().strip()
        elif path is None:
            return None
        else:
            field += "_FILE"
            try:
                text = path.read_text(encoding="utf-8-sig").strip()
            except OSError as error:
                problem = (
                    f"can't read {path}: {error.strerror}; correct the path or the file's"
                    " permissions"
                )
                raise InvalidInput(problem, field=field) from error
            except UnicodeDecodeError as error:
                raise InvalidInput(
                    f"{path} is not text; write the secret in base64 or hex", field=field
                ) from error
        # Each API key may be on its own line.
        parts = text.split() if name == "api_key" else [text]
        if not all(part.isascii() and part.isprintable() for part in parts):
            raise InvalidInput(
                "may have printable ASCII characters only, in one line; choose another", field=field
            )
        return text


def load_settings() -> Settings:
    """The deployment's settings from the environment. Raises InvalidInput with the name of the
    first wrong variable."""
    try:
        return Settings()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0]) if first["loc"] else None
        field = name if name is None or name.isupper() else f"TANDEM_{name.upper()}"
        raise InvalidInput(first["msg"].removeprefix("Value error, "), field=field) from error


def resolve_model(root: Path, base_model: str) -> str:
    """The path of a run's base model, if the spool's `root` has a directory `base_model`; else
    `base_model` itself."""
    inside = root / base_model
    with suppress(OSError):  # OSError if `base_model` is too long for a path
        if not Path(base_model).is_absolute() and inside.is_dir():
            return str(inside)
    return base_model
