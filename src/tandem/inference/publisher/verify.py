"""Checks that vLLM computes the same log-probs for a checkpoint as the trainer. Other modules check
that vLLM's workers have the checkpoint's tensors. Each worker compares its adapter with the file,
bit for bit (`held_adapter.py`). For merged weights, rows of the tensors are compared with the
expected values (`SpotCheck`). Matching log-probs prove that vLLM computes with the checkpoint's
tensors and with the same base model. A checkpoint is served only after its tensors and its
log-probs are verified.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Self

from tandem.config import Settings
from tandem.inference.server.command import serving_dtype
from tandem.spool.schema import LongProbe, Probe
from tandem.vllm_client.client import VllmClient
from tandem.vllm_client.names import BASE_MODEL_NAME

IDENTITY_PROMPTS: tuple[tuple[int, ...], ...] = (tuple(range(1, 33)), tuple(range(48, 16, -1)))
"""Prompts on which step 0 is compared with the base model. Every vocabulary has these tokens."""

MARGIN = 4.0
"""A checkpoint is refused if its movement (see `movement`) is below one half by more than this many
standard errors. The trainer's log-probs are rounded too: after a step no larger than bfloat16's
rounding, any weights give a movement of about one half."""

ROUNDING = {"float32": 0.02, "bfloat16": 0.15}
"""The allowed effect of rounding on log-probs, in nats, by the dtype in which vLLM serves. The
limit holds for any model."""
BASE_ERRORS = 4.0
"""The allowed error as a multiple of vLLM's error for the base model on the same tokens. This limit
counts if it is above ROUNDING, for example with an FP8 base model or a mixture of experts."""
MOVED_SHARE = 0.25
"""The allowed error grows by this share of the distance between the log-probs of the base model and
of the checkpoint. Rounding grows with this distance. If vLLM does not use the checkpoint's weights,
the error is as large as the distance."""
LONG_TOLERANCE = 2.0
COMPARED = 0.9
"""The share of tokens that count: the mean error of this share of tokens, those with the smallest
errors, must be within the tolerance. A token that is routed to other experts may differ by any
amount, but wrong weights change all tokens.
"""


@dataclass(frozen=True)
class Verification:
    """The result of a verification. `error` is the mean of |served - expected| over all log-probs,
    in nats. `tokens` is the number of log-probs. `allowed` is the limit for the mean error of the
    closest tokens, in nats. The closest tokens are those with the smallest errors; their share of
    all tokens is COMPARED."""

    error: float
    allowed: float
    tokens: int


class WrongWeights(Exception):
    """vLLM does not serve a checkpoint's weights, or Tandem can't verify that vLLM serves them. The
    error's message gives the reason."""


@dataclass(frozen=True)
class Tolerance:
    """The rule for the largest error, in nats, with which a step is served.

    The rule estimates the rounding error from two numbers: vLLM's error for the base model on the
    same tokens, and the distance between the checkpoint's and the base model's log-probs.
    `bench/verification.py` measures the rule, and docs/performance.md has the table of results.
    """

    rounding: float
    limit: float = math.inf
    """The largest error at which a step is served, whatever the rule says:
    TANDEM_VERIFY_TOLERANCE."""

    @classmethod
    def of(cls, settings: Settings) -> Self:
        return cls(ROUNDING[serving_dtype(settings)], settings.verify_tolerance or math.inf)

    def allowed(self, base_error: float, moved: float) -> float:
        """The limit for a checkpoint in nats. `base_error` is vLLM's mean error for the base model,
        in nats; 0 if vLLM does not serve the base model. `moved` is the mean distance between the
        checkpoint's and the base model's log-probs, in nats."""
        return min(max(self.rounding, BASE_ERRORS * base_error) + MOVED_SHARE * moved, self.limit)


def movement(
    served: Sequence[float],
    checkpoint: Sequence[float],
    reference: Sequence[float],
    contexts: Sequence[Hashable],
) -> tuple[float, float] | None:
    """The position of the served log-probs on the line from a reference (0) to the checkpoint's own
    log-probs (1), and the position's standard error. None if the checkpoint's log-probs equal the
    reference's log-probs.

    The standard error treats the residuals of different contexts as independent (Liang and Zeger
    1986).

    The position is the least-squares coefficient a of `served - reference = a (checkpoint -
    reference)`. Rounding may route a few tokens of a mixture of experts to other experts, in vLLM
    or in the trainer, before or after the step. The log-probs of rerouted tokens may change by any
    amount. To limit the influence of rerouted tokens, both sides of each token's equation are
    divided by a scale. The scale of a token is |checkpoint - reference|, but at least the third
    quartile of the nonzero values of |checkpoint - reference|. Let x be the scaled value of
    `checkpoint - reference`. The scaled value of `served - reference` is clipped to the interval [x
    / 2 - 1, x / 2 + 1].

    Args:
        served, checkpoint, reference: log-probs of the same tokens, [tokens], in nats.
        contexts: [tokens]. Tokens with the same entry in `contexts` have correlated errors, because
            rounding moves a token by the same amount in all sequences with the same prompt.
    """
    direction = [c - r for c, r in zip(checkpoint, reference, strict=True)]
    moved = [abs(d) for d in direction if d]
    if not moved:
        return None
    least, xs, ys = sorted(moved)[3 * len(moved) // 4], [], []
    for s, r, d in zip(served, reference, direction, strict=True):
        scale = max(abs(d), least)
        xs.append(x := d / scale)
        ys.append(x / 2 + min(max((s - r) / scale - x / 2, -1.0), 1.0))
    length = sum(x * x for x in xs)
    a = sum(x * y for x, y in zip(xs, ys, strict=True)) / length
    residuals = defaultdict[Hashable, float](float)
    for x, y, context in zip(xs, ys, contexts, strict=True):
        residuals[context] += x * (y - a * x)
    count = len(residuals)
    variance = sum(r * r for r in residuals.values()) * count / max(count - 1, 1)
    return a, math.sqrt(variance) / length


def verify(
    client: VllmClient,
    model: str,
    probe: Probe | None,
    *,
    tolerance: Tolerance,
    identity: str = BASE_MODEL_NAME,
    beside: str = "",
) -> Verification:
    """Compare the log-probs of vLLM's model `model` with the trainer's log-probs in `probe`. If
    there is no probe (step 0), compare them with the log-probs of vLLM's model `identity`.

    The mean error of the closest tokens must be within `tolerance`. The served log-probs must also
    be nearer to this checkpoint's log-probs than to the log-probs of the previous checkpoint and of
    the base model. Differences of the size of rounding errors do not cause a refusal.

    Args:
        client: a client of the vLLM server.
        model: name under which vLLM serves the checkpoint.
        probe: the probe in the checkpoint's manifest; None for step 0.
        tolerance: the rule for the largest allowed error.
        identity: name of the vLLM model that step 0 must equal.
        beside: name under which vLLM serves the base model beside `model`; empty if vLLM does not
            serve the base model.

    Raises WrongWeights, and the errors of VllmClient.
    """
    longest = client.longest_prompt()
    prompts = [tokens[:longest] for tokens in (IDENTITY_PROMPTS if probe is None else probe.tokens)]
    served = list(chain.from_iterable(client.prompt_logprobs(model, *prompts)))
    if probe is None:
        expected = list(chain.from_iterable(client.prompt_logprobs(identity, *prompts)))
        allowed = tolerance.allowed(0.0, 0.0)
        return Verification(
            _error(served, expected, "the base model", allowed), allowed, len(served)
        )
    expected = _of_prompts(prompts, probe.logprobs)
    base = _of_prompts(prompts, probe.base)
    for name, rows in (("the trainer", expected), ("the base model", base)):
        if len(rows) != len(served) or not served:
            raise WrongWeights(
                f"the probe is malformed: {len(rows)} log-probs of {name} for {len(served)}"
                " predictions"
            )
    base_error = 0.0
    if beside:
        # The reference is the trainer's log-probs of the base model. vLLM's log-probs of the base
        # model are no reference, because they contain the same rounding errors as `served`. If a
        # step changes the log-probs no more than rounding does, `served` would be nearer to vLLM's
        # base model than to the trainer's step, although the weights are right.
        served_base = list(chain.from_iterable(client.prompt_logprobs(beside, *prompts)))
        base_error = _closest_mean(served_base, base)
    allowed = tolerance.allowed(base_error, _closest_mean(expected, base))
    error = _error(served, expected, "the trainer", allowed)
    short = Verification(error, allowed, len(served))
    contexts = [pair for tokens in prompts for pair in pairwise(tokens)]
    for name, rows in (
        ("the checkpoint before it", _of_prompts(prompts, probe.previous)),
        ("the base model", base),
    ):
        _refuse_reference(served, expected, rows, contexts, name)
    return short if probe.long is None else _with_long(short, client, model, probe.long, longest)


def _with_long(
    short: Verification,
    client: VllmClient,
    model: str,
    probe: LongProbe,
    longest: int,
) -> Verification:
    """The result for the tokens of the short sequences and of the long sequence. `longest`: the
    longest prompt that vLLM accepts; positions beyond it are not compared. The allowed mean error
    is LONG_TOLERANCE times as large in the long sequence, because tokens after a long prefix have
    more rounding.
    """
    positions = [position for position in probe.positions if position < longest]
    if not positions:
        return short
    # The prompt ends at the last compared position.
    end = positions[-1] + 1
    [values] = client.prompt_logprobs(model, probe.tokens[:end])
    served, expected = (
        [values[position - 1] for position in positions],
        probe.logprobs[: len(positions)],
    )
    where = f" (in a sequence of {end} tokens)"
    error, tokens = (
        _error(served, expected, "the trainer", LONG_TOLERANCE * short.allowed, where),
        len(served),
    )
    mean = (short.error * short.tokens + error * tokens) / (short.tokens + tokens)
    return Verification(mean, short.allowed, short.tokens + tokens)


def _error(
    served: Sequence[float], expected: Sequence[float], owner: str, allowed: float, where: str = ""
) -> float:
    """The mean |served - expected| of all tokens in nats. Raises WrongWeights if `_closest_mean` is
    above `allowed`."""
    if len(served) != len(expected) or not served:
        raise WrongWeights(
            f"the probe is malformed: {len(expected)} log-probs for {len(served)}"
            f" predictions{where}"
        )
    errors = sorted(abs(s - e) for s, e in zip(served, expected, strict=True))
    if not math.isfinite(sum(errors)):
        raise WrongWeights(f"vLLM's log-probs of the probe are not all finite{where}")
    error = _closest_mean(served, expected)
    if error > allowed:
        raise WrongWeights(
            f"vLLM's log-probs differ from {owner}'s by {error:.4g} nats on average over the"
            f" closest {COMPARED:.0%} of {len(errors)} tokens (allowed: {allowed:g}; median"
            f" {statistics.median(errors):.4g}, largest {errors[-1]:.4g}){where}: it computes with"
            " another base model, or not with this checkpoint. Compare TANDEM_BASE_MODEL of trainer"
            " and inference, then start vLLM again"
        )
    return sum(errors) / len(errors)


def _closest_mean(one: Sequence[float], other: Sequence[float]) -> float:
    """The mean |one - other| of the closest tokens, in nats. The closest tokens are those with the
    smallest differences; their share of all tokens is COMPARED."""
    errors = sorted(abs(a - b) for a, b in zip(one, other, strict=True))
    closest = errors[: math.ceil(COMPARED * len(errors))]
    return sum(closest) / len(closest)


def _refuse_reference(
    served: Sequence[float],
    expected: Sequence[float],
    reference: Sequence[float],
    contexts: Sequence[Hashable],
    name: str,
) -> None:
    """Raises WrongWeights if vLLM's log-probs are nearer to the log-probs of a reference than to
    those of the checkpoint."""
    if len(reference) != len(served):
        problem = f"{len(reference)} log-probs of {name} for {len(served)} predictions"
        raise WrongWeights(f"the probe is malformed: {problem}")
    moved = movement(served, expected, reference, contexts)
    if moved is not None and moved[0] + MARGIN * moved[1] < 0.5:
        share = f"{moved[0]:.2f} of the way, give or take {moved[1]:.2f}"
        raise WrongWeights(
            f"vLLM's log-probs are nearer to those of {name} than to this checkpoint's ({share})"
        )


def _of_prompts(prompts: Sequence[Sequence[int]], rows: Sequence[Sequence[float]]) -> list[float]:
    """The log-probs that belong to `prompts`, which may be shorter than the probe's sequences."""
    if len(rows) != len(prompts):
        return []
    return list(
        chain.from_iterable(
            row[: len(tokens) - 1] for tokens, row in zip(prompts, rows, strict=True)
        )
    )
