"""Where merged serving keeps its second copy of the base weights: on vLLM's GPU or in pinned host memory."""

from typing import Literal

from tandem.config import Settings


def ordered_copy(settings: Settings) -> Literal["auto", "device", "host"]:
    """What vLLM's workers are told. `auto`: they decide when the model is loaded."""
    if settings.second_copy == "auto" and settings.gpu_mode == "shared":
        return "host"  # a copy on the GPU would have to be moved at each sleep
    return settings.second_copy


def automatic_copy(left: float, weights: float) -> Literal["device", "host"]:
    """What `auto` means on a GPU with `left` bytes beside a model of `weights` bytes: at most half of what is left for
    the KV cache goes to the copy."""
    return "device" if left >= 2 * weights else "host"
