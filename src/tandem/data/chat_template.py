"""Tokenises conversations with the model's own tokenizer and chat template, and marks the trained
tokens by the rules in docs/data.md.

Many texts are tokenised in one call. Each conversation is tokenised only once. The first trained
token is found by tokenising the text between the last special token and the trained text. The index
of the first trained token is exact, because tokenizers never merge across special tokens.
"""

import re
import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np

from tandem.data.dialects import REASONING
from tandem.data.encoder import Encoder
from tandem.data.examples import Message
from tandem.data.message_checks import INSTEAD, check_blank, check_calls
from tandem.data.packed_format import Int32
from tandem.data.packing import LinearSequence
from tandem.data.stopping import Stops
from tandem.errors import InvalidInput

_COMMENT, _GENERATION = (
    re.compile(r"\{#.*?#\}", re.DOTALL),
    re.compile(r"\{%-?\s*generation\s*-?%\}"),
)
_SHORT = 64  # characters

# transformers' imports and its tracking of {% generation %} blocks are not thread-safe.
_one_at_a_time = threading.Lock()


@lru_cache(maxsize=8)
def _has_marks(template: str) -> bool:
    return _GENERATION.search(_COMMENT.sub("", template)) is not None


@lru_cache(maxsize=2)
def load_tokenizer(path: str) -> Any:
    """transformers' tokenizer in a directory or at a hub name. The tokenizer is read once and needs
    no torch. Raises InvalidInput if the tokenizer can't be loaded."""
    try:
        with _one_at_a_time:
            # RL doesn't need transformers, and importing transformers takes seconds.
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise InvalidInput(
            f"can't load a tokenizer from {path}: {exc}", field="base_model"
        ) from exc


@dataclass(slots=True)
class SequenceText:
    """A sequence as text, before it is tokenised."""

    text: str
    # For each trained span: its characters [start, end), and its name in errors.
    spans: list[tuple[int, int, str]]
    marked: bool = False  # whether `{% generation %}` blocks of the chat template enclose `spans`
    lead: list[int] = field(default_factory=list)  # token ids before the text


@dataclass(frozen=True)
class Conversation:
    """A conversation. `messages`: the messages in the form that a chat template reads. `options`:
    further variables of the template."""

    template: str
    messages: list[dict[str, Any]]
    names: list[str]  # the messages' names in errors
    tools: Any
    options: Mapping[str, Any]


class Renderer:
    """A tokenizer, with values that are computed once from the tokenizer and reused."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.encoder = tokenizer, Encoder(tokenizer)
        self.stops = Stops(tokenizer)
        special = {
            number: token.content
            for number, token in tokenizer.added_tokens_decoder.items()
            if token.special
        }
        self.endings = tuple(special.values())
        # A tokenizer matches the leftmost special token. If several special tokens begin at the
        # same character, the tokenizer matches the longest of them.
        self.marks = re.compile(
            "|".join(re.escape(text) for text in sorted(self.endings, key=len, reverse=True))
            or "$^"
        )
        # The last entry of `special` stands for all token ids above the highest special token id.
        self.special = np.zeros(max(special, default=0) + 2, bool)
        self.special[list(special)] = True
        self.lead = [
            number for number in tokenizer("").input_ids if number == tokenizer.bos_token_id
        ]
        self.shows_tools = False  # whether the template is known to render tools

        # Tuples (template, role, whether the message is the first) for which the template renders a
        # message's content. Some templates render a role only in the first message.
        self._shown = set[tuple[str, str, bool]]()
        # (Template, whether the turn has calls) -> the text from the end of a turn up to the next
        # token at which vLLM stops.
        self._after = dict[tuple[str, bool], str]()
        # The tokens of short texts are cached, because most short texts are a few common words,
        # such as "assistant\n".
        self._encode_short = lru_cache(maxsize=4096)(self.encoder.encode)

    def text(self, prompt: str, completion: str, name: str) -> SequenceText:
        """A prompt and its completion, as vLLM's completions API would tokenise and end them. The
        text begins with BOS if the tokenizer adds BOS, and ends with EOS if the tokenizer has EOS.

        Args:
            name: the completion's name in errors.
        """
        eos = self.tokenizer.eos_token or ""
        whole = prompt + completion + ("" if completion.rstrip().endswith(eos) else eos)
        lead = (
            []
            if self.tokenizer.bos_token and whole.startswith(self.tokenizer.bos_token)
            else self.lead
        )
        return SequenceText(whole, [(len(prompt), len(whole), name)], lead=lead)

    def chat(
        self,
        messages: list[Message],
        names: list[str],
        trained: set[int],
        tools: Any,
        options: Mapping[str, Any],
    ) -> list[SequenceText]:
        """The texts of a conversation. Raises InvalidInput if the tokenizer has no chat template,
        or if the template refuses the conversation.

        Args:
            names: the messages' names in errors.
            trained: indices of the trained messages.
            options: further variables of the template.
        """
        if not self.tokenizer.chat_template:
            problem = f"the base model's tokenizer has no chat template; {INSTEAD}"
            raise InvalidInput(problem, field=names[0].rpartition(".")[0])
        check_blank(messages, names, trained)
        template = self.tokenizer.get_chat_template(tools=tools)
        plain = [message.for_template() for message in messages]
        chat = Conversation(template, plain, names, tools, options)
        if _has_marks(template):
            sources = [self._marked(chat, trained)]
        else:
            sources = self._turns(chat, trained)
        self._check_roles(chat, max(trained))
        return sources

    def _check_roles(self, chat: Conversation, last: int) -> None:
        """Refuses a message that the template leaves out because of the message's role. Some
        templates render a role only in the first message, or never."""
        plain, names = chat.messages[: last + 1], chat.names
        for i, message in enumerate(plain):
            seen = chat.template, message["role"], i == 0
            # Some templates leave out the content of messages with calls.
            if not message["content"] or "tool_calls" in message or seen in self._shown:
                continue
            other = [*plain[:i], message | {"content": message["content"] + "?"}, *plain[i + 1 :]]
            if self._apply(chat, plain, names[i]) == self._apply(chat, other, names[i]):
                problem = (
                    f"the chat template leaves out messages of the role {message['role']!r} at this"
                    " place"
                )
                raise InvalidInput(
                    f"{problem}; give another role, leave it out, or {INSTEAD}", field=names[i]
                )
            self._shown.add(seen)

    def _marked(self, chat: Conversation, trained: set[int]) -> SequenceText:
        """The conversation's text from a template that marks trained text by `{% generation %}`."""
        plain, last = chat.messages, chat.names[max(trained)]
        text, spans = self._apply(chat, plain, last, marks=True)
        spans = [span for span in spans if span[0] < span[1]]
        assistants = [i for i, message in enumerate(plain) if message["role"] == "assistant"]
        if trained != set(assistants):
            if len(spans) != len(assistants):
                problem = (
                    f"the chat template marks {len(spans)} parts of {len(assistants)} assistant"
                    " messages"
                )
                raise InvalidInput(
                    f"{problem}, so it is not clear which are this one's; {INSTEAD}", field=last
                )
            spans = [span for i, span in zip(assistants, spans, strict=True) if i in trained]
        check_calls(
            "".join(text[start:end] for start, end in spans), [plain[i] for i in trained], last
        )
        if not spans:
            raise InvalidInput(f"the chat template marks nothing as trained; {INSTEAD}", field=last)
        return SequenceText(text, [(start, end, last) for start, end in spans], marked=True)

    def _turns(self, chat: Conversation, trained: set[int]) -> list[SequenceText]:
        """The conversation's texts from a template without `{% generation %}`. Two turns share one
        text if the later turn's prompt begins with the earlier turn's text. If the template renders
        old messages differently (Qwen3 leaves out old reasoning), each turn has its own text, so
        the trained tokens are exact.
        """
        sources: list[SequenceText] = []
        plain = chat.messages
        for index in sorted(trained):
            name = chat.names[index]
            prompt, _ = self._apply(chat, plain[:index], name, generation=True)
            whole, _ = self._apply(chat, plain[: index + 1], name)
            completion = whole[len(prompt) :]
            if not (prompt and completion and whole.startswith(prompt)):
                problem = (
                    "renders the messages before this one differently once this message is there"
                )
                if whole.startswith(prompt):
                    problem = f"renders nothing {'for' if prompt else 'before'} this message"
                raise InvalidInput(f"the chat template {problem}; {INSTEAD}", field=name)
            check_calls(completion, [plain[index]], name)
            completion = self._ended(chat, plain[index], completion)
            if not sources or not prompt.startswith(sources[-1].text):
                sources.append(SequenceText("", []))
            sources[-1].text = prompt + completion
            sources[-1].spans.append((len(prompt), len(prompt + completion), name))
        return sources

    def _ended(self, chat: Conversation, message: dict[str, Any], completion: str) -> str:
        """The completion, cut after its stop token (a token at which vLLM stops). If the completion
        has no stop token, the next message's beginning is added, up to its first stop token
        (`_after_turn`)."""
        end = len(completion.rstrip())
        # `begin` becomes the length of the completion without the special tokens at its end, and
        # without the white space around these tokens.
        begin = end
        while before := next(
            (mark for mark in self.endings if completion.endswith(mark, 0, begin)), None
        ):
            begin = len(completion[: begin - len(before)].rstrip())
        stops = [
            mark.end()
            for mark in self.marks.finditer(completion, begin, end)
            if mark[0] in self.stops.texts
        ]
        # A stop token at the end of the message's own content does not end the turn.
        if message["content"].rstrip().endswith(self.endings):
            stops = [stop for stop in stops if stop == end]
        if stops:
            return completion[: stops[0]]
        key = chat.template, "tool_calls" in message
        if key not in self._after:
            self._after[key] = self._after_turn(chat, message)
        if self._after[key]:
            return completion + self._after[key]
        return completion[:end] if begin < end else completion

    def ends_answers(self) -> bool:
        """Whether the template writes a stop token after an answer that has no calls. A stop token
        is a token at which vLLM stops."""
        said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        messages = [Message.model_validate(one) for one in said]
        try:
            (source,) = self.chat(messages, ["", ""], {1}, None, {})
        except InvalidInput:  # the template needs more variables, such as tools
            return True
        start, end, _ = source.spans[-1]
        return any(
            mark[0] in self.stops.texts for mark in self.marks.finditer(source.text, start, end)
        )

    def _after_turn(self, chat: Conversation, message: dict[str, Any]) -> str:
        """The beginning of the message after a turn, up to a stop token such as GLM-4.5's
        `<|user|>`. Returns "" if that message does not begin with a stop token."""
        # Some templates leave out the reasoning of all answers except the last answer.
        last = {name: value for name, value in message.items() if name not in REASONING}
        following = {"role": "user", "content": "?"}
        if "tool_calls" in message:
            call = message["tool_calls"][-1]
            following = {"role": "tool", "content": "?", "name": call["function"]["name"]}
            following |= {"tool_call_id": call["id"]} if "id" in call else {}
        messages = [{"role": "user", "content": "?"}, last]
        try:
            before, _ = self._apply(chat, messages, "")
            whole, _ = self._apply(chat, [*messages, following], "")
        except InvalidInput:
            return ""
        more = whole[len(before) :] if whole.startswith(before) else ""
        mark = self.marks.search(more)
        found = mark and mark[0] in self.stops.texts and not more[: mark.start()].strip()
        return more[: mark.end()] if mark and found else ""

    def _apply(
        self,
        chat: Conversation,
        messages: list[Any],
        name: str,
        generation: bool = False,
        marks: bool = False,
    ) -> tuple[str, list[tuple[int, int]]]:
        """The rendered text, and the spans that the template's {% generation %} blocks enclose."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            with _one_at_a_time if marks else nullcontext():
                (text,), spans = render_jinja_template(
                    conversations=[messages],
                    tools=chat.tools,
                    chat_template=chat.template,
                    add_generation_prompt=generation,
                    return_assistant_tokens_mask=marks,
                    **(self.tokenizer.special_tokens_map | dict(chat.options)),
                )
        except Exception as exc:  # a template is a program and may raise anything
            raise InvalidInput(
                f"the chat template refuses the conversation: {exc}; {INSTEAD}", field=name
            ) from exc
        return text, spans[0] if marks else []

    def finish(self, source: SequenceText, ids: Int32) -> list[LinearSequence]:
        """The sequences of a text, made from its tokens `ids`, int32 [tokens]."""
        at = np.flatnonzero(self.special[np.minimum(ids, len(self.special) - 1)])
        spans = [match.span() for match in self.marks.finditer(source.text)]
        ends = [end for _, end in spans] if len(spans) == len(at) else []

        def index(position: int) -> int | None:
            """The index of the token that begins at character `position`. Returns None if the text
            before `position`, tokenised alone, gives other tokens."""
            if position == len(source.text):
                return len(ids)
            before = bisect_right(ends, position) - 1
            first, start = (int(at[before]), spans[before][0]) if before >= 0 else (0, 0)
            encode = self._encode_short if position - start <= _SHORT else self.encoder.encode
            tail = encode(source.text[start:position])
            return (
                first + len(tail) if np.array_equal(ids[first : first + len(tail)], tail) else None
            )

        trained: list[int] = []
        for start, end in ((index(start), index(end)) for start, end, _ in source.spans):
            if start is None or end is None:
                return self._apart(source)
            trained.extend(range(start, end))
        return [_sequence(source, ids, trained, source.spans[-1][2])]

    def _apart(self, source: SequenceText) -> list[LinearSequence]:
        """The sequences of a text in which a token crosses the border of a trained span. Each
        trained span is tokenised separately from its prompt, because a sampler gets the tokens of
        the prompt alone."""
        found = []
        for start, end, name in source.spans:
            prompt, whole = (
                self.encoder.encode(source.text[:start]),
                self.encoder.encode(source.text[:end]),
            )
            if not np.array_equal(whole[: len(prompt)], prompt):
                completion = source.text[start:end]
                alone = self.encoder.encode(completion)
                # Some tokenizers prepend a space to each text, and drop the space again when they
                # decode the text alone.
                decode = partial(self.tokenizer.decode, clean_up_tokenization_spaces=False)
                if source.marked or decode([*prompt, *alone]) != decode(prompt) + completion:
                    problem = (
                        "a token spans the border between context and trained text, so the mask is"
                        " ambiguous"
                    )
                    raise InvalidInput(f"{problem}; {INSTEAD}", field=name)
                whole = np.concatenate([prompt, alone])
            found.append(_sequence(source, whole, range(len(prompt), len(whole)), name))
        return found


def _sequence(
    source: SequenceText, ids: Int32, trained: Sequence[int], name: str
) -> LinearSequence:
    where = np.array(trained, np.int32) + len(source.lead)
    where = where[where > 0]
    if not len(where):
        raise InvalidInput(
            "nothing predicts the first token, and there is no other; leave it out", field=name
        )
    return LinearSequence.of(np.concatenate([np.array(source.lead, np.int32), ids]), where)


@lru_cache(maxsize=2)
def renderer(tokenizer: Any) -> Renderer:
    """The renderer of a tokenizer. The renderers of the last two tokenizers are cached."""
    return Renderer(tokenizer)
