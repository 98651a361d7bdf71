"""Turn conversations into tokens by a chat template: which are learned, and what ends an answer."""

import re
from collections.abc import Sequence
from datetime import date, datetime, time
from itertools import groupby
from typing import Any, NamedTuple

import torch

from trainkit.language.formats import WEIGHTS, Conversation, Turn

THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # of a turn, as templates call them
DATE_MARKS = (*"aAbBcdDeFhHIjmMpSTuUVwxXyY", "-d", "-m")  # of strftime
MAX_CHARACTERS = 400  # of a sample that is shown


class Sample(NamedTuple):
    """A conversation, or a part of it."""

    tokens: torch.Tensor  # int64 (length,)
    learned: torch.Tensor  # which of them are, bool


class Chat:
    """A tokenizer and its chat template, which takes every day for `today`.

    Attributes:
        end: the token that ends an answer, by the template if there is one; None: no token does.
        day: the date, if the template can write it, else "".
        unwritten: what it asks with and does not write before an answer, in what was encoded.
    """

    def __init__(self, tokenizer: Any, today: date | None = None):
        self.tokenizer = tokenizer
        self.today = today or date.today()
        self.day = self.unwritten = ""
        self.end = tokenizer.eos_token_id
        names = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        # The longest first, because one may be a part of another.
        patterns = map(re.escape, sorted(names, key=len, reverse=True))
        self.special = re.compile("|".join(patterns) or "(?!)")
        if tokenizer.chat_template:
            chat = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "answer"}]
            after = self.render(chat).rpartition("answer")[2]
            tokens = tokenizer(after, add_special_tokens=False).input_ids
            self.end = next((x for x in tokens if x in tokenizer.added_tokens_decoder), None)

    def render(self, turns: Sequence[Turn], tools: Sequence[Any] = (), ask: bool = False) -> str:
        """Return turns as text; with `ask` up to where the next answer begins."""
        template = self.tokenizer.get_chat_template(tools=tools or None)
        if "strftime_now" in template:
            self.day = self.today.isoformat()
            template = _fix_date(self.today) + template
        options = {"tools": tools or None, "chat_template": template, "add_generation_prompt": ask}
        return self.tokenizer.apply_chat_template(turns, tokenize=False, **options)

    def hide(self, value: Any) -> Any:
        """Mark the special tokens in texts, so that `tokenize` takes them for text."""
        from transformers.utils.chat_template_utils import mark_control_tokens

        return mark_control_tokens(value, self.special)

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of what was rendered of turns whose special tokens are hidden."""
        from transformers.utils.chat_template_utils import encode_marked_chat

        return encode_marked_chat(self.tokenizer, text)

    def ask(self, prompt: str, system: str | None = None) -> list[int]:
        """Return the tokens up to where the answer to a prompt begins."""
        if self.tokenizer.chat_template:
            turns = Conversation([{"role": "user", "content": prompt}]).with_system(system).turns
            return self.tokenize(self.render(self.hide(turns), ask=True))
        return self._ask_plainly(prompt)

    def _ask_plainly(self, prompt: str) -> list[int]:
        # A token is predicted from those before it, so the first one of an answer needs one too.
        start = [self.tokenizer.eos_token_id, self.tokenizer.bos_token_id]
        return self._begin(prompt) or [token for token in start if token is not None][:1]

    def _begin(self, text: str) -> list[int]:
        """Return the tokens of a text that more may follow: BOS once, and no EOS at the end."""
        tokens = self.tokenizer(text).input_ids
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        tokens = tokens[1:] if tokens[:2] == [bos, bos] else tokens
        return tokens[:-1] if len(tokens) > 1 and tokens[-1] == eos else tokens

    def encode(self, conversation: Conversation, size: int) -> list[Sample]:
        """Return samples in which the assistant's words are learned.

        There is one sample, or one for each answer if the template changes earlier turns when
        others follow them, as some do with the text between <think> and </think>. Answers that
        begin after `size` tokens may be left out. Raises ValueError if something would be lost.
        """
        if conversation.text is not None or not self.tokenizer.chat_template:
            return [self._encode_plainly(conversation)]
        turns = [self._prepare(turn) for turn in conversation.turns]
        answers: list[tuple[list[int], tuple[int, int]]] = []  # tokens up to its end, and its own
        for number in range(conversation.num_prompt, len(turns)):
            is_reached = not answers or len(answers[-1][0]) <= size
            if _is_learned(turns[number]) and is_reached:
                answers.append(self._encode_answer(turns[: number + 1], conversation.tools))
        whole = answers[-1][0] if answers else []
        if answers and all(whole[: len(tokens)] == tokens for tokens, _ in answers):
            return [_sample(whole, [span for _, span in answers])]
        return [_sample(tokens, [span]) for tokens, span in answers]

    def _encode_plainly(self, conversation: Conversation) -> Sample:
        """Return the sample of a text, or without a chat template of a prompt and its answer."""
        turns, text, num = conversation.turns, conversation.text, conversation.num_prompt
        eos = self.tokenizer.eos_token_id
        if text is not None:
            prompt, said = text[:num], text[num:]
        elif [turn["role"] for turn in turns] == ["user", "assistant"] and not _others(turns[1]):
            prompt, said = (turn["content"] for turn in turns)
        else:
            raise ValueError(
                "it has turns, calls or thoughts, and the tokenizer of --base has no chat template"
            )
        if text is not None and not num:
            ask, answer = [], self._begin(said)
        else:
            ask = self._ask_plainly(prompt)
            answer = self.tokenizer(said, add_special_tokens=False).input_ids
        if eos is not None and answer[-1:] != [eos]:
            answer = [*answer, eos]
        return _sample(ask + answer, [(len(ask), len(ask + answer))])

    def _prepare(self, turn: Turn) -> Turn:
        """Return a turn whose special tokens are hidden, without the one that will end it."""
        content = turn["content"].rstrip()
        end = self.end is not None and self.tokenizer.convert_ids_to_tokens(self.end)
        if turn["role"] == "assistant" and end and content.endswith(end):
            turn = turn | {"content": content.removesuffix(end)}
        return turn | {n: self.hide(turn[n]) for n in ("content", *THOUGHTS) if n in turn}

    def _encode_answer(
        self, turns: list[Turn], tools: Sequence[Any]
    ) -> tuple[list[int], tuple[int, int]]:
        """Return the tokens of turns, and which of them are the last turn, an answer."""
        *before, turn = turns
        text = self.render(turns, tools)
        ask = text[: max(0, text.find(turn["content"]))]
        if before:
            ask = self.render(before, tools, ask=True)
        # Templates may leave out earlier thoughts, and write what tools return in other ways.
        parts = [part["content"] for part in before if part["role"] not in ("assistant", "tool")]
        calls = [call for part in turns for call in part.get("tool_calls", ())]
        parts += [turn["content"], *(x["function"].get("name", "") for x in (*tools, *calls))]
        unwritten = (
            name
            for name, other in _others(turn).items()
            if self.render([*before, turn | {name: other}], tools) == text
        )
        if lost := _missing(text, *parts) or next(unwritten, ""):
            raise ValueError(
                f"the chat template leaves out or changes {lost[:30]!r}: leave that out of the "
                "row, or give a --base whose template writes it"
            )
        self.unwritten = ask[num_equal(ask, text) :].strip()[-30:] or self.unwritten
        tokens = self.tokenize(text)
        return tokens, (num_equal(self.tokenize(ask), tokens), len(tokens))


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


def _is_learned(turn: Turn) -> bool:
    """Return whether an assistant says this, and its weight, by which sets mark turns, is not 0."""
    return turn["role"] == "assistant" and all(turn.get(name, 1) != 0 for name in WEIGHTS)


def num_equal(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many items at the start of both are the same."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(first), len(second)))


def _others(turn: Turn) -> dict[str, Any]:
    """Return other calls and other thoughts in place of those of a turn."""
    others: dict[str, Any] = {name: f"{turn[name]}_" for name in THOUGHTS if turn.get(name)}
    if calls := turn.get("tool_calls"):
        changed = {"name": "_", "arguments": {}}
        others["tool_calls"] = [call | {"function": call["function"] | changed} for call in calls]
    return others


def _missing(text: str, *parts: str) -> str:
    """Return the first part that the text lacks, or "". Templates strip white space: ignored."""
    text = "".join(text.split())
    return next((part for part in parts if "".join(part.split()) not in text), "")


def _sample(tokens: list[int], spans: list[tuple[int, int]]) -> Sample:
    """Make a sample in which the spans are learned, but never the first token: it follows none."""
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
    return shown if len(shown) <= MAX_CHARACTERS else f"{shown[:MAX_CHARACTERS]} ..."
