"""The sessions of the rollout door: the turns that each rollout has sampled, in this server's
memory.

The key of a turn is a digest of the conversation up to and including the turn's answer. The tokens
of each turn are therefore stored only once. A session may branch, for example because of edits, of
sub-agents, or of several samples of a prompt.
"""

import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import groupby
from typing import Any

from tandem.vllm_client.names import SESSION_HEADER

HEADER = SESSION_HEADER
NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""Pattern of the names that a session may have."""
MOST_SESSIONS, MOST_TOKENS = 2**14, 2**25
"""The most sessions, and the most tokens of all sessions together. So many tokens take about half a
gigabyte of memory. The session that has been unused for the longest time is removed first."""
BREAKS = ("booleans", "whitespace", "stop_string", "truncated", "edited", "template")
"""The reasons why a turn does not continue the sampled tokens."""

Message = Mapping[str, Any]


@dataclass(eq=False)
class SampledTurn:
    """A sampled turn. `head`: the earlier turn that the prompt continues; `new`: the prompt's
    tokens after the tokens of `head`. `asked`: the digest of the conversation before the answer.
    `stop`: the stop string that ended the answer; `with_stop`: the answer followed by the stop
    string, as some clients send it back."""

    head: "SampledTurn | None"
    new: array[int]
    tokens: array[int]
    logprobs: array[float]
    asked: bytes
    answer: dict[str, Any]
    model: str
    truncated: bool
    stop: str | None
    with_stop: dict[str, Any] | None
    ended: bool
    """Whether the turn's last token is a token that ends a turn."""

    def prompt(self) -> list[int]:
        turns = [self]
        while (head := turns[-1].head) is not None:
            turns.append(head)
        ids = [*turns.pop().new]
        for turn in reversed(turns):
            assert turn.head is not None
            ids += turn.head.tokens
            ids += turn.new
        return ids

    def all_tokens(self) -> list[int]:
        return [*self.prompt(), *self.tokens]

    def trained(self) -> dict[str, Any]:
        """The turn as a dict, in the form that turns have in a trajectory."""
        _, at, step = self.model.rpartition("@")
        return {
            "prompt_token_ids": self.prompt(),
            "token_ids": [*self.tokens],
            "logprobs": [*self.logprobs],
            **({"policy_step": int(step)} if at and step.isdecimal() else {}),
        }

    @property
    def size(self) -> int:
        return len(self.new) + len(self.tokens)


@dataclass(frozen=True)
class SentMessages:
    """A request's messages, where consecutive messages of the assistant are joined. The entry
    `digests[i]` is the digest of the chat template, its options and the first i joined messages.
    The entry `ends[i]` tells how many of the request's messages are in the first i joined
    messages."""

    messages: list[dict[str, Any]]
    digests: list[bytes]
    ends: list[int]

    @classmethod
    def of(cls, messages: Sequence[Message], shape: object) -> "SentMessages":
        runs, ends = list[dict[str, Any]](), [0]
        for role, found in groupby(messages, lambda one: str(one.get("role"))):
            run = list(found)
            parts = [run] if role == "assistant" else [[one] for one in run]
            for part in parts:
                runs.append(plain(part))
                ends.append(ends[-1] + len(part))
        digests = [_digest(b"", shape)]
        for one in runs:
            digests.append(digest_with(digests[-1], one))
        return cls(runs, digests, ends)

    @property
    def last_answer(self) -> int | None:
        """The index in `messages` of the assistant's last message; None if there is none."""
        found = [i for i, one in enumerate(self.messages) if one["role"] == "assistant"]
        return found[-1] if found else None


def plain(run: Sequence[Message]) -> dict[str, Any]:
    """A message, or consecutive messages of the assistant, in a normal form. Outer white space and
    ids are removed, the reasoning has its own key, and calls' arguments are parsed."""
    text = "".join(_text(one.get("content")) for one in run).strip()
    role = run[0].get("role")
    if role != "assistant":
        return {"role": role, "content": text, "name": run[0].get("name")}
    reasoning = "".join(reasoning_of(one) or "" for one in run).strip()
    calls = [call for one in run for call in one.get("tool_calls") or ()]
    return {
        "role": role,
        "content": text,
        "reasoning": reasoning,
        "calls": [_call(call.get("function") or {}) for call in calls],
    }


def digest_with(before: bytes, message: Mapping[str, Any]) -> bytes:
    """The digest of a conversation to which one more message was added. Reasoning is not part of
    the digest, because clients may leave it out."""
    return _digest(before, {**message, "reasoning": None})


def reasoning_of(message: Message) -> str | None:
    """The reasoning in an assistant's message, under any of the keys that vLLM, other servers and
    clients use."""
    names = ("reasoning", "reasoning_content", "thinking")
    texts = (message.get(name) for name in names)
    return next((text for text in texts if isinstance(text, str) and text), None)


def malformed(message: Message) -> str | None:
    """The name of the message's first call whose arguments are not a JSON object. vLLM would render
    such a call without its arguments."""
    for call in message.get("tool_calls") or ():
        name, arguments = _call(call.get("function") or {})
        if not isinstance(arguments, dict):
            return str(name)
    return None


def _call(function: Mapping[str, Any]) -> list[Any]:
    given: Any = function.get("arguments")
    if isinstance(given, str):
        text = given.strip()
        try:
            given = json.loads(text) if text else {}
        except (ValueError, RecursionError):
            given = text
    return [function.get("name"), {} if given is None else given]


def _text(content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    return "".join(
        str(part["text"])
        if isinstance(part, dict) and isinstance(part.get("text"), str)
        else json.dumps(part, sort_keys=True, default=str)
        for part in parts
    )


def _digest(before: bytes, value: object) -> bytes:
    text = json.dumps(value, sort_keys=True, default=str)
    return sha256(before + text.encode("utf-8", "surrogatepass")).digest()


@dataclass(eq=False)
class RolloutSession:
    turns: list[SampledTurn] = field(default_factory=list)
    after: dict[bytes, SampledTurn] = field(default_factory=dict)
    """Turns by the digest of the conversation up to and including their answer."""
    messages: list[Any] = field(default_factory=list)
    """The conversation of the last turn, for the `messages` of the trajectory."""
    size: int = 0

    def find(self, conversation: SentMessages) -> tuple[SampledTurn, int] | None:
        """The turn whose answer is the conversation's last answer, and the number of the request's
        messages up to the end of that answer. None if no turn fits."""
        if (at := conversation.last_answer) is None:
            return None
        turn = self.after.get(conversation.digests[at + 1])
        given = conversation.messages[at]["reasoning"]
        if turn is None or (given and given != turn.answer["reasoning"]):
            return None
        return turn, conversation.ends[at + 1]

    def expected(self, conversation: SentMessages) -> SampledTurn | None:
        """The turn that the client has probably edited, if `find` returns None. The result is the
        first of these turns that exists: a turn after the same messages, a turn with the same
        answer, or the last known turn at the conversation's beginning. None if no turn fits."""
        if (at := conversation.last_answer) is None:
            return None
        asked, given = conversation.digests[at], conversation.messages[at]
        same = [turn for turn in self.turns if turn.asked == asked]
        alike = (turn for turn in reversed(self.turns) if _same(turn.answer, given))
        before = (
            self.after[digest] for digest in reversed(conversation.digests) if digest in self.after
        )
        return next(iter(same[-1:]), None) or next(alike, None) or next(before, None)

    def add(self, turn: SampledTurn) -> None:
        self.turns.append(turn)
        self.after[digest_with(turn.asked, turn.answer)] = turn
        if turn.with_stop is not None:
            self.after[digest_with(turn.asked, turn.with_stop)] = turn
        self.size += turn.size

    def deepest(self, ids: Sequence[int]) -> SampledTurn | None:
        """The longest turn whose tokens (prompt and answer) are the beginning of `ids`. None if no
        turn fits."""
        found, longest = None, 0
        for turn in self.turns:
            known = turn.all_tokens()
            if longest < len(known) and known == list(ids[: len(known)]):
                found, longest = turn, len(known)
        return found


def _same(one: Message, other: Message) -> bool:
    return {**one, "reasoning": None} == {**other, "reasoning": None}


def reason_of_break(turn: SampledTurn, given: Mapping[str, Any]) -> str:
    """The reason, one of BREAKS, why the client's text renders to other tokens than the sampled
    tokens."""

    def compact(message: Mapping[str, Any], *, loose: bool) -> str:
        text = json.dumps([message["content"], message["calls"]], sort_keys=True, default=str)
        text = re.sub(r"\\[nrt]|\s", "", text)
        return re.sub(r'["\\]', "", text).lower() if loose else text

    if _same(turn.answer, given):
        return "edited"  # the reasoning, or the text before the answer, differs
    if compact(turn.answer, loose=False) == compact(given, loose=False):
        return "whitespace"
    if compact(turn.answer, loose=True) == compact(given, loose=True):
        return "booleans"
    if turn.stop is not None:
        return "stop_string"
    return "truncated" if turn.truncated else "edited"


class Sessions:
    """All sessions of the rollout door, in bounded memory."""

    def __init__(self, most: int = MOST_SESSIONS, tokens: int = MOST_TOKENS) -> None:
        self._most, self._tokens, self._size = most, tokens, 0
        self._sessions: OrderedDict[str, RolloutSession] = OrderedDict()

    def use(self, name: str) -> RolloutSession:
        """The session with this name, created if it does not exist."""
        session = self._sessions.setdefault(name, RolloutSession())
        self._sessions.move_to_end(name)
        while len(self._sessions) > self._most:
            self._drop()
        return session

    def known(self, name: str) -> RolloutSession | None:
        """The session with this name, if it has turns."""
        session = self._sessions.get(name)
        return session if session is not None and session.turns else None

    def add(self, name: str, turn: SampledTurn) -> None:
        session = self.use(name)
        session.add(turn)
        self._size += turn.size
        while self._size > self._tokens and self._sessions:
            self._drop()

    def _drop(self) -> None:
        _, session = self._sessions.popitem(last=False)
        self._size -= session.size
