"""Translates hyperparameters of OpenAI's API into Tandem's training settings, and chooses values
for "auto"."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.controller.openai.lines import FORMATS
from tandem.data.chain_plan import RATES, DPOTraining, SFTTraining
from tandem.spool.schema import PreferenceLoss
from tandem.spool.schema.tuning import Hyperparameters, Tuning, TuningMethod

# These numbers are from OpenAI's cookbook ("Data preparation and analysis for chat model
# fine-tuning").
TARGET_EPOCHS, MOST_AUTO_EPOCHS = 3, 25
TARGET_EXAMPLES = 100, 25_000
AUTO_BATCH, STEPS_PER_EPOCH = 32, 16
AUTO_BETA = 0.1
CHECKPOINT_EVERY = 100
SLICE_BYTES = 16 * 2**20
"""The approximate size, in bytes, of the lines that one job trains. It is limited because the
controller parses and packs all lines of a job together."""
ROW_SLOTS = 2048
SHORTEST_ROW = 256


def resolved(given: Hyperparameters, method: TuningMethod, examples: int) -> Hyperparameters:
    """The hyperparameters with a number in place of each "auto".

    Args:
        given: the client's hyperparameters.
        method: the fine-tuning method; only "dpo" has a `beta`.
        examples: the number of lines of the training file.
    """
    epochs, batch, rate, beta = (
        given.n_epochs,
        given.batch_size,
        given.learning_rate_multiplier,
        given.beta,
    )
    if epochs == "auto":
        least, most = TARGET_EXAMPLES
        epochs = TARGET_EPOCHS
        if examples * TARGET_EPOCHS < least:
            epochs = min(MOST_AUTO_EPOCHS, least // examples)
        elif examples * TARGET_EPOCHS > most:
            epochs = max(1, most // examples)
    if batch == "auto":
        batch = min(AUTO_BATCH, max(1, examples // STEPS_PER_EPOCH))
    if rate == "auto":
        rate = 1.0
    if beta == "auto" and method == "dpo":
        beta = AUTO_BETA
    return Hyperparameters(
        n_epochs=epochs, batch_size=batch, learning_rate_multiplier=rate, beta=beta
    )


def checkpoint_every(batch: int, examples: int, size: int) -> int:
    """The number of optimizer steps of each job. A job trains one epoch; if the epoch has many
    steps or large lines, a job trains only a part of it.

    Args:
        batch: examples of one optimizer step.
        examples: the number of examples in the training file.
        size: bytes of all examples.
    """
    per_epoch = -(-examples // batch)
    fitting = SLICE_BYTES * examples // (max(size, 1) * batch)
    return max(1, min(per_epoch, CHECKPOINT_EVERY, fitting))


def row_length(longest: int, tokens: int, steps: int, positions: int) -> int:
    """The number of slots of a row: a power of two into which the longest example fits, but at most
    `positions`. If an average optimizer step has more tokens than the longest example, a row has
    room for the tokens of an average step, but for at most ROW_SLOTS of them. Longer rows would
    have empty slots, because a row has only tokens of one optimizer step.

    Args:
        longest: tokens of the longest example.
        tokens: tokens of an epoch.
        steps: optimizer steps of an epoch.
        positions: the maximum number of positions of the model.
    """
    wanted = max(longest, SHORTEST_ROW, min(ROW_SLOTS, -(-tokens // steps)))
    return min(positions, 1 << (wanted - 1).bit_length())


def training(
    tuning: Tuning, values: Hyperparameters, files: Sequence[Path], **more: Any
) -> SFTTraining | DPOTraining:
    """The chain's settings.

    Args:
        values: the hyperparameters as numbers.
        files: the training file and, if given, the validation file.
        more: other settings.
    """
    method = tuning.method
    kind = "sft" if method == "supervised" else "dpo"
    settings: dict[str, Any] = {
        "run": tuning.run,
        "data": str(files[0]),
        "held_out": str(files[1]) if files[1:] else None,
        "format": FORMATS[method],
        "epochs": values.n_epochs,
        "batch_size": values.batch_size,
        "learning_rate": RATES[kind] * float(values.learning_rate_multiplier),
        "seed": tuning.seed,
        **more,
    }
    if method == "dpo":
        return DPOTraining(**settings, loss=PreferenceLoss(beta=float(values.beta)))
    return SFTTraining(**settings)
