"""Turn pairs of answers into tokens, and cache the log-probabilities of the reference model."""

from collections.abc import Callable, Sequence
from math import log
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from trainkit.checkpoints.hashing import text_of
from trainkit.errors import UsageError
from trainkit.hashes import digest
from trainkit.language.conversations import ChatSets, make_sets, name_prompt
from trainkit.language.formats import (
    OPENING,
    PROMPTS,
    Conversation,
    as_turns,
    comparable,
    read_conversation,
)
from trainkit.language.losses import places_of
from trainkit.language.templates import Sample, num_equal, show_sample
from trainkit.reading.kept import compute_once

if TYPE_CHECKING:
    from trainkit.language.pretrained import LanguageConfig

NUM_AT_ONCE = 8  # pairs of a batch
SPLIT = "chosen and rejected, split where they begin to differ, as by TRL, in no chat template"


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


def load_pairs(config: "LanguageConfig") -> ChatSets:
    """Make a training set and an evaluation set of --data, lists of Pair; see load_chats.

    Pairs of which one answer is truncated to nothing, or both are equal, are dropped and counted.
    """

    def make_pair(samples: Sequence[Sample]) -> Pair | None:
        chosen, rejected = samples
        return None if torch.equal(chosen.tokens, rejected.tokens) else Pair(chosen, rejected)

    _, pairs = make_sets(config, "pair", "two different answers", read_pair, make_pair)
    if pairs.train_set:
        for side, sample in zip(("chosen", "rejected"), pairs.train_set[0][:2], strict=True):
            pairs.plan[side] = show_sample(pairs.tokenizer, sample)
    return pairs._replace(eval_set=sorted(pairs.eval_set, key=lambda pair: pair.length))


def read_pair(row: Any) -> tuple[str, tuple[Conversation, Conversation]]:
    """Return what is read, the chosen and the rejected conversation: they begin with one prompt.

    It is in a column of its own, at the start of both lists of turns, or both. Two texts without
    such a column are split where they begin to differ.
    """
    if not isinstance(row, dict) or not {"chosen", "rejected"} <= {*row}:
        raise ValueError("it has no chosen and rejected")
    column = next((name for name in (*PROMPTS, "conversations") if row.get(name)), "")
    prompt = []
    if as_turns(row["chosen"], "assistant")[0]["role"] in OPENING:  # a whole conversation
        prompt = as_turns(row[column], "user")[-1:] if column else []
        row = {name: value for name, value in row.items() if name != column}
        column = ""
    elif not column:
        texts = [as_turns(row[side], "assistant")[0]["content"] for side in ("chosen", "rejected")]
        if texts != [row["chosen"], row["rejected"]]:
            raise ValueError(
                "it has no prompt: give it in a column prompt, or as turns of both sides"
            )
        num = split_at(*texts)
        split = (read_conversation(row | {"text": text}, "", "text") for text in texts)
        chosen, rejected = (side._replace(num_prompt=num) for side in split)
        return SPLIT, (chosen, rejected)
    chosen, rejected = (read_conversation(row, column, side) for side in ("chosen", "rejected"))
    num = num_equal(comparable(chosen.turns), comparable(rejected.turns))
    num = max(0, min(num, len(chosen.turns) - 1, len(rejected.turns) - 1))
    has_prompt = not prompt or comparable(prompt)[0] in comparable(chosen.turns[:num])
    if not has_prompt or any(x.turns[num]["role"] in OPENING for x in (chosen, rejected)):
        raise ValueError("chosen and rejected have different prompts: give both the same one")
    turns = chosen.turns[:num] + rejected.turns[num:]
    both = chosen._replace(num_prompt=num), rejected._replace(num_prompt=num, turns=turns)
    return "chosen and rejected", both


def split_at(chosen: str, rejected: str) -> int:
    """Return where the prompt of two texts ends, by the rule of extract_prompt of TRL.

    It is their first difference, or the space before it, and each answer has a letter or more.
    """
    num = max(0, min(num_equal(chosen, rejected), len(chosen) - 1, len(rejected) - 1))
    return num - (chosen[:num][-1:] == " ")


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


def sample_prompts(pairs: ChatSets, most: int = 2) -> dict[str, list[int]]:
    """Return the tokens before the answer of a few evaluated pairs, by what to call them."""
    found: dict[str, list[int]] = {}
    for pair in pairs.eval_set[:most]:
        found |= name_prompt(pairs.tokenizer, pair.chosen)
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
    lost = max(base.values()) - now["chosen"]
    if now["chosen"] < base["chosen"] - 1:
        what = "chosen answers became unlikely"
    elif max(now.values()) < max(base.values()) - 1 and lost > log(2) * num_tokens:
        what = "neither answer is likely any more"
    else:
        return ""
    numbers = (f"{x['chosen']:.4g} and of rejected {x['rejected']:.4g}" for x in (now, base))
    return (
        f"{what}: the mean log-probability of chosen is {', by the base '.join(numbers)}: "
        "try --sft-weight 1, a lower --learning-rate or fewer steps"
    )


def add_reference(
    accelerator: Accelerator,
    model: nn.Module,
    sets: Sequence[list],
    collate: Callable[[list[Pair]], tuple],
    compute: Callable[[Any], torch.Tensor],
) -> str:
    """Give each pair, in place, its row of compute(collate(pairs)); return their hash.

    The rows are computed once for these weights and pairs, and kept among the caches of `datasets`,
    so that a resume has the same ones, and so has any number of processes. The hash is that of the
    weights and the pairs. Every process must call this, before accelerator.prepare.

    Args:
        model: whose weights `compute` uses. Afterwards it is in training mode.
        sets: lists of pairs.
        collate: makes tensors of pairs; they are moved to the device of the process.
        compute: returns (n, 2), float32, for n pairs, without gradients and in evaluation mode.
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
