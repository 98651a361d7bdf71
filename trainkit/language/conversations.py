"""Make the sets that a language model is trained and evaluated on from a file of conversations."""

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trainkit.errors import UsageError, as_usage_error
from trainkit.language.formats import (
    Conversation,
    number_equal_turns,
    read_chat_rows,
    read_conversations,
    with_system,
)
from trainkit.language.packing import Packed
from trainkit.language.templates import Chat, Encoded, Sample, find_unread, is_learned, show_sample
from trainkit.reading import splits
from trainkit.reading.paths import read_here_or_from_hub
from trainkit.store.records import read_run_json
from trainkit.text import first_sentence, shorten

if TYPE_CHECKING:
    from trainkit.language.pretrained import LanguageConfig

MAX_QUESTION = 200  # letters that are shown of what an answer is asked for


class ChatSets(NamedTuple):
    """What load_chats returns."""

    train_set: Sequence[Any]  # of Sample, or Packed
    eval_set: Sequence[Any]  # sorted by length, so that its batches have little padding
    tokenizer: Any
    end: int | None  # the token that ends an answer
    plan: dict[str, str]  # lines to print
    prompts: dict[str, list[int]]  # what to answer at an evaluation, by the name to print


def load_chats(
    config: "LanguageConfig",
    system: str | None = None,
    prompts: Sequence[str] = (),
    pack: bool = False,
) -> ChatSets:
    """Make a training set and an evaluation set of --data, and describe both.

    Evaluated is --eval-data, or a test split of --data, or else a tenth of the rows. Samples are
    truncated to --max-tokens, or to what the model takes if that is less; samples with no learned
    token left are dropped and counted. Raises UsageError if one of the sets is left empty, or for a
    row that read_conversations or the chat template refuses, with its place.

    Args:
        system: begins conversations without a system turn, and the prompts.
        prompts: what to answer at an evaluation, instead of what the first evaluated row asks.
        pack: fill rows of --max-tokens with whole samples.
    """
    tokenizer, limit = read_tokenizer(config.base)
    with as_usage_error(f"--data {config.data} cannot be used with --base {config.base}"):
        sets = make_chat_sets(config, tokenizer, limit, system, prompts)
    plan = sets.plan | {"next": ask_command(config)}
    if not pack:
        return sets._replace(plan=plan)
    train_set, eval_set = (Packed(samples, config.max_tokens) for samples in sets[:2])
    plan |= {"packed": train_set.describe()}
    return sets._replace(train_set=train_set, eval_set=eval_set, plan=plan)


def ask_command(config: "LanguageConfig") -> str:
    """Return the command that asks the finished run."""
    return f"python -m trainkit.language.ask {shlex.quote(str(config.run_dir))}"


def read_tokenizer(base: str) -> tuple[Any, int | None]:
    """Return the tokenizer of a folder or Hub id, and how many tokens its model takes at once."""
    with as_usage_error("this example needs `pip install transformers`"):
        from transformers import AutoConfig, AutoTokenizer
    with read_here_or_from_hub(base, f"--base {base}"):
        limit = num_positions(AutoConfig.from_pretrained(base))
        return AutoTokenizer.from_pretrained(base), limit


def num_positions(config: Any) -> int | None:
    """Return how many tokens a transformers model takes at once; None: its config sets no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def first_day(config: "LanguageConfig") -> date:
    """Return --day, or else the day on which this run was started first; set --day to it.

    run.json keeps it from the start, before there is a checkpoint.
    """
    day = config.day
    if day is None and config.resume and (config.run_dir / "run.json").exists():
        day = read_run_json(config.run_dir)["arguments"].get("day")
    config.set_unset({"day": day or date.today().isoformat()})
    with as_usage_error(f"--day {config.day} is not like 2026-01-31"):
        return date.fromisoformat(str(config.day))


def find_limit(max_tokens: int, positions: int | None) -> tuple[int, str]:
    """Return how many tokens of a sample are kept, and which setting limits them."""
    size = min(max_tokens, positions or max_tokens)
    return size, f"--max-tokens {size}" if size == max_tokens else f"the model's {size} positions"


def check_left(sets: Sequence[Sequence], num_rows: int, what: str, limit: str) -> None:
    """Raise UsageError if nothing of these rows is left to train or to evaluate on."""
    if num_rows > 1 and not all(sets):
        what = what.format("evaluate" if sets[0] else "train")
        remedy = "shorten the prompts"
        if limit.startswith("--max-tokens"):
            remedy += " or give a larger --max-tokens"
        raise UsageError(f"none of the {what} within {limit}: {remedy}")


def make_chat_sets(
    config: "LanguageConfig",
    tokenizer: Any,
    limit: int | None = None,
    system: str | None = None,
    prompts: Sequence[str] = (),
) -> ChatSets:
    """Do what load_chats does, with this tokenizer, for a model that takes so many tokens."""
    size, limit_name = find_limit(config.max_tokens, limit)
    read, num_given, read_plan = read_chat_rows(config.data, config.eval_data)
    rows, columns = read_conversations(read)
    if system and not tokenizer.chat_template:
        raise UsageError("--system needs a chat template, and the tokenizer of --base has none")
    rows = [(where, with_system(row, system)) for where, row in rows]
    chat = Chat(tokenizer, first_day(config))
    if not any(row.turns for _, row in rows):
        chat.end = tokenizer.eos_token_id
    encoded, lines = _encode_rows(chat, rows, size, limit_name)
    is_left = [bool(one.samples) for one in encoded]
    hashes = number_equal_turns(row for _, row in rows)
    sides, twice = hold_out_tenth(hashes, is_left, num_given, "row")
    sets = [[sample for n in side for sample in encoded[n].samples] for side in sides]
    check_left(sets, len(rows), "samples to {} on has an answer, or a token of one", limit_name)
    plan = {"data": f"{len(rows)} rows of {columns}", "end": _describe_end(chat, sets)}
    plan |= read_plan | twice | lines
    plan |= {"first": show_sample(tokenizer, sets[0][0])} if sets[0] else {}
    asks = {prompt: chat.ask(prompt, system) for prompt in prompts}
    if not asks and sets[1]:
        asks |= name_prompt(tokenizer, encoded[sides[1][0]].ask)
    by_length = sorted(sets[1], key=lambda sample: len(sample.tokens))
    return ChatSets(sets[0], by_length, tokenizer, chat.end, plan, asks)


def name_prompt(tokenizer: Any, tokens: Sequence[int]) -> dict[str, list[int]]:
    """Return the tokens that ask for an answer, by the end of their text as it is printed."""
    text = " ".join(tokenizer.decode(tokens, skip_special_tokens=True).split())
    return {f"answer to {text[-MAX_QUESTION:]!r}": [*tokens]}


def hold_out_tenth(
    hashes: torch.Tensor, is_left: Sequence[bool], num_given: int, noun: str
) -> tuple[list[list[int]], dict[str, str]]:
    """Return which rows are trained on and which are evaluated, in their order, and a plan line.

    Evaluated are the last `num_given` rows, or else a tenth; equal rows are on one side, unless all
    are equal. hashes: of all rows. is_left: others are on no side.
    """
    rows = torch.tensor(is_left, dtype=torch.bool).nonzero().flatten()
    is_given = rows >= len(hashes) - num_given
    sides = [rows[~is_given], rows[is_given]]
    if not num_given:
        number = math.ceil(len(rows) / 10)
        parts = splits.split_rows(hashes[rows], number=number)
        if not len(parts[1]):
            parts = splits.hold_out(len(rows), number=number)
        sides = [rows[part.sort().values] for part in parts]
    lines = splits.describe_equal(hashes[sides[0]], hashes[sides[1]], noun)
    return [side.tolist() for side in sides], lines


def _encode_rows(
    chat: Chat, rows: Sequence[tuple[str, Conversation]], size: int, limit_name: str
) -> tuple[list[Encoded], dict[str, str]]:
    """Return what is left of each row, which may be no sample, and lines of the plan."""
    left: list[Encoded] = []
    notes = Notes()
    for where, row in rows:
        with as_usage_error(f"{where} cannot be tokenized"):
            encoded = chat.encode(row, size)
        notes.add(chat, [row], [encoded])
        notes.counts["unlearned"] += row.text is None and not any(map(is_learned, row.turns))
        kept = [Sample(tokens[:size], learned[:size]) for tokens, learned in encoded.samples]
        kept = [sample for sample in kept if sample.learned.any()]
        notes.counts["truncated"] += sum(len(tokens) > size for tokens, _ in encoded.samples)
        notes.counts["dropped"] += max(1, len(encoded.samples)) - len(kept)
        left.append(encoded._replace(samples=kept))
    if notes.counts["unlearned"] and not any(encoded.samples for encoded in left):
        raise UsageError(
            f"nothing is learned of {notes.counts['unlearned']} of {len(rows)} rows: they have no "
            "turn of an assistant whose weight is not 0"
        )
    num_samples = sum(len(encoded.samples) for encoded in left) + notes.counts["dropped"]
    lines = {}
    if num_truncated := notes.counts["truncated"]:
        lines["truncated"] = f"{num_truncated} of {num_samples} samples, to {limit_name}"
    if num_dropped := notes.counts["dropped"]:
        lines["dropped"] = (
            f"{num_dropped} of {num_samples} samples, which have no learned token left"
        )
    return left, lines | notes.describe(chat, len(rows))


class Notes:
    """What is worth a line of the plan."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.unwritten = ""  # the first of Encoded.unwritten
        self.unread: set[str] = set()  # columns, and keys of turns

    def add(self, chat: Chat, row: Sequence[Conversation], encoded: Sequence[Encoded]) -> None:
        """Count what is said of the conversations of a row, and keep names that change nothing."""
        turns = (turn for one in row for turn in one.turns if is_learned(turn))
        is_empty = (not turn["content"].strip() and not turn.get("tool_calls") for turn in turns)
        self.counts["empty"] += any(is_empty)
        unwritten = next((one.unwritten for one in encoded if one.unwritten), "")
        self.counts["unwritten"] += bool(unwritten)
        self.unwritten = self.unwritten or unwritten
        for one in row:
            self.unread.update(one.unread, find_unread(one.turns, chat.tokenizer.chat_template))

    def describe(self, chat: Chat, num_rows: int) -> dict[str, str]:
        """Return lines of the plan about rows and their chat template."""
        lines = {}
        if num_empty := self.counts["empty"]:
            lines["empty"] = f"{num_empty} of {num_rows} rows have an answer without text"
        if self.unwritten:
            lines["asked"] = (
                f"the template does not write {self.unwritten!r}, with which it asks for an answer,"
                f" before the answers of {self.counts['unwritten']} of {num_rows} rows: the model "
                "will be prompted with text that it never saw"
            )
        if self.unread:
            lines["not read"] = shorten(sorted(self.unread), 10)
        if chat.day:
            lines["date"] = (
                f"{chat.day}, which the chat template writes, also in a resume on another day"
            )
        return lines


def _describe_end(chat: Chat, sets: Iterable[Sequence[Sample]]) -> str:
    if chat.end is None:
        return "no token ends an answer: the model does not learn where to stop"
    ends = [chat.end in tokens[learned].tolist() for samples in sets for tokens, learned in samples]
    name = chat.tokenizer.convert_ids_to_tokens(chat.end)
    return f"{name} after an answer, learned in {sum(ends)} of {len(ends)} samples"


def answer(model: Any, tokenizer: Any, prompt: list[int], most: int = 50) -> str:
    """Return the greedy answer to the tokens of a prompt, of at most so many new tokens.

    Every process must call this.
    """
    tokens = torch.tensor([prompt], device=model.device)
    num_new = min(most, (num_positions(model.config) or math.inf) - len(prompt))
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
