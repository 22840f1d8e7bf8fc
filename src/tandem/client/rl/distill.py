"""On-policy distillation (Agarwal et al., 2024, arXiv:2306.13649). A teacher scores the run's
samples. Each token gets an advantage: minus `coef` times the token's part of the reverse KL
divergence."""

import asyncio
import os
from collections.abc import Sequence
from statistics import fmean

import httpx

from tandem.client import Trajectory, Turn
from tandem.client.http import Backoff, connection
from tandem.client.rl.config import DistillSection
from tandem.client.rl.sampler import PATIENCE
from tandem.client.vllm import Vllm, listed_models, open_vllm, vllm_url
from tandem.data.inputs import LOWEST_LOGPROB
from tandem.errors import InvalidInput, Unreachable

VARIABLE = "TANDEM_TEACHER_URL"
KEY_VARIABLE = "TANDEM_TEACHER_API_KEY"


def open_teacher() -> Vllm:
    """The vLLM that serves the teacher: TANDEM_TEACHER_URL with TANDEM_TEACHER_API_KEY, else the
    vLLM that serves the run. Raises InvalidInput if the address contains credentials although a key
    is given."""
    url = os.environ.get(VARIABLE)
    if not url:
        return open_vllm()
    # Tandem's own key must not be sent to another server.
    key = os.environ.get(KEY_VARIABLE)
    arguments = connection(f"{vllm_url(url)}/v1", key or "none", VARIABLE)
    headers = dict(arguments["headers"])
    if not key:
        del headers["Authorization"]
    if httpx.URL(url).userinfo and key:
        problem = f"it has credentials, and there is {KEY_VARIABLE}; leave one of them out"
        raise InvalidInput(problem, field=VARIABLE)
    return Vllm(arguments["base_url"], headers)


class Teacher:
    """The teacher. `vllm`: a client of the vLLM that serves the teacher. The caller must have
    entered the client's context."""

    def __init__(self, settings: DistillSection, vllm: Vllm) -> None:
        self._settings, self._vllm = settings, vllm

    async def raise_unless_served(self) -> None:
        """Raises InvalidInput if the teacher's vLLM does not list the teacher's model."""
        names = listed_models(await self._vllm.request("GET", "models", seconds=10))
        if self._settings.model not in names:
            problem = f"{self._vllm.url}/models lists {names}, without {self._settings.model!r}"
            raise InvalidInput(
                f"{problem}; name one of these, or set {VARIABLE}", field="rl.distill.model"
            )

    async def scored(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with an advantage for each sampled token, and with the metric
        `reverse_kl`. The metric is the mean of the tokens' parts of the reverse KL, in nats."""
        turns, differences = list[Turn](), list[float]()
        known: tuple[list[int], list[float]] = ([], [])
        for turn in reversed(trajectory.turns):
            tokens = [*turn.prompt_token_ids, *turn.token_ids]
            # If a later turn begins with this turn's tokens, the teacher has already scored the
            # later turn, and the later turn's log-probs are reused.
            if known[0][: len(tokens)] != tokens:
                known = tokens, await self._logprobs(tokens)
            theirs = known[1][len(turn.prompt_token_ids) - 1 : len(tokens) - 1]
            own = reverse_kl(turn.logprobs, theirs)
            differences += own
            own = [-self._settings.coef * each for each in own]
            more = {} if self._settings.rewards else {"advantage": 0.0}
            turns.insert(0, turn.model_copy(update={"advantages": own, **more}))
        metrics = {**trajectory.metrics, "reverse_kl": fmean(differences)}
        return Trajectory.model_validate(
            {
                **trajectory.model_dump(exclude_unset=True, exclude={"turns", "metrics"}),
                "turns": [turn.model_dump(exclude_unset=True) for turn in turns],
                "metrics": metrics,
            }
        )

    async def _logprobs(self, tokens: Sequence[int]) -> list[float]:
        """The teacher's log p(tokens[i + 1] | tokens[: i + 1]) for each i, at temperature 1. The
        request is repeated while the teacher's vLLM does not answer."""
        body = {
            "model": self._settings.model,
            "prompt": list(tokens),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
        }
        backoff = Backoff(PATIENCE)
        while True:
            try:
                answer = await self._vllm.request("POST", "completions", body)
                if answer.is_success:
                    entries = answer.json()["choices"][0]["prompt_logprobs"]
                    return [
                        _finite(entry[str(token)]["logprob"])
                        for token, entry in zip(tokens[1:], entries[1:], strict=True)
                    ]
                text = f"the teacher answered {answer.status}: {answer.text[:500]}"
                if answer.status < 500 and answer.status not in (404, 429):
                    raise InvalidInput(text, field="rl.distill.model")
                error = Unreachable(text)
            except Unreachable as unreachable:
                error = unreachable
            await asyncio.sleep(backoff.next(error))


def reverse_kl(sampled: Sequence[float], teacher: Sequence[float]) -> list[float]:
    """The difference log p(token) - log q(token) of each sampled token, in nats, for the policy p
    and the teacher q. The mean of the differences over p is KL(p || q). The mean over p of the
    difference times the score, grad log p, is the gradient of the KL."""
    return [ours - theirs for ours, theirs in zip(sampled, teacher, strict=True)]


def _finite(logprob: float | None) -> float:
    """The log-prob, but at least LOWEST_LOGPROB. For a token of probability 0, vLLM sends null."""
    return LOWEST_LOGPROB if logprob is None else max(float(logprob), LOWEST_LOGPROB)
