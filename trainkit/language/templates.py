"""Turn conversations into tokens by a chat template: which are learned, and what ends an answer."""

import json
import re
from collections.abc import Sequence
from datetime import date, datetime, time
from itertools import groupby
from typing import Any, NamedTuple

import torch

from trainkit.errors import UsageError
from trainkit.language.formats import EMPTY, WEIGHTS, Conversation, Turn, with_system
from trainkit.text import first_sentence

TEXTS = ("content", "reasoning_content")  # of a turn
# Keys of a turn that are read although a chat template does not name them.
KEYS = {"role", "content", "reasoning_content", "tool_calls", *WEIGHTS}
# The first of the characters of private use that stand for special tokens in a text.
PLACEHOLDER = 0xF0000
PLACEHOLDERS = re.compile(f"([{chr(PLACEHOLDER)}-{chr(PLACEHOLDER + 0xFFFF)}]+)")
DATE_MARKS = (*"aAbBcdDeFhHIjmMpSTuUVwxXyY", "-d", "-m")  # of strftime
MAX_CHARACTERS = 400  # of a sample that is shown


class Sample(NamedTuple):
    """A conversation, or a part of it."""

    tokens: torch.Tensor  # int64 (length,)
    learned: torch.Tensor  # which of them are, bool


class Encoded(NamedTuple):
    """The samples of a conversation, and the tokens that ask for its first answer.

    There is one sample, or one for each answer if the template changes earlier turns when others
    follow them, as some do with the text between <think> and </think>.
    """

    samples: list[Sample]
    ask: Sequence[int] = ()
    unwritten: str = ""  # what the template asks with and does not write before an answer


class _Answer(NamedTuple):
    tokens: list[int]  # of the conversation up to its end
    span: tuple[int, int]  # which of them are the answer
    ask: list[int]
    unwritten: str


class Chat:
    """A tokenizer and its chat template, which takes every day for `today`.

    Raises UsageError if the template leaves out plain text.

    Attributes:
        end: the token that ends an answer, by the template if there is one; None: no token does.
        day: the date, if the template can write it, else "".
    """

    def __init__(self, tokenizer: Any, today: date | None = None):
        self.tokenizer = tokenizer
        self.today = today or date.today()
        self.day = ""
        self.fixed_date = _fix_date(self.today)
        self.end = tokenizer.eos_token_id
        special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        special += tokenizer.all_special_tokens
        # The longest first, because one may be a part of another.
        names = sorted({*special}, key=lambda name: (-len(name), name))
        self.placeholders = {name: chr(PLACEHOLDER + n) for n, name in enumerate(names)}
        self.special = re.compile("|".join(map(re.escape, names)) or "(?!)")
        if tokenizer.chat_template:
            self._read_template()

    def _read_template(self) -> None:
        """Learn what ends an answer, and what stands before and after a question."""
        chat = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        where = f"the chat template of {self.tokenizer.name_or_path}"
        remedy = "give --base a chat_template.jinja for texts"
        try:
            text = self.render(chat)
            asked = self.render(chat[:1], ask=True)
        except Exception as error:
            reason = first_sentence(error)
            raise UsageError(f"{where} cannot write a text, {reason}: {remedy}") from error
        _, answer, after = text.rpartition("answer")
        if not answer:
            raise UsageError(f"{where} leaves out a text: {remedy}")
        special = {*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder}
        tokens = self.tokenizer(after, add_special_tokens=False).input_ids
        self.end = next((token for token in tokens if token in special), None)
        ends = asked, text.rpartition("answer")[0]
        behind = (each.rpartition("question")[2].strip() for each in ends)
        self.behind = tuple(filter(None, behind))

    def render(self, turns: Sequence[Turn], tools: Sequence[Any] = (), ask: bool = False) -> str:
        """Return turns as text; with `ask` up to where the next answer begins."""
        template = self.tokenizer.get_chat_template(tools=tools or None)
        if "strftime_now" in template:
            self.day = self.today.isoformat()
            template = self.fixed_date + template
        return self.tokenizer.apply_chat_template(
            turns,
            tools=tools or None,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=ask,
        )

    def hide(self, text: str) -> str:
        """Put placeholders for special tokens into a text, which tokenize turns into text again."""
        return self.special.sub(lambda found: self.placeholders[found[0]], text)

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text as it is: placeholders in it are not special tokens."""
        names = [*self.placeholders]
        tokens: list[int] = []
        for number, part in enumerate(PLACEHOLDERS.split(text)):
            is_hidden = number % 2 == 1  # what split found
            if is_hidden:
                part = "".join(names[ord(character) - PLACEHOLDER] for character in part)
            options = {"add_special_tokens": False, "split_special_tokens": is_hidden}
            tokens += self.tokenizer(part, **options).input_ids if part else []
        return tokens

    def begin(self, text: str) -> list[int]:
        """Return the tokens of a text that more may follow: BOS once, and no EOS at the end."""
        tokens = self.tokenizer(text).input_ids
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if tokens[:2] == [bos, bos]:
            tokens = tokens[1:]
        return tokens[:-1] if len(tokens) > 1 and tokens[-1] == eos else tokens

    def ask(self, prompt: str, system: str | None = None) -> list[int]:
        """Return the tokens up to where the answer to a prompt begins."""
        if self.tokenizer.chat_template:
            user = {"role": "user", "content": self.hide(prompt)}
            turns = with_system(Conversation([user]), system).turns
            return self.tokenize(self.render(turns, ask=True))
        # A token is predicted from those before it, so the first one of an answer needs one too.
        start = [self.tokenizer.eos_token_id, self.tokenizer.bos_token_id]
        return self.begin(prompt) or [token for token in start if token is not None][:1]

    def encode(self, conversation: Conversation, size: int) -> Encoded:
        """Return samples in which the assistant's words are learned.

        Answers that begin after `size` tokens may be left out. Raises ValueError if answers cannot
        be told apart, or for a prompt that is already written in the chat template.
        """
        turns = conversation.turns
        eos = self.tokenizer.eos_token_id
        end = [] if eos is None else [eos]
        if conversation.text is not None:
            tokens = self.begin(conversation.text) + end
            return Encoded([_sample(tokens, [(0, len(tokens))])], tokens[:1])
        if not self.tokenizer.chat_template:
            if [turn["role"] for turn in turns] != ["user", "assistant"]:
                raise ValueError("it has turns, and the tokenizer of --base has no chat template")
            ask = self.ask(turns[0]["content"])
            answer = self.tokenizer(turns[1]["content"], add_special_tokens=False).input_ids
            answer += end if answer[-1:] != end else []
            return Encoded([_sample(ask + answer, [(len(ask), len(ask + answer))])], ask)
        hidden = [self._prepare(turn) for turn in turns]
        return self._encode_turns(conversation._replace(turns=hidden), size)

    def _prepare(self, turn: Turn) -> Turn:
        """Return a turn whose special tokens are hidden, without the one that will end it."""
        content = turn["content"].rstrip()
        if turn["role"] == "user" and content.endswith(self.behind):
            raise ValueError(
                "its prompt is already written in the chat template, up to where an answer begins: "
                "give its words alone"
            )
        end = self.end is not None and self.tokenizer.convert_ids_to_tokens(self.end)
        if turn["role"] == "assistant" and end and content.endswith(end):
            turn = turn | {"content": content.removesuffix(end)}
        return turn | {name: self.hide(turn[name]) for name in TEXTS if name in turn}

    def _encode_turns(self, conversation: Conversation, size: int) -> Encoded:
        answers: list[_Answer] = []
        for number in range(conversation.num_prompt, len(conversation.turns)):
            is_reached = not (answers and len(answers[-1].tokens) > size)
            if is_learned(conversation.turns[number]) and is_reached:
                answers.append(self._encode_turn(conversation, number))
        if not answers:
            return Encoded([])
        whole = answers[-1].tokens
        spans = [answer.span for answer in answers]
        if all(whole[: len(answer.tokens)] == answer.tokens for answer in answers):
            samples = [_sample(whole, spans)]
        else:
            samples = [_sample(answer.tokens, [answer.span]) for answer in answers]
        unwritten = next((answer.unwritten for answer in answers if answer.unwritten), "")
        return Encoded(samples, answers[0].ask, unwritten)

    def _encode_turn(self, conversation: Conversation, number: int) -> _Answer:
        turns = conversation.turns
        tools = conversation.tools
        before = turns[:number]
        turn = turns[number]
        text = self.render([*before, turn], tools)
        if before:
            ask = self.render(before, tools, ask=True)
        else:  # what two answers have in common before they begin
            pair = ([{"role": turn["role"], "content": word}] for word in "xy")
            one, other = (self.render(answer, tools) for answer in pair)
            ask = one[: num_equal(one, other)]
        same = text[: num_equal(ask, text)]
        prompt = before[-1]["content"] if before else ""
        # Some templates write the end of a prompt differently if an answer follows it.
        if not _missing(ask, prompt) and _missing(same, prompt):
            raise ValueError("the chat template changes the turn before an answer with the answer")
        asked, tokens = self.tokenize(ask), self.tokenize(text)
        tool_names, call_names = (
            [item["function"].get("name", "") for item in items]
            for items in (tools, turn.get("tool_calls", ()))
        )
        calls = (call for part in (*before, turn) for call in part.get("tool_calls", ()))
        for arguments in (call["function"].get("arguments", {}) for call in calls):
            if repr(arguments) in text and repr(arguments) != json.dumps(arguments):
                raise ValueError(
                    "the chat template writes the arguments of a call as Python does, "
                    f"{arguments!r:.60}: let it write them by tojson"
                )
        # Templates may leave out what was thought earlier, and write what tools return in other
        # ways.
        parts = [part["content"] for part in before if part["role"] not in ("assistant", "tool")]
        parts += [turn["content"], turn.get("reasoning_content", ""), *tool_names]
        if lost := _missing(text, *parts) or _missing(text[len(same) :], *call_names):
            raise ValueError(f"the chat template leaves out or changes {lost[:30]!r}")
        unwritten = ask[len(same) :].strip() and ask[len(same) :][-30:]
        return _Answer(tokens, (num_equal(asked, tokens), len(tokens)), asked, unwritten)


def _fix_date(day: date) -> str:
    """Return the start of a chat template that lets strftime_now write this day, at midnight.

    transformers passes templates no functions, so this is a macro.
    """
    parts = {"%" + mark: datetime.combine(day, time()).strftime("%" + mark) for mark in DATE_MARKS}
    filters = "".join(f"|replace({mark!r}, {value!r})" for mark, value in parts.items())
    # After a block jinja would leave out a newline with which the template begins.
    return (
        f"{{% macro strftime_now(pattern) %}}{{{{ pattern{filters} }}}}{{% endmacro %}}{{{{ '' }}}}"
    )


def is_learned(turn: Turn) -> bool:
    """Return whether an assistant says this, and its weight, by which sets mark turns, is not 0."""
    return turn["role"] == "assistant" and all(turn.get(name, 1) != 0 for name in WEIGHTS)


def find_unread(turns: Sequence[Turn], template: str | None) -> set[str]:
    """Return the keys of turns that nothing reads: neither we nor the chat template."""
    keys = {str(key) for turn in turns for key, value in turn.items() if value not in EMPTY}
    return {key for key in keys - KEYS if key not in (template or "")}


def num_equal(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many items at the start of both are the same."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(first), len(second)))


def _missing(text: str, *parts: str) -> str:
    """Return the first part that the text lacks, or "". Templates strip white space: ignored."""
    text = "".join(text.split())
    return next((part for part in parts if "".join(part.split()) not in text), "")


def _sample(tokens: list[int], spans: list[tuple[int, int]]) -> Sample:
    """Make a sample in which the spans are learned.

    The first token is never learned, because there is no token before it.
    """
    learned = torch.zeros(len(tokens), dtype=torch.bool)
    for start, stop in spans:
        learned[start:stop] = True
    learned[:1] = False
    return Sample(torch.tensor(tokens, dtype=torch.int64), learned)


def show_sample(tokenizer: Any, sample: Sample) -> str:
    """Return a sample as one line of text, with what is learned in double brackets."""
    shown = ""
    for learned, pairs in groupby(zip(*(x.tolist() for x in sample), strict=True), lambda x: x[1]):
        text = repr(tokenizer.decode([token for token, _ in pairs]))[1:-1]
        if len(text) > 150:
            text = f"{text[:80]} ... {text[-60:]}"
        shown += f"[[{text}]]" if learned else text
    if len(shown) > MAX_CHARACTERS:
        return f"{shown[:MAX_CHARACTERS]} ..."
    return shown
