"""The tests check at which addresses clients look for vLLM, and the clients' errors if vLLM is not
there."""

import asyncio
from collections.abc import Callable

import httpx
import pytest

from rl.mock_vllm import MockVllm
from tandem.client.rl.config import EnvironmentSection, RLSection
from tandem.client.rl.groups import Rollouts
from tandem.client.rl.sampler import DiscardedError, Sampler
from tandem.client.rl.watch import Watch
from tandem.client.vllm import open_vllm, raise_unless_serving, vllm_url
from tandem.errors import InvalidInput, TandemError, Unreachable


def test_the_key_goes_to_tandems_vllm_and_to_no_other_provider(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "https://openrouter.ai/api/v1")
    monkeypatch.setenv("TANDEM_API_KEY", "secret")
    monkeypatch.delenv("TANDEM_INFERENCE_URL", raising=False)
    assert open_vllm().url == "http://127.0.0.1:8000/v1"
    for named in (
        "http://vllm:8000",
        "http://vllm:8000/",
        "http://vllm:8000/v1",
        "http://vllm:8000/v1/",
    ):
        monkeypatch.setenv("TANDEM_INFERENCE_URL", named)
        assert vllm_url() == "http://vllm:8000"
        assert open_vllm().url == "http://vllm:8000/v1"
    assert vllm_url("http://other/v1") == "http://other"


def test_an_address_that_is_none_is_refused_by_its_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TANDEM_INFERENCE_URL", "here")
    with pytest.raises(InvalidInput, match="TANDEM_INFERENCE_URL: 'here/v1' is not a URL"):
        open_vllm()
    monkeypatch.setenv("TANDEM_INFERENCE_URL", "http://me:password@vllm:8000")
    monkeypatch.setenv("TANDEM_API_KEY", "secret")
    with pytest.raises(InvalidInput, match="it has credentials, and there is an API key"):
        open_vllm()


def away(request: httpx.Request) -> httpx.Response:
    raise Unreachable(f"{request.url} does not answer (ClientConnectorError: refused)")


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (
            away,
            "does not answer .ClientConnectorError: refused.; start vLLM, or set TANDEM_INFER",
        ),
        (lambda _: httpx.Response(404, text="<html>"), "answers 404; set TANDEM_INFERENCE_URL"),
        (lambda _: httpx.Response(401), "refuses the key; set TANDEM_API_KEY"),
        (
            lambda _: httpx.Response(200, text="<html>"),
            r"lists \[\], without a step of 'r'; set TANDEM_INFERENCE_URL",
        ),
        (
            lambda _: httpx.Response(200, json={"data": [{"id": "gpt"}]}),
            r"lists \['gpt'\], without a step of 'r'",
        ),
    ],
)
def test_a_wrong_address_is_told_with_its_url_and_variable(answer, problem) -> None:
    async def ask() -> None:
        await raise_unless_serving(MockVllm(answer), "r", patience=0)

    with pytest.raises(TandemError, match=f"http://vllm/v1/models {problem}"):
        asyncio.run(ask())


def test_a_vllm_that_has_just_started_is_asked_again() -> None:
    answers = [
        httpx.Response(503),
        httpx.Response(200, json={"data": [{"id": "base"}, {"id": "r@3"}]}),
    ]

    async def ask() -> None:
        await raise_unless_serving(MockVllm(lambda _: answers.pop(0)), "r")

    asyncio.run(ask())
    assert not answers


async def sampled(count: int) -> list[tuple[str, str]]:
    """(session, group) of each request of a group's rollouts."""
    seen = list[tuple[str, str]]()

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append((request.headers["x-session-id"], request.headers["x-tandem-group"]))
        return httpx.Response(400, json={"error": {"message": "enough"}})

    class Environment:
        async def play(self, _task: object, sampler: Callable[[], Sampler], *_: object) -> None:
            own = sampler()
            for _turn in range(2):
                with pytest.raises(InvalidInput):
                    await own.chat([{"role": "user", "content": "?"}])
            raise DiscardedError("enough")

    parts = (lambda: 0, lambda _: None, lambda _: None, (0.0, 0.0), Watch())
    rollouts = Rollouts(
        RLSection(steps=1, environment=[EnvironmentSection(use="a:b")]),
        "r",
        MockVllm(answer),
        *parts,
    )
    with pytest.raises(TandemError, match="discarded"):
        await rollouts.group(Environment(), "task", count)  # type: ignore[arg-type]
    return seen


def test_rollouts_of_a_task_share_a_group_and_turns_a_session() -> None:
    one, other = (asyncio.run(sampled(3)) for _ in range(2))
    assert len(one) == 6
    assert len({session for session, _ in one}) == 3
    assert len({group for _, group in one}) == 1
    assert {group for _, group in one} != {group for _, group in other}
