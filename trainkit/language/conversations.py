"""Make the sets that a language model is trained and evaluated on from a file of conversations."""

import math
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trainkit.errors import UsageError, as_usage_error
from trainkit.language.formats import Conversation, read_chat, read_chat_rows
from trainkit.language.packing import Packed
from trainkit.language.templates import Chat, Sample, show_sample
from trainkit.reading import splits
from trainkit.reading.paths import read_here_or_from_hub
from trainkit.store.records import read_run_json
from trainkit.text import first_sentence, shorten

if TYPE_CHECKING:
    from trainkit.language.pretrained import LanguageConfig

MAX_QUESTION = 200  # letters that are shown of what an answer is asked for


class ChatSets(NamedTuple):
    """What load_chats and load_pairs return."""

    train_set: Sequence[Any]  # of Sample, Packed or Pair
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
    row that cannot be read or that the chat template refuses, with its place.

    Args:
        system: begins conversations without a system turn, and the prompts.
        prompts: what to answer at an evaluation, instead of what the first evaluated row asks.
        pack: fill rows of --max-tokens with whole samples.
    """

    def read(row: Any) -> tuple[str, list[Conversation]]:
        name, conversation = read_chat(row)
        return name, [conversation.with_system(system)]

    chat, sets = make_sets(config, "sample", "a learned token", read, lambda samples: samples[0])
    tokenizer, plan = sets.tokenizer, sets.plan
    if sets.train_set:
        plan["first"] = show_sample(tokenizer, sets.train_set[0])
    asks = {prompt: chat.ask(prompt, system) for prompt in prompts}
    if not asks and sets.eval_set:
        asks = name_prompt(tokenizer, sets.eval_set[0])
    eval_set = sorted(sets.eval_set, key=lambda sample: len(sample.tokens))
    sets = sets._replace(eval_set=eval_set, prompts=asks)
    if not pack:
        return sets
    train_set, packed_eval = (Packed(samples, config.max_tokens) for samples in sets[:2])
    plan["packed"] = train_set.describe()
    return sets._replace(train_set=train_set, eval_set=packed_eval)


def num_positions(config: Any) -> int | None:
    """Return how many tokens a model takes at once; None: its config sets no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def first_day(config: "LanguageConfig") -> date:
    """Return --day, or else the day on which this run was started first; set --day to it."""
    day = config.day
    if day is None and config.resume and (config.run_dir / "run.json").exists():
        day = read_run_json(config.run_dir)["arguments"].get("day")
    config.set_unset({"day": day or date.today().isoformat()})
    with as_usage_error(f"--day {config.day} is not like 2026-01-31"):
        return date.fromisoformat(str(config.day))


def make_sets(
    config: "LanguageConfig",
    noun: str,
    has: str,
    read: Callable[[Any], tuple[str, Sequence[Conversation]]],
    make_item: Callable[[Sequence[Sample]], Any],
) -> tuple[Chat, ChatSets]:
    """Return a chat, and the sets of --data, which are not sorted yet and have no prompts.

    make_item makes an item, which a `noun` names, of a sample of each conversation that `read`
    returns, or None. What does not have what `has` says is dropped.
    """
    with as_usage_error("this example needs `pip install transformers`"):
        from transformers import AutoConfig, AutoTokenizer
    with read_here_or_from_hub(config.base, f"--base {config.base}"):
        positions = num_positions(AutoConfig.from_pretrained(config.base))
        tokenizer = AutoTokenizer.from_pretrained(config.base)
    size = min(config.max_tokens, positions or config.max_tokens)
    limit = f"--max-tokens {size}" if size == config.max_tokens else f"the model's {size} positions"
    rows, num_given, plan = read_chat_rows(config.data, config.eval_data)
    with as_usage_error(f"the chat template of --base {config.base} cannot write a text"):
        chat = Chat(tokenizer, first_day(config))
    found = Found([], [], {}, set(), Counter())
    for where, row in rows:
        with as_usage_error(f"{where} cannot be learned"):
            found.add(chat, size, *read(row), make_item)
    if not found.num["with turns"]:  # all are texts
        chat.end = tokenizer.eos_token_id
    sides, twice = hold_out_tenth(splits.number_equal(found.keys), found.items, num_given)
    sets = [[item for row in side for item in found.items[row]] for side in sides]
    if len(rows) > 1 and not all(sets):
        raise UsageError(
            f"none of the {noun}s to {'evaluate' if sets[0] else 'train'} on has {has} within "
            f"{limit}: shorten the prompts, give a larger --max-tokens, or rows in which an "
            "assistant answers"
        )
    plan |= twice | describe(chat, found)
    for what, how in ("truncated", f"to {limit}"), ("dropped", f"which do not have {has}"):
        if found.num[what]:
            plan[what] = f"{found.num[what]} of {found.num['all']} {noun}s, {how}"
    plan["next"] = f"python -m trainkit.language.ask {shlex.quote(str(config.run_dir))}"
    return chat, ChatSets(sets[0], sets[1], tokenizer, chat.end, plan, {})


class Found(NamedTuple):
    """What was found in rows."""

    items: list[list[Any]]  # of each row
    keys: list[tuple[str, ...]]  # the same for equal rows
    columns: dict[str, None]
    unread: set[str]  # columns
    num: Counter[str]  # of items by what became of them

    def add(
        self,
        chat: Chat,
        size: int,
        columns: str,
        conversations: Sequence[Conversation],
        make_item: Callable[[Sequence[Sample]], Any],
    ) -> None:
        """Add what is in a row, truncated to so many tokens. Raises what Chat.encode raises."""
        encoded = [chat.encode(conversation, size) for conversation in conversations]
        if len(encoded) > 1 and max(map(len, encoded)) > 1:
            raise ValueError("the chat template changes earlier answers: compare one at a time")
        self.columns[columns] = None
        self.keys.append(tuple(conversation.as_key() for conversation in conversations))
        self.unread.update(*(conversation.unread for conversation in conversations))
        together = [*zip(*encoded, strict=False)]
        cut = ([Sample(*(part[:size] for part in one)) for one in both] for both in together)
        made = [make_item(both) for both in cut if all(one.learned.any() for one in both)]
        self.items.append([item for item in made if item is not None])
        self.num["with turns"] += any(conversation.turns for conversation in conversations)
        self.num["all"] += max(1, len(together))
        self.num["truncated"] += sum(any(len(x.tokens) > size for x in both) for both in together)
        self.num["dropped"] += max(1, len(together)) - len(self.items[-1])


def describe(chat: Chat, found: Found) -> dict[str, str]:
    """Return lines of the plan about the rows and their chat template."""
    lines = {
        "data": f"{len(found.keys)} rows of {'; '.join(found.columns)}",
        "end": "no token ends an answer: the model does not learn where to stop",
    }
    if chat.end is not None:
        lines["end"] = f"{chat.tokenizer.convert_ids_to_tokens(chat.end)} after an answer"
    if chat.unwritten:
        lines["asked"] = (
            f"the template asks for an answer with {chat.unwritten!r}, which it does not write "
            "before all answers: the model will be prompted with text that it never saw"
        )
    if found.unread:
        lines["not read"] = shorten(sorted(found.unread), 10)
    if chat.day:
        lines["date"] = f"{chat.day}, which the template writes, also in a resume on another day"
    return lines


def name_prompt(tokenizer: Any, sample: Sample) -> dict[str, list[int]]:
    """Return the tokens before the first answer of a sample, by the end of their text."""
    tokens = sample.tokens[: int(sample.learned.nonzero()[0])].tolist()
    text = " ".join(tokenizer.decode(tokens, skip_special_tokens=True).split())
    return {f"answer to {text[-MAX_QUESTION:]!r}": tokens}


def hold_out_tenth(
    hashes: torch.Tensor, items: Sequence[Any], num_given: int
) -> tuple[list[list[int]], dict[str, str]]:
    """Return which rows are trained on and which are evaluated, in their order, and a plan line.

    Evaluated are the last `num_given` rows, or else a tenth; equal rows are on one side, unless all
    are equal. A row without items is on no side.
    """
    rows = torch.tensor([*map(bool, items)], dtype=torch.bool).nonzero().flatten()
    is_given = rows >= len(hashes) - num_given
    sides = [rows[~is_given], rows[is_given]]
    if not num_given:
        number = math.ceil(len(rows) / 10)
        parts = splits.split_rows(hashes[rows], number=number)
        if not len(parts[1]):
            parts = splits.hold_out(len(rows), number=number)
        sides = [rows[part.sort().values] for part in parts]
    lines = splits.describe_equal(hashes[sides[0]], hashes[sides[1]], "row")
    return [side.tolist() for side in sides], lines


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
