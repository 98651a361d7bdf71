"""Turn pairs of answers, one of which is preferred, into tokens, and keep the base's numbers."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import nn

from trainkit.errors import UsageError, as_usage_error
from trainkit.language.conversations import (
    Conversation,
    as_turns,
    check_left,
    encode,
    find_end,
    find_limit,
    in_context,
    named,
    read_rows,
    show,
)
from trainkit.reading.kept import compute_once

# The tokens of the chosen conversation, int64 (length,), which are learned, bool; the rejected one.
Pair = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
NUM_AT_ONCE = 8  # pairs of a batch whose numbers are kept


class Pairs(NamedTuple):
    """What make_pairs returns."""

    train_set: list[Pair]
    eval_set: list[Pair]  # sorted by length, so that its batches have little padding
    end: int | None  # the token that ends an answer
    plan: dict[str, str]  # lines to print


def read_pair(row: Any) -> tuple[Conversation, Conversation]:
    """Return the chosen and the rejected conversation of a row; what both begin with is given.

    The row has chosen and rejected, as texts, turns or lists of turns, and the prompt in a column
    of its own, which may be called question, or at the start of both lists. Raises TypeError,
    KeyError, AttributeError or ValueError for others.
    """
    names = ("prompt", "conversations", "question")
    given = as_turns(next((row[name] for name in names if row.get(name)), []), "user")
    both = []
    for answer in (row["chosen"], row["rejected"]):
        if isinstance(answer, str) and not given:
            raise TypeError
        turns = as_turns(answer, "assistant")
        # Some sets have the prompt in a column and in the lists as well.
        both.append(turns if turns[: len(given)] == given else given + turns)
    num_given = len(given)
    if not given:
        same = [one == other for one, other in zip(*both, strict=False)]
        num_given = [*same, False].index(False)
    return in_context(both[0], num_given, row), in_context(both[1], num_given, row)


def make_pairs(tokenizer: Any, source: str, max_tokens: int, limit: int | None = None) -> Pairs:
    """Make a training set and, from a tenth of the rows, an evaluation set, and describe both.

    source: see read_rows of conversations.py. Conversations are cut to max_tokens, or to `limit` if
    that is less. Pairs of which one answer is cut away, or both are equal, are dropped and counted.
    Raises UsageError if a set is left empty, or for a row that cannot be read, with its place.
    """
    size, why = find_limit(max_tokens, limit)
    sets: tuple[list[Pair], list[Pair]] = ([], [])
    num_rows = num_cut = num_lost = num_equal = 0
    for number, (place, row) in enumerate(read_rows(source)):
        num_rows += 1
        with named(place, "chosen and rejected, as lists of turns, or as texts beside a prompt"):
            both = read_pair(row)
        with as_usage_error(f"{place} cannot be tokenized"):
            found = [_encode_one(tokenizer, conversation, size) for conversation in both]
        num_cut += any(len(tokens) > size for tokens, _ in found)
        chosen, rejected = ((tokens[:size], learned[:size]) for tokens, learned in found)
        if not chosen[1].any() or not rejected[1].any():
            num_lost += 1
        elif torch.equal(chosen[0], rejected[0]):
            num_equal += 1
        else:
            sets[number % 10 == 0].append((*chosen, *rejected))
    check_left(sets, num_rows, "pairs to {} on has two different answers", why)
    end = find_end(tokenizer)
    ends = "no token" if end is None else tokenizer.convert_ids_to_tokens(end)
    plan = {"data": f"{num_rows} rows of chosen and rejected", "end": f"{ends} after an answer"}
    if num_cut:
        plan["cut"] = f"{num_cut} of {num_rows} pairs, to {why}"
    if num_lost or num_equal:
        plan["dropped"] = (
            f"{num_lost} of {num_rows} pairs, of which an answer has no token left, and "
            f"{num_equal} whose answers are equal"
        )
    if sets[0]:
        first = sets[0][0]
        plan |= {"chosen": show(tokenizer, first[:2]), "rejected": show(tokenizer, first[2:])}
    return Pairs(sets[0], sorted(sets[1], key=longest), end, plan)


def longest(pair: Sequence[torch.Tensor]) -> int:
    """Return how many tokens the longer of the two conversations has."""
    return max(len(pair[0]), len(pair[2]))


def _encode_one(
    tokenizer: Any, conversation: Conversation, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    samples, lost = encode(tokenizer, conversation, size)
    if lost:
        raise ValueError(f"the chat template leaves out or changes {lost[:30]!r}")
    if len(samples) > 1:
        raise ValueError("the chat template changes its earlier answers: compare one at a time")
    nothing = torch.zeros(0, dtype=torch.int64)
    return samples[0] if samples else (nothing, nothing.bool())


def add_reference(
    accelerator: Accelerator,
    model: nn.Module,
    sets: Sequence[list],
    collate: Callable[[list[Pair]], tuple[torch.Tensor, ...]],
    compute: Callable[..., torch.Tensor],
) -> str:
    """Append to each pair, in place, its row of compute(*collate(pairs)); return what they hang on.

    The rows are computed once for these weights and pairs, and kept among the caches of `datasets`,
    so that a resume has the same ones. The processes share them in batches that do not depend on
    the number of processes. What is returned is a hash of the weights and the pairs. Every process
    must call this.

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
    pairs = [pair for each in sets for pair in each]
    digest = hashlib.sha256()
    for tensor in (*model.state_dict().values(), *(each for pair in pairs for each in pair)):
        digest.update(str((tensor.shape, tensor.dtype)).encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    model.to(accelerator.device).eval()
    name = f"preferences/{digest.hexdigest()}-{accelerator.mixed_precision}"

    def compute_part(part: slice) -> torch.Tensor:
        with accelerator.autocast():
            return compute(*(each.to(accelerator.device) for each in collate(pairs[part])))

    shape = len(pairs), 2
    numbers = iter(compute_once(accelerator, name, shape, NUM_AT_ONCE, compute_part))
    model.train()
    for each in sets:
        each[:] = [(*pair, next(numbers)) for pair in each]
    return digest.hexdigest()
