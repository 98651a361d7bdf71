"""Make the sets that a language model is trained and evaluated on from a file of conversations."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import date
from typing import Any, NamedTuple

import torch

from trainkit.errors import UsageError, as_usage_error
from trainkit.language.formats import Conversation, read_conversations, with_system
from trainkit.language.templates import Chat, Sample, is_learned, show_sample
from trainkit.text import first_sentence


class ChatSets(NamedTuple):
    """What make_chat_sets returns; pack_sets makes other samples of it."""

    train_set: Sequence[Any]  # of Sample
    eval_set: Sequence[Any]  # sorted by length, so that its batches have little padding
    end: int | None  # the token that ends an answer
    plan: dict[str, str]  # lines to print
    prompts: dict[str, list[int]]  # what to answer at an evaluation, by the name to print


def read_tokenizer(base: str) -> tuple[Any, int | None]:
    """Return the tokenizer of a folder or Hub id, and how many tokens its model takes at once."""
    with as_usage_error("this example needs `pip install transformers`"):
        from transformers import AutoConfig, AutoTokenizer
    with as_usage_error(f"--base {base} cannot be read"):
        limit = num_positions(AutoConfig.from_pretrained(base))
        return AutoTokenizer.from_pretrained(base), limit


def num_positions(config: Any) -> int | None:
    """Return how many tokens a transformers model takes at once; None: its config sets no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def find_limit(max_tokens: int, positions: int | None) -> tuple[int, str]:
    """Return how many tokens of a sample are kept, and which setting limits them."""
    size = min(max_tokens, positions or max_tokens)
    return size, f"--max-tokens {size}" if size == max_tokens else f"the model's {size} positions"


def check_left(sets: Sequence[Sequence], num_rows: int, what: str, limit: str) -> None:
    """Raise UsageError if nothing of these rows is left to train or to evaluate on."""
    if num_rows > 1 and not all(sets):
        what = what.format("evaluate" if sets[0] else "train")
        larger = " or give a larger --max-tokens" * limit.startswith("-")
        raise UsageError(f"none of the {what} within {limit}: shorten the prompts{larger}")


def make_chat_sets(
    tokenizer: Any,
    data: str,
    max_tokens: int,
    limit: int | None = None,
    system: str | None = None,
    prompts: Sequence[str] = (),
    today: date | None = None,
) -> ChatSets:
    """Make a training set and, from a tenth of the rows, an evaluation set, and describe both.

    Samples are cut to max_tokens, or to `limit` if that is less; samples with no learned token left
    are dropped and counted. `system` begins conversations without a system turn, and the prompts.
    A chat template that writes the date writes `today`. Raises UsageError if one of the sets is
    left empty, or for a row that read_conversations or the chat template refuses, with its place.
    """
    size, limit_name = find_limit(max_tokens, limit)
    rows, columns = read_conversations(data)
    if system and not tokenizer.chat_template:
        raise UsageError("--system needs a chat template, and the tokenizer of --base has none")
    rows = [(where, with_system(row, system)) for where, row in rows]
    chat = Chat(tokenizer, today)
    if not any(row.turns for _, row in rows):
        chat.end = tokenizer.eos_token_id
    sets, ask, lines = _encode_rows(chat, rows, size, limit_name)
    check_left(sets, len(rows), "samples to {} on has an answer, or a token of one", limit_name)
    plan = {"data": f"{len(rows)} rows of {columns}", "end": _describe_end(chat, sets)} | lines
    plan |= {"first": show_sample(tokenizer, sets[0][0])} if sets[0] else {}
    asks = {prompt: chat.ask(prompt, system) for prompt in prompts}
    if not asks and sets[1]:
        asks["answer"] = ask
    by_length = sorted(sets[1], key=lambda sample: len(sample.tokens))
    return ChatSets(sets[0], by_length, chat.end, plan, asks)


def _encode_rows(
    chat: Chat, rows: Sequence[tuple[str, Conversation]], size: int, limit_name: str
) -> tuple[tuple[list[Sample], list[Sample]], list[int], dict[str, str]]:
    """Return both sets, the tokens that ask for the first answer of the second, and plan lines."""
    sets: tuple[list[Sample], list[Sample]] = ([], [])
    ask: list[int] = []
    notes = Notes()
    for number, (where, row) in enumerate(rows):
        conversation = chat.without_marks(row)
        notes.add("marked", conversation != row)
        notes.add("empty", _has_empty_answer(conversation))
        with as_usage_error(f"{where} cannot be tokenized"):
            encoded = chat.encode(conversation, size)
        notes.add("lost", encoded.lost)
        notes.add("untrained", encoded.untrained)
        kept = [Sample(tokens[:size], learned[:size]) for tokens, learned in encoded.samples]
        kept = [sample for sample in kept if sample.learned.any()]
        notes.counts["cut"] += sum(len(tokens) > size for tokens, _ in encoded.samples)
        notes.counts["dropped"] += max(1, len(encoded.samples)) - len(kept)
        if number % 10 == 0 and kept and not sets[1]:
            ask = [*encoded.ask]
        sets[number % 10 == 0].extend(kept)
    num_samples = sum(map(len, sets)) + notes.counts["dropped"]
    lines = {}
    if num_cut := notes.counts["cut"]:
        lines["cut"] = f"{num_cut} of {num_samples} samples, to {limit_name}"
    if num_dropped := notes.counts["dropped"]:
        lines["dropped"] = (
            f"{num_dropped} of {num_samples} samples, which have no learned token left"
        )
    return sets, ask, lines | notes.describe(chat, len(rows))


class Notes:
    """What is worth a line of the plan, counted, with the first example of each kind."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first: dict[str, Any] = {}

    def add(self, kind: str, example: Any) -> None:
        """Count a row of this kind, if the example is not empty."""
        if example:
            self.counts[kind] += 1
            self.first.setdefault(kind, example)

    def describe(self, chat: Chat, num_rows: int) -> dict[str, str]:
        """Return lines of the plan about rows and their chat template."""
        lines = {}
        counts = {kind: f"{num} of {num_rows} rows" for kind, num in self.counts.items()}
        if "empty" in counts:
            lines["empty"] = (
                f"{counts['empty']} have an answer without text, which is learned: the model says "
                "nothing there"
            )
        template = []
        if "lost" in counts:
            template.append(
                f"leaves out or changes parts of {counts['lost']}, which are learned without: the "
                f"first is {self.first['lost'][:30]!r}"
            )
        if "untrained" in counts:
            template.append(
                f"asks for an answer with {self.first['untrained'][-30:]!r}, which it does not "
                f"write in {counts['untrained']}: the model is asked what it has not learned"
            )
        if template:
            lines["template"] = "; ".join(template)
        if chat.day:
            lines["date"] = (
                f"{chat.day}, which the chat template writes, also in a resume on another day"
            )
        if marks := self._describe_marks(chat, counts):
            lines["special"] = marks
        return lines

    def _describe_marks(self, chat: Chat, counts: dict[str, str]) -> str:
        tokenizer = chat.tokenizer
        lines = []
        if "marked" in counts:
            lines.append(
                f"{counts['marked']} have texts that begin or end with tokens which are added to "
                "them: they are there once"
            )
        if chat.adds_eos and not tokenizer.chat_template:
            lines.append(
                f"the tokenizer ends each text with {tokenizer.eos_token}, which is left out "
                "between a prompt and its answer"
            )
        return "; ".join(lines)


def _has_empty_answer(conversation: Conversation) -> bool:
    answers = filter(is_learned, conversation.turns[conversation.num_prompt :])
    return not all(turn["content"].strip() or turn.get("tool_calls") for turn in answers)


def _describe_end(chat: Chat, sets: Iterable[Sequence[Sample]]) -> str:
    if chat.end is None:
        return "no token ends an answer: the model does not learn where to stop"
    ends = [chat.end in tokens[learned].tolist() for samples in sets for tokens, learned in samples]
    name = chat.tokenizer.convert_ids_to_tokens(chat.end)
    return f"{name} after an answer, learned in {sum(ends)} of {len(ends)} samples"


def answer(model: Any, tokenizer: Any, prompt: list[int]) -> str:
    """Return the greedy answer to the tokens of a prompt. Every process must call this."""
    tokens = torch.tensor([prompt], device=model.device)
    num_new = min(50, (num_positions(model.config) or math.inf) - len(prompt))
    options = {"max_new_tokens": num_new, "do_sample": False}
    model.eval()
    try:
        written = model.generate(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), **options
        )
        text = tokenizer.decode(written[0, len(prompt) :], skip_special_tokens=True)
        return text.strip() or "(blank)"
    except Exception as problem:  # this is only shown: it must not end the run
        return f"none, because of {first_sentence(problem)}"
    finally:
        model.train()
