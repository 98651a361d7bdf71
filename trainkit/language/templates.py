"""Turn conversations into tokens by a chat template: which are learned, and what ends an answer."""

import json
import re
from collections.abc import Sequence
from datetime import date, datetime, time
from itertools import groupby
from typing import Any, NamedTuple

import torch

from trainkit.errors import UsageError, as_usage_error
from trainkit.language.formats import EMPTY, Conversation, Turn, with_system
from trainkit.store.records import read_run_json
from trainkit.text import first_sentence

WEIGHTS = ("weight", "loss_weight", "train")  # of a turn: OpenAI's, LLaMA-Factory's and Axolotl's
TEXTS = ("content", "reasoning_content")  # of a turn
# Keys of a turn that are read although a chat template does not name them.
KEYS = ("role", "content", "reasoning_content", *WEIGHTS)
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
    """The samples of a conversation, and what the plan says about them.

    There is one sample, or one for each answer if the template changes earlier turns when others
    follow them, as some do with the text between <think> and </think>.

    Attributes:
        lost: the first part of the conversation that the template leaves out or changes, or "".
        untrained: what the template ends a prompt with when it asks for an answer, and does not
            write before the answer of a conversation: the model is prompted with text it never saw.
        ask: the tokens by which the model is asked for the first answer.
        inside: the first special token that stands in one of its texts, where it is text, or "".
        written: whether its prompt is already written as the chat template does.
    """

    samples: list[Sample]
    lost: str = ""
    untrained: str = ""
    ask: Sequence[int] = ()
    inside: str = ""
    written: bool = False


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
        tokens = tokenizer("a").input_ids
        self.adds_bos = tokens[:1] == [tokenizer.bos_token_id]
        self.adds_eos = tokens[-1:] == [tokenizer.eos_token_id]
        self.end = tokenizer.eos_token_id
        self.template_adds_bos = self.adds_bos
        self.after = ""
        self.header = ""
        self.asks: set[str] = set()
        # The longest first, because one may be a part of another.
        special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        special += tokenizer.all_special_tokens
        names = sorted({*special}, key=lambda name: (-len(name), name))
        self.placeholders = {name: chr(PLACEHOLDER + n) for n, name in enumerate(names)}
        self.special = re.compile("|".join(map(re.escape, names)) or "(?!)")
        if tokenizer.chat_template:
            self.end, self.template_adds_bos = self._read_template()

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

    def _read_template(self) -> tuple[int | None, bool]:
        """Return the token that ends an answer, and whether a conversation begins with BOS."""
        tokenizer = self.tokenizer
        chat = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        where = f"the chat template of {tokenizer.name_or_path}"
        remedy = "give --base a chat_template.jinja for texts"
        try:
            text = self.render(chat)
        except Exception as error:
            reason = first_sentence(error)
            raise UsageError(f"{where} cannot write a text, {reason}: {remedy}") from error
        before, answer, self.after = text.rpartition("answer")
        if not answer:
            raise UsageError(f"{where} leaves out a text: {remedy}")
        self._read_marks(before)
        special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        tokens = tokenizer(self.after, add_special_tokens=False).input_ids
        end = next((token for token in tokens if token in special), None)
        return end, bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)

    def _read_marks(self, before: str) -> None:
        """Learn what stands before a question, from its last special token, and after it.

        before: all that the template writes before an answer.
        """
        start, _, between = before.rpartition("question")
        asked = self.render([{"role": "user", "content": "question"}], ask=True)
        self.asks = {between.strip(), asked.rpartition("question")[2].strip()} - {""}
        bos = self.tokenizer.bos_token or ""
        start = start.removeprefix(bos)
        last_special = max(start.rfind(name) for name in (*self.placeholders, start))
        self.header = start[last_special:].strip()

    def is_written(self, text: str) -> bool:
        """Return whether a prompt is written as the template does, up to where an answer begins."""
        ends = any(text.rstrip().endswith(ask) for ask in self.asks)
        return ends and bool(self.header) and self.header in text

    def hide(self, text: str) -> str:
        """Put placeholders for special tokens into a text, which tokenize turns into text again."""
        if not self.tokenizer.chat_template:
            return text
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
        """Return the tokens of a text that an answer follows: they do not end with EOS."""
        tokens = self.tokenizer(text).input_ids
        eos = self.tokenizer.eos_token_id
        return tokens[:-1] if self.adds_eos and len(tokens) > 1 and tokens[-1] == eos else tokens

    def without_marks(self, conversation: Conversation) -> Conversation:
        """Leave out BOS and the end of an answer where a text has them and they are added to it."""
        tokenizer = self.tokenizer
        bos = self.tokenizer.bos_token
        if conversation.text is not None:
            text = _strip(conversation.text, self.adds_bos and bos, tokenizer.eos_token)
            return conversation._replace(text=text)
        begin = self.template_adds_bos and bos
        end = self.end is not None and tokenizer.convert_ids_to_tokens(self.end)
        turns = [
            turn | {"content": _strip(turn["content"], begin, end)} for turn in conversation.turns
        ]
        return conversation._replace(turns=turns)

    def ask(self, prompt: str, system: str | None = None) -> list[int]:
        """Return the tokens up to where the answer to a prompt begins."""
        if self.is_written(prompt):
            return self._tokenize_written(prompt)
        user = {"role": "user", "content": self.hide(prompt)}
        if self.tokenizer.chat_template:
            turns = with_system(Conversation([user]), system).turns
            return self.tokenize(self.render(turns, ask=True))
        # A token is predicted from those before it, so the first one of an answer needs one too.
        eos = self.tokenizer.eos_token_id
        bos = self.tokenizer.bos_token_id
        start = bos if eos is None else eos
        return self.begin(prompt) or ([] if start is None else [start])

    def encode(self, conversation: Conversation, size: int) -> Encoded:
        """Return samples in which the assistant's words are learned.

        Answers that begin after `size` tokens may be left out. Raises ValueError if answers cannot
        be told apart, or for calls of tools that the template cannot write.
        """
        turns = conversation.turns
        end = [self.tokenizer.eos_token_id]
        end = [] if end == [None] else end
        if conversation.text is not None:
            tokens = self.begin(conversation.text) + end
            return Encoded([_sample(tokens, [])], ask=tokens[:1])
        if not self.tokenizer.chat_template:
            if [turn["role"] for turn in turns] != ["user", "assistant"]:
                raise ValueError("it has turns, and the tokenizer of --base has no chat template")
            ask = self.ask(turns[0]["content"])
            answer = self.tokenizer(turns[1]["content"], add_special_tokens=False).input_ids + end
            return Encoded([_sample(ask + answer, [(len(ask), len(ask + answer))])], ask=ask)
        *_, asked, answered = [{"role": ""}, {"role": ""}, *turns]
        is_asked = (asked["role"], answered["role"]) == ("user", "assistant")
        if is_asked and self.is_written(asked["content"]):
            return self._encode_written(conversation)
        hidden = [turn | {n: self.hide(turn[n]) for n in TEXTS if n in turn} for turn in turns]
        encoded = self._encode_turns(
            self._with_written_calls(conversation._replace(turns=hidden)), size
        )
        pairs = zip(turns, hidden, strict=True)
        texts = (turn[name] for turn, other in pairs for name in other if turn[name] != other[name])
        inside = [found[0] for found in map(self.special.search, texts) if found]
        return encoded._replace(inside=inside[0] if inside else "")

    def _tokenize_written(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt that is written as the template does."""
        bos = self.tokenizer.bos_token if self.template_adds_bos else ""
        return self.tokenizer(
            f"{bos}{prompt.removeprefix(bos)}", add_special_tokens=False
        ).input_ids

    def _encode_written(self, conversation: Conversation) -> Encoded:
        """Encode an answer to a prompt that is written as the template does.

        Raises ValueError if there is more than these two.
        """
        turns = conversation.turns
        if [turn["role"] for turn in turns] != ["user", "assistant"] or conversation.tools:
            raise ValueError(
                "its prompt is already written in the chat template, which leaves no room for a "
                "system turn, tools or other turns: leave them out"
            )
        ask = self._tokenize_written(turns[0]["content"])
        text = turns[1]["content"]
        answer = self.tokenize(self.hide(text) + self.after)
        sample = _sample(ask + answer, [(len(ask), len(ask + answer))])
        found = self.special.search(text)
        return Encoded([sample], ask=ask, inside=found[0] if found else "", written=True)

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
        lost, untrained = (
            next((getattr(answer, name) for answer in answers if getattr(answer, name)), "")
            for name in ("lost", "untrained")
        )
        return Encoded(samples, lost, untrained, answers[0].ask)

    def _encode_turn(self, conversation: Conversation, number: int) -> "_Answer":
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
        # Templates may leave out what was thought earlier, and write what tools return in other
        # ways.
        parts = [part["content"] for part in before if part["role"] not in ("assistant", "tool")]
        parts += [turn["content"], turn.get("reasoning_content", ""), *tool_names]
        lost = _missing(text, *parts) or _missing(text[len(same) :], *call_names)
        span = (num_equal(asked, tokens), len(tokens))
        return _Answer(tokens, span, lost, ask[len(same) :].strip() and ask[len(same) :], asked)

    def _with_written_calls(self, conversation: Conversation) -> Conversation:
        """Return the conversation with arguments of calls as its template takes them.

        Some templates take values, others a text that is JSON. Raises ValueError for arguments that
        are not JSON, if the template would write them in quotes.
        """
        turns = conversation.turns
        arguments = [
            call["function"]["arguments"]
            for turn in turns
            for call in turn.get("tool_calls", ())
            if "arguments" in call["function"]
        ]
        if not arguments:
            return conversation
        as_texts = conversation._replace(turns=[_with_texts(turn) for turn in turns])
        texts = [value if isinstance(value, str) else _to_json(value) for value in arguments]
        problem: Exception | None = None
        try:
            text = self.render(turns, conversation.tools)
            as_python = [repr(value) for value in arguments if not isinstance(value, str)]
            if len(as_python) == len(texts) and not _any_in(set(as_python) - set(texts), text):
                return conversation
        except Exception as error:  # it takes texts, or refuses the conversation in any case
            problem = error
        try:
            text = self.render(as_texts.turns, conversation.tools)
        except Exception as error:
            raise problem or error from error
        if unread := [value for value in arguments if isinstance(value, str)]:
            quoted = [value for value in unread if _any_in([_to_json(value)], text)]
            if quoted:
                raise ValueError(
                    f"the arguments of a call of a tool are not JSON, {quoted[0][:60]!r}, and the "
                    "chat template does not write other arguments as they are"
                )
        return as_texts


class _Answer(NamedTuple):
    tokens: list[int]  # of the conversation up to its end
    span: tuple[int, int]  # which of them are the answer
    lost: str
    untrained: str
    ask: list[int]


def first_day(config: Any) -> date:
    """Return --day, or else the day on which this run was started first; set --day to it.

    run.json keeps it from the start, before there is a checkpoint.
    """
    day = config.day
    if day is None and config.resume and (config.run_dir / "run.json").exists():
        day = read_run_json(config.run_dir)["arguments"].get("day")
    config.set_unset({"day": day or date.today().isoformat()})
    with as_usage_error(f"--day {config.day} is not like 2026-01-31"):
        return date.fromisoformat(config.day)


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
    return {key for key in keys - {*KEYS, "tool_calls"} if key not in (template or "")}


def _with_texts(turn: Turn) -> Turn:
    """Return a turn in which the arguments of its calls are texts."""
    calls = []
    for call in turn.get("tool_calls", ()):
        function = dict(call["function"])
        if not isinstance(function.get("arguments", ""), str):
            function["arguments"] = _to_json(function["arguments"])
        calls.append(call | {"function": function})
    return turn | {"tool_calls": calls} if calls else turn


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _any_in(parts: Any, text: str) -> bool:
    return any(part in text for part in parts)


def _strip(text: str, begin: Any, end: Any) -> str:
    while begin and text.startswith(begin):
        text = text.removeprefix(begin)
    while end and text.rstrip().endswith(end):
        text = text.rstrip().removesuffix(end)
    return text


def num_equal(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many items at the start of both are the same."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(first), len(second)))


def _missing(text: str, *parts: str) -> str:
    """Return the first part that the text lacks, or "". Templates strip white space: ignored."""
    text = "".join(text.split())
    return next((part for part in parts if "".join(part.split()) not in text), "")


def _sample(tokens: list[int], spans: list[tuple[int, int]]) -> Sample:
    """Make a sample in which the spans are learned, or all of it if there are no spans.

    The first token is never learned, because there is no token before it.
    """
    learned = torch.full((len(tokens),), not spans)
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
