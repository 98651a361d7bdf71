"""Let samples of tokens share rows, so that hardly anything is computed for padding."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch.utils.data import Dataset

from trainkit.errors import UsageError
from trainkit.language.templates import Sample
from trainkit.repairs.private_names import is_stateful

SIZES = [13, 9, 11]  # of the samples with which a model is tried


def best_fit(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Return the indices of the samples in each row; none may be longer than `size`.

    The longest sample is placed first, each in the row in which it leaves the least room; among
    equals the lower index comes first. So the rows depend on the lengths alone.
    """
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # what is free in each row, and its number, sorted
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        fitting = bisect_left(rooms, (lengths[index], 0))
        if fitting == len(rooms):
            rooms.append((size, len(rows)))
            rows.append([])
        room, row = rooms.pop(fitting)
        rows[row].append(index)
        insort(rooms, (room - lengths[index], row))
    return rows


class Packed(Dataset):
    """Rows (tokens, learned, positions) of at most `size` tokens, each of whole samples.

    The positions, int64, start anew with each sample. From this transformers sees where a sample
    begins and lets no token attend to another sample. Nothing is learned of a sample's first token,
    so no token is predicted from another sample.
    """

    def __init__(self, samples: Sequence[Sample], size: int):
        self.samples = samples
        self.size = size
        self.rows = best_fit([len(tokens) for tokens, _ in samples], size)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, ...]:
        samples = [self.samples[index] for index in self.rows[row]]
        tokens, learned = (torch.cat(parts) for parts in zip(*samples, strict=True))
        return tokens, learned, torch.cat([torch.arange(len(each)) for each, _ in samples])

    def describe(self) -> str:
        """Return a line for the plan that says how full the rows are."""
        num_tokens = sum(len(tokens) for tokens, _ in self.samples)
        share = num_tokens / (self.size * max(1, len(self)))
        return (
            f"{len(self.samples)} samples in {len(self)} rows of {self.size} tokens, "
            f"{share:.1%} full"
        )


def check_packing(accelerator: Accelerator, model: Any) -> None:
    """Raise UsageError if this model does not keep the samples of a row apart.

    Every process must call this, before accelerator.prepare; the main process decides, because only
    it may have the weights.
    """
    is_apart = torch.zeros((), device=accelerator.device)
    if accelerator.is_main_process:
        is_apart += keeps_apart(model)
    if not broadcast(is_apart):
        raise UsageError(
            f"--pack: this model ({model.config.model_type}) does not keep the samples of a row "
            "apart by their position_ids: leave --pack out"
        )


def keeps_apart(model: Any) -> bool:
    """Return whether the last of three samples in a row has the logits that it has alone.

    They may be off by rounding, and must have no gradient at all by the samples before. A model in
    which a state goes from token to token is not tried, nor one that takes no position_ids.
    """
    tokens = torch.arange(3, 3 + sum(SIZES), device=model.device)[None]
    tokens %= len(model.get_input_embeddings().weight)
    positions = torch.cat([torch.arange(size, device=model.device) for size in SIZES])[None]
    last = SIZES[-1]
    was_training = model.training
    model.eval()
    try:
        alone = model(input_ids=tokens[:, -last:], use_cache=False).logits[0]
        embedded = model.get_input_embeddings()(tokens).detach().requires_grad_()
        how = {"position_ids": positions, "use_cache": False}
        row = model(inputs_embeds=embedded, **how).logits[0, -last:]
        (gradient,) = torch.autograd.grad(row.float().square().sum(), embedded)
    except (TypeError, ValueError, RuntimeError):
        return False
    finally:
        model.train(was_training)
    most = 0.001 if row.dtype == torch.float32 else 0.1  # of how much logits differ
    is_equal = (row - alone).abs().max() <= most * alone.std()
    return not is_stateful(model) and bool(is_equal) and not gradient[0, :-last].any()
