"""Let samples of tokens share rows, so that little or nothing is computed for padding."""

import contextlib
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from functools import partial
from heapq import heapreplace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import nn
from torch.utils.data import Dataset

from trainkit.errors import UsageError
from trainkit.language.conversations import ChatSets
from trainkit.language.templates import Sample
from trainkit.repairs.private_names import attends_by_sdpa, is_stateful
from trainkit.repairs.replaced import computing_in
from trainkit.run.evaluation import evaluating

SIZES = [13, 9, 11]  # of the samples with which a model is tried


def best_fit(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Return the indices of the samples in each row, so that no row is longer than `size`.

    The longest sample is placed first, each in the row in which it leaves the least room; among
    equals the lower index comes first. So the rows depend on the lengths alone. No sample may be
    longer than `size`.
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


def join(samples: Sequence[Sample]) -> tuple[torch.Tensor, ...]:
    """Return the row (tokens, learned, positions) of these samples, each of shape (length,).

    The positions, int64, start anew with each sample. From this transformers sees where a sample
    begins and lets no token attend to another sample. Nothing is learned of a sample's first token,
    so no token is predicted from another sample.
    """
    tokens, learned = (torch.cat(parts) for parts in zip(*samples, strict=True))
    return tokens, learned, torch.cat([torch.arange(len(row)) for row, _ in samples])


def share_rows(samples: list[Sample], size: int) -> Sequence[tuple[torch.Tensor, ...]]:
    """Return a batch as rows of at most `size` tokens, in which the samples are joined.

    Of the batch in as many rows as samples, in half as many and so on, it takes the first in which
    at most 2 % is padding, or else the one with the least. The longest sample is placed first, each
    into the row that is shortest by then.
    """
    lengths = [len(tokens) for tokens, _ in samples]
    longest_first = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    best: list[list[int]] = []
    num_computed = len(samples) * max(lengths)
    num_rows = len(samples) // 2
    while num_rows and num_computed > 1.02 * sum(lengths):
        rows: list[list[int]] = [[] for _ in range(num_rows)]
        sums = [(0, number) for number in range(num_rows)]  # of each row, as a heap
        for index in longest_first:
            total, number = sums[0]
            rows[number].append(index)
            heapreplace(sums, (total + lengths[index], number))
        longest = max(sums)[0]
        if longest <= size and num_rows * longest < num_computed:
            best = rows
            num_computed = num_rows * longest
        num_rows //= 2
    return [join([samples[n] for n in row]) for row in best] or samples


class Packed(Dataset):
    """Rows of at most `size` tokens, filled with whole samples by best_fit; see join()."""

    def __init__(self, samples: Sequence[Sample], size: int):
        self.samples = samples
        self.rows = best_fit([len(tokens) for tokens, _ in samples], size)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, ...]:
        return join([self.samples[index] for index in self.rows[row]])


def pack_sets(sets: ChatSets, size: int) -> ChatSets:
    """Pack both sets into rows of at most `size` tokens, and say in the plan how full they are."""
    train_set, eval_set = (Packed(samples, size) for samples in sets[:2])
    num_samples, num_rows = len(sets.train_set), len(train_set)
    share = sum(len(tokens) for tokens, _ in sets.train_set) / (size * max(1, num_rows))
    line = f"{num_samples} samples in {num_rows} rows of {size} tokens, {share:.1%} full"
    return sets._replace(train_set=train_set, eval_set=eval_set, plan=sets.plan | {"packed": line})


def attend_by_sample(model: Any) -> None:
    """Let a model that attends by PyTorch's own function do so one sample of a row after the other.

    On a CPU that function computes what the mask then leaves out: of a row of 2,048 tokens with
    samples of 160 about nine tenths. Elsewhere, and without packed rows, nothing changes.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    if attends_by_sdpa(model):
        AttentionInterface.register("by_sample", _attend)
        AttentionMaskInterface.register("by_sample", sdpa_mask)
        model.set_attn_implementation("by_sample")


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None = None,
    **how: Any,
) -> tuple[torch.Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    length = query.shape[2]
    if (
        position_ids is None
        or attention_mask is None
        or position_ids.shape != (len(query), length)
        or attention_mask.shape[2:] != (length, length)
        or not (len(query) and key.shape[2] == length and query.device.type == "cpu")
    ):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **how)
    # The mask also says what a sample may see of itself, which may be only the last few tokens.
    mask = attention_mask.expand(len(query), *attention_mask.shape[1:])
    rows = []
    for row, positions in enumerate(position_ids):
        # Each sample begins with 0. The padding, whose positions are all 0, is one part.
        is_start = (positions[1:] == 0) & (positions[:-1] != 0)
        starts = 1 + is_start.nonzero()[:, 0]
        parts = (x[row : row + 1].tensor_split(starts, dim=2) for x in (query, key, value, mask))
        outputs = []
        for number, (q, k, v, m) in enumerate(zip(*parts, strict=True)):
            own = m.tensor_split(starts, dim=3)[number]
            outputs.append(sdpa_attention_forward(module, q, k, v, own, **how)[0])
        rows.append(torch.cat(outputs, dim=1))
    return torch.cat(rows), None


def row_size(
    accelerator: Accelerator, model: Any, size: int, pack: bool
) -> tuple[int, dict[str, str]]:
    """Return the size of rows for share_rows, 0 if samples share no rows, and lines for the plan.

    With `pack` the rows are shared already: raises UsageError if the model does not take that.
    Every process must call this, before accelerator.prepare.
    """
    if keeps_apart(accelerator, model):
        attend_by_sample(model)
        return 0 if pack else size, {}
    lacks = f"this model ({model.config.model_type}) does not keep the samples of a row apart"
    if pack:
        raise UsageError(f"--pack: {lacks} by their position_ids: leave --pack out")
    return 0, {"padded": f"{lacks}, so each has a row of its own"}


@torch.no_grad()
def keeps_apart(accelerator: Accelerator, model: Any) -> bool:
    """Return whether a model keeps the samples of a row apart by their position_ids.

    Each of three samples in a row must have the logits that it has alone, up to rounding. So that a
    leak shows, whatever the type and the size of the weights, the model computes in float32 with
    weights that are not small (see enlarged_weights). Models in which a state goes from token to
    token, as transformers marks them, are not tried. Every process must call this, before
    accelerator.prepare; the main process decides, because only it may have the weights.
    """
    is_apart = torch.zeros((), device=accelerator.device)
    if accelerator.is_main_process and not is_stateful(model):
        num_tokens = len(model.get_input_embeddings().weight)
        tokens = (7 * torch.arange(sum(SIZES), device=model.device) + 3) % num_tokens
        positions = torch.cat([torch.arange(size, device=model.device) for size in SIZES])
        # It takes no position_ids, or cannot compute in float32.
        refusals = contextlib.suppress(TypeError, ValueError, RuntimeError)
        with evaluating([model]), enlarged_weights(model), refusals:
            alone = [
                model(input_ids=sample[None], use_cache=False).logits[0]
                for sample in tokens.split(SIZES)
            ]
            inputs = {"input_ids": tokens[None], "position_ids": positions[None]}
            change = model(**inputs, use_cache=False).logits[0] - torch.cat(alone)
            # Seen in 40 architectures: at most 5e-6 of the deviation without a leak, 1 with one.
            is_apart += change.abs().max() <= torch.cat(alone).std() / 1000
    return bool(broadcast(is_apart))


@contextlib.contextmanager
def enlarged_weights(model: nn.Module) -> Iterator[None]:
    """Let each layer compute in float32, with matrices as large as those of a trained model.

    Weights are replaced while their layer computes, so that only one layer is in memory twice.
    Quantised weights stay as they are, and are computed with in float32.
    """
    layers = [part for x in model.modules() if isinstance(x, nn.ModuleList) for part in x]
    in_layers = {id(part) for layer in layers for part in layer.modules()}
    inner = {id(part) for layer in layers for part in layer.modules() if part is not layer}
    parts = [(layer, True) for layer in layers if id(layer) not in inner]
    parts += [(part, False) for part in model.modules() if id(part) not in in_layers]
    with contextlib.ExitStack() as hooks:
        hooks.enter_context(computing_in(torch.float32, model))
        for part, recurse in parts:
            weights = [x for x in part.parameters(recurse) if x.is_floating_point()]
            originals: list[torch.Tensor] = []
            enlarge = partial(_enlarge, weights, originals)
            hooks.callback(part.register_forward_pre_hook(enlarge).remove)
            restore = partial(_restore, weights, originals)
            hooks.callback(part.register_forward_hook(restore, always_call=True).remove)
        yield


def _enlarge(weights: list[nn.Parameter], originals: list[torch.Tensor], *_: Any) -> None:
    originals[:] = [weight.data for weight in weights]
    for weight in weights:
        data = weight.data.float()
        if data.ndim > 1:  # so that what it computes is about as large as its inputs
            size = data.square().mean().sqrt().clamp(min=torch.finfo(data.dtype).tiny)
            data = data * (data.shape[-1] ** -0.5 / size).clamp(min=1)
        weight.data = data


def _restore(weights: list[nn.Parameter], originals: list[torch.Tensor], *_: Any) -> None:
    for weight, data in zip(weights, originals, strict=True):
        weight.data = data
