"""Turn pairs of answers into tokens, and cache the log-probabilities of the reference model."""

from collections.abc import Callable, Sequence
from math import log
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from trainkit.checkpoints.content import text_of
from trainkit.errors import UsageError, as_usage_error
from trainkit.hashes import digest
from trainkit.language.conversations import (
    Notes,
    ask_command,
    check_left,
    find_limit,
    first_day,
    hold_out_tenth,
    name_prompt,
    read_tokenizer,
)
from trainkit.language.formats import (
    OPENING,
    PROMPTS,
    Conversation,
    as_turns,
    comparable,
    naming_row,
    number_equal_turns,
    read_chat_rows,
    read_conversation,
)
from trainkit.language.losses import places_of
from trainkit.language.templates import Chat, Encoded, Sample, num_equal, show_sample
from trainkit.reading import splits
from trainkit.reading.kept import compute_once

if TYPE_CHECKING:
    from trainkit.language.pretrained import LanguageConfig

NUM_AT_ONCE = 8  # pairs of a batch


class Pair(NamedTuple):
    """Two conversations that begin with one prompt."""

    chosen: Sample
    rejected: Sample
    reference: torch.Tensor | None = None  # (2,), what add_reference computes

    @property
    def length(self) -> int:
        """Of the longer conversation, in tokens."""
        return max(len(self.chosen.tokens), len(self.rejected.tokens))


class PairBatch(NamedTuple):
    """Pairs of conversations, (n, 2 for chosen and rejected, longest), padded with 0."""

    tokens: torch.Tensor
    learned: torch.Tensor  # which are
    places: torch.Tensor  # of those that are predicted and learned, in learned[..., 1:].flatten()
    reference: torch.Tensor | None  # (n, 2): log-probabilities by the base


class Pairs(NamedTuple):
    """What load_pairs returns."""

    train_set: list[Pair]
    eval_set: list[Pair]  # sorted by length, so that its batches have little padding
    tokenizer: Any
    end: int | None  # the token that ends an answer
    plan: dict[str, str]  # lines to print


def load_pairs(config: "LanguageConfig") -> Pairs:
    """Make a training set and an evaluation set of --data, and describe both.

    Evaluated is --eval-data, or a test split of --data, or else a tenth of the rows. Conversations
    are truncated to --max-tokens, or to what the model takes if that is less. Pairs of which one
    answer is truncated to nothing, or both are equal, are dropped and counted. Raises UsageError if
    a set is left empty, or for a row that cannot be read, and says where it is.
    """
    tokenizer, limit = read_tokenizer(config.base)
    with as_usage_error(f"--data {config.data} cannot be used with --base {config.base}"):
        pairs = make_pairs(config, tokenizer, limit)
    return pairs._replace(plan=pairs.plan | {"next": ask_command(config)})


def make_pairs(config: "LanguageConfig", tokenizer: Any, limit: int | None = None) -> Pairs:
    """Do what load_pairs does, with this tokenizer, for a model that takes so many tokens."""
    size, limit_name = find_limit(config.max_tokens, limit)
    chat = Chat(tokenizer, first_day(config))
    notes = Notes()
    read, num_given, read_plan = read_chat_rows(config.data, config.eval_data)
    rows = []
    for where, row in read:
        with naming_row(where, "chosen and rejected, as lists of turns, or as texts and a prompt"):
            rows.append((where, read_pair(row)))
    pairs = [_encode_pair(chat, where, both, size, notes) for where, both in rows]
    equal = [number_equal_turns(both[side] for _, both in rows).tolist() for side in (0, 1)]
    hashes = splits.number_equal(zip(*equal, strict=True))
    is_left = [pair is not None for pair in pairs]
    sides, twice = hold_out_tenth(hashes, is_left, num_given, "pair")
    read_sides = ([pairs[n] for n in side] for side in sides)
    sets = [[pair for pair in side if pair is not None] for side in read_sides]
    check_left(sets, len(rows), "pairs to {} on has two different answers", limit_name)
    plan = _describe_pairs(chat, notes, len(rows), limit_name, sets[0]) | read_plan | twice
    return Pairs(sets[0], sorted(sets[1], key=lambda pair: pair.length), tokenizer, chat.end, plan)


def read_pair(row: Any) -> tuple[Conversation, Conversation]:
    """Return the chosen and the rejected conversation of a row, which begin with one prompt.

    The row has chosen and rejected, as texts, turns or lists of turns, and the prompt in a column
    of its own, at the start of both lists, or both. Raises UsageError if they have different
    prompts, TypeError, KeyError, AttributeError or ValueError for rows without these columns.
    """
    column = next((name for name in PROMPTS if row.get(name)), "")
    if not column and isinstance(row["chosen"], str):
        raise TypeError
    prompt = []
    if as_turns(row["chosen"], "assistant")[0]["role"] in OPENING:  # a whole conversation
        prompt = as_turns(row[column], "user")[-1:] if column else []
        row = {name: value for name, value in row.items() if name != column}
        column = ""
    chosen, rejected = (read_conversation(row, column, side) for side in ("chosen", "rejected"))
    num = num_equal(comparable(chosen.turns), comparable(rejected.turns))
    num = max(0, min(num, len(chosen.turns) - 1, len(rejected.turns) - 1))
    has_prompt = not prompt or comparable(prompt)[0] in comparable(chosen.turns[:num])
    if not has_prompt or any(x.turns[num]["role"] in OPENING for x in (chosen, rejected)):
        raise UsageError("chosen and rejected have different prompts: give both the same one")
    turns = chosen.turns[:num] + rejected.turns[num:]
    return chosen._replace(num_prompt=num), rejected._replace(num_prompt=num, turns=turns)


def _encode_pair(
    chat: Chat, where: str, both: Sequence[Conversation], size: int, notes: Notes
) -> Pair | None:
    """Return the tokens of both; None if they are equal, or no token of an answer is left."""
    with as_usage_error(f"{where} cannot be tokenized"):
        encoded = [chat.encode(conversation, size) for conversation in both]
        samples = [_only_sample(one) for one in encoded]
    notes.add(chat, both, encoded)
    notes.counts["truncated"] += any(len(tokens) > size for tokens, _ in samples)
    pair = Pair(*(Sample(tokens[:size], learned[:size]) for tokens, learned in samples))
    if not pair.chosen.learned.any() or not pair.rejected.learned.any():
        notes.counts["lost answer"] += 1
        return None
    if torch.equal(pair.chosen.tokens, pair.rejected.tokens):
        notes.counts["equal"] += 1
        return None
    return pair


def _describe_pairs(
    chat: Chat, notes: Notes, num_rows: int, limit_name: str, pairs: Sequence[Pair]
) -> dict[str, str]:
    """Return the lines of the plan about these pairs, with the first of them."""
    tokenizer = chat.tokenizer
    counts = notes.counts
    end = "no token" if chat.end is None else tokenizer.convert_ids_to_tokens(chat.end)
    plan = {"data": f"{num_rows} rows of chosen and rejected", "end": f"{end} after an answer"}
    if counts["truncated"]:
        plan["truncated"] = f"{counts['truncated']} of {num_rows} pairs, to {limit_name}"
    if counts["lost answer"] or counts["equal"]:
        plan["dropped"] = (
            f"{counts['lost answer']} of {num_rows} pairs, of which an answer has no token left, "
            f"and {counts['equal']} whose answers are equal"
        )
    plan |= notes.describe(chat, num_rows)
    if pairs:
        plan["chosen"] = show_sample(tokenizer, pairs[0].chosen)
        plan["rejected"] = show_sample(tokenizer, pairs[0].rejected)
    return plan


def collate_pairs(pairs: list[Pair]) -> PairBatch:
    """Make a batch of pairs, which have a reference or have none."""
    samples = [sample for pair in pairs for sample in (pair.chosen, pair.rejected)]
    tokens, learned = (
        pad_sequence(rows, batch_first=True).unflatten(0, (-1, 2))
        for rows in zip(*samples, strict=True)
    )
    places = places_of(learned)
    references = [pair.reference for pair in pairs if pair.reference is not None]
    return PairBatch(tokens, learned, places, torch.stack(references) if references else None)


def sample_prompts(pairs: Pairs, most: int = 2) -> dict[str, list[int]]:
    """Return the tokens before the answer of a few evaluated pairs, by what to call them."""
    found: dict[str, list[int]] = {}
    for pair in pairs.eval_set[:most]:
        first = int(pair.chosen.learned.nonzero()[0])
        found |= name_prompt(pairs.tokenizer, pair.chosen.tokens[:first].tolist())
    return found


def warn_of_unlikely(metrics: dict[str, float], beta: float, pairs: Sequence[Pair]) -> str:
    """Return a line if the chosen answers became unlikely, or neither answer is likely, or "".

    DPO lowers both answers, and its accuracy is the same when the model no longer gives either. The
    chosen ones became unlikely if they are less likely than by the base by more than a factor of e
    for a whole answer. If they were unlikely from the start, neither is likely any more if both are
    less likely by that factor than the likelier one was, and each token of chosen by one of 2.
    """
    now = {side: metrics[f"eval_{side}_logp"] for side in ("chosen", "rejected")}
    base = {side: now[side] - metrics[f"eval_{side}_reward"] / beta for side in now}
    num_tokens = sum(int(pair.chosen.learned.sum()) for pair in pairs) / len(pairs)
    likely = max(base.values())
    lost = max(now.values()) < likely - 1
    remedy = "try --sft-weight 1, a lower --learning-rate or fewer steps"
    if now["chosen"] < base["chosen"] - 1:
        return (
            f"chosen answers became unlikely: their mean log-probability is {now['chosen']:.4g}, "
            f"by the base {base['chosen']:.4g}: {remedy}"
        )
    if lost and likely - now["chosen"] > log(2) * num_tokens:
        return (
            "neither answer is likely any more: the mean log-probability of chosen is "
            f"{now['chosen']:.4g} and of rejected {now['rejected']:.4g}, by the base "
            f"{base['chosen']:.4g} and {base['rejected']:.4g}: {remedy}"
        )
    return ""


def _only_sample(encoded: Encoded) -> Sample:
    if len(encoded.samples) > 1:
        raise ValueError("the chat template changes its earlier answers: compare one at a time")
    nothing = torch.zeros(0, dtype=torch.int64)
    return encoded.samples[0] if encoded.samples else Sample(nothing, nothing.bool())


def add_reference(
    accelerator: Accelerator,
    model: nn.Module,
    sets: Sequence[list],
    collate: Callable[[list[Pair]], tuple],
    compute: Callable[[Any], torch.Tensor],
) -> str:
    """Give each pair, in place, its row of compute(collate(pairs)); return their hash.

    The rows are computed once for these weights and pairs, and kept among the caches of `datasets`,
    so that a resume has the same ones. The processes share them in batches that do not depend on
    the number of processes. The hash is that of the weights and the pairs. Every process must call
    this.

    Args:
        model: whose weights `compute` uses, whole, so call this before accelerator.prepare.
        sets: lists of pairs.
        collate: makes tensors of pairs; they are moved to the device of the process.
        compute: returns (n, 2), float32, for n pairs. It is called without gradients and
            in evaluation mode; afterwards the model is in training mode.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.cpu_ram_efficient_loading:
        raise UsageError(
            "fsdp_cpu_ram_efficient_loading: true leaves all processes but the first without the "
            "weights, which each of them compares to: set it to false in the YAML"
        )
    pairs = [pair for group in sets for pair in group]
    fingerprint = digest(text_of([model.state_dict(), pairs]))
    model.to(accelerator.device).eval()
    # All that their rounding follows from: the margins begin at exactly 0.
    how = accelerator.mixed_precision, accelerator.device.type, torch.__version__
    name = f"references/{fingerprint}-{'-'.join(how)}"

    def compute_part(part: slice) -> torch.Tensor:
        with accelerator.autocast():
            return compute(send_to_device(collate(pairs[part]), accelerator.device))

    numbers = iter(compute_once(accelerator, name, (len(pairs), 2), NUM_AT_ONCE, compute_part))
    model.train()
    for group in sets:
        group[:] = [pair._replace(reference=next(numbers)) for pair in group]
    return fingerprint
