"""A Hugging Face model's directory and its `config.json`. Errors name the file and the key."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tandem.errors import HubUnreachable, InvalidInput, TandemError, UnknownArchitecture, VolumeFull
from tandem.system.plain_files import open_plain, read_plain

JSON_BYTES = 2**26
"""The maximum size in bytes of a model's `config.json`, or of its index of tensors. An index takes
about 100 bytes per tensor."""

MODEL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "model*.safetensors")
"""Patterns of the names of a model's files: configuration, tokenizer and weights."""


def model_directory(
    model: str, files: tuple[str, ...] = MODEL_FILES, *, cached: bool = False
) -> Path:
    """The directory of a model: `model` itself, or the local snapshot of a hub name. Raises
    InvalidInput if `model` is neither a directory nor the name of a model that the hub gives, or if
    the cache lacks files and `cached` or the hub client's offline mode forbids a download. Raises
    VolumeFull if the cache has no space, and HubUnreachable after any other error of the hub's
    client; after both, a later call can succeed.

    Args:
        model: a directory, or a model's name at the hub.
        files: patterns of the names of the files that are downloaded if the cache lacks them.
        cached: if True, nothing is downloaded, and the hub is not contacted.
    """
    if Path(model).is_dir():
        return Path(model)
    # A local directory needs no hub client.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=list(files), local_files_only=cached))
    # The client raises a dozen types of errors: bad names, no access, no network, no such file.
    except Exception as error:
        raise _from_client(error, model, cached=cached) from error


def base_model_files(directory: Path) -> list[Path]:
    """The directory's files that match MODEL_FILES, sorted by name."""
    return [
        path
        for path in sorted(directory.iterdir())
        if path.is_file() and any(map(path.match, MODEL_FILES))
    ]


def base_model_digest(model: str) -> tuple[str, str]:
    """The model's directory, and a digest of the names, the sizes and the first MiB of the
    directory's files. A model at the hub is downloaded first."""
    directory, digest = model_directory(model), hashlib.sha256()
    for path in base_model_files(directory):
        with open_plain(path, links="any") as file:
            begin = file.read(2**20)
        digest.update(f"{path.name} {path.stat().st_size} ".encode() + begin)
    return str(directory), digest.hexdigest()


def _from_client(error: Exception, model: str, *, cached: bool) -> TandemError:
    """The Tandem error for an error of the hub's client. The error is InvalidInput if the model's
    name is wrong, and another error if the cause may be temporary."""
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled

    # After some errors, the client searches its cache and raises a second error. The first error is
    # then the `__cause__` of the second error.
    first = error.__cause__ if isinstance(error.__cause__, Exception) else error
    status = getattr(getattr(first, "response", None), "status_code", 0)
    if (
        cached
        or status in (401, 403, 404)
        or isinstance(first, (HFValidationError, OfflineModeIsEnabled))
    ):
        problem = f"{model!r} is neither a directory nor a model that the hub gives: {error}"
        return InvalidInput(problem, field="base_model")
    if isinstance(first, OSError) and first.errno in VolumeFull.ERRNOS:
        return VolumeFull(
            f"no space for {model!r} in the hub's cache; free some or set HF_HOME elsewhere:"
            f" {error}"
        )
    return HubUnreachable(f"the hub did not give {model!r}, try again: {error}", field="base_model")


def weight_files(directory: Path) -> list[Path]:
    """A model's safetensors files: the files that the index lists or, without an index,
    `model.safetensors`. Raises InvalidInput if a file is missing."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    try:
        if index.is_file():
            return [
                directory / name
                for name in sorted(
                    set(
                        json.loads(read_plain(index, most=JSON_BYTES, links="any"))[
                            "weight_map"
                        ].values()
                    )
                )
            ]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InvalidInput(f"{index} can't be read: {error}", field="base_model") from error
    if single.is_file():
        return [single]
    raise InvalidInput(
        f"{directory} has neither {single.name} nor {index.name}", field="base_model"
    )


def other_files(directory: Path) -> list[Path]:
    """The files of a model's directory besides the weights: configuration and tokenizer."""
    files = [
        path for path in directory.iterdir() if path.suffix in (".json", ".jinja", ".txt", ".model")
    ]
    return [path for path in files if not path.name.endswith(".index.json")]


@dataclass(frozen=True)
class ModelConfig:
    """A parsed `config.json`."""

    values: dict[str, Any]
    source: str  # The config's name in error messages, such as the config's path.
    # The family's values for keys that the config leaves out.
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: str) -> Self:
        """The config of `model`, a directory or a hub name. Raises InvalidInput if the config can't
        be read."""
        path = model_directory(model, ("config.json", "hf_quant_config.json")) / "config.json"
        try:
            values = json.loads(read_plain(path, most=JSON_BYTES, links="any"))
        except FileNotFoundError as error:
            raise InvalidInput(
                f"{path} is missing: not a Hugging Face model", field="base_model"
            ) from error
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise InvalidInput(
                f"{path} can't be read as JSON: {error}", field="base_model"
            ) from error
        if not isinstance(values, dict):
            raise InvalidInput(f"{path} is not a JSON object", field="base_model")
        return cls(values, str(path))

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key`. Returns the family's default for a missing key, or `default` if the
        family has no default for the key."""
        return self.values.get(key, self.defaults.get(key, default))

    def given(self, key: str, default: Any = None) -> Any:
        """Like `get`, but a key whose value is null is treated like a missing key."""
        value = self.values.get(key)
        return self.defaults.get(key, default) if value is None else value

    def positive(
        self, key: str, kind: type[int] | type[float], default: float | None = None
    ) -> Any:
        """The value that `given` returns for `key`, which must be a positive number. Raises
        InvalidInput if the number is not positive.

        Args:
            kind: the type of the result; int refuses numbers that are not whole.
            default: the value of a key that is missing or null, if the family has no default for
                the key.
        """
        value = self.given(key, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or kind(value) != value
            or value <= 0
        ):
            raise self.invalid(f"{key} is {value!r}, not a positive {kind.__name__}")
        return kind(value)

    def invalid(self, problem: str) -> InvalidInput:
        """The error to raise for a wrong value."""
        return InvalidInput(f"{self.source}: {problem}", field="base_model")

    def unsupported(self, variant: str) -> UnknownArchitecture:
        """The error to raise for a variant of the model that Tandem doesn't build."""
        return UnknownArchitecture(
            f"{self.source} asks for {variant}, which Tandem doesn't build", field="base_model"
        )

    def refuse(self, variants: Mapping[str, object]) -> None:
        """Raise the error of `unsupported` for the first variant that the config asks for.
        `variants`: description of a variant -> whether the config asks for the variant."""
        for variant, asked in variants.items():
            if asked:
                raise self.unsupported(variant)
