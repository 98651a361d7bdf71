"""The losses of tokens from a vocabulary so large that their logits would fill the memory."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

MAX_LOGITS = 2**24  # numbers, 64 MiB in float32: more than these are computed in parts


def token_losses(
    model: nn.Module, targets: torch.Tensor, places: torch.Tensor, **inputs: Any
) -> torch.Tensor:
    """Return F.cross_entropy(logits, targets, reduction="none"), in float32, (n,).

    The logits are those of model(**inputs) at these places alone. More than MAX_LOGITS of them are
    computed in parts and not kept, where allow_parts has allowed it.

    Args:
        model: a transformers model for causal language modelling, also as prepared by Accelerate.
        targets: int64 (n,).
        places: int64 (n,), their indices in input_ids.flatten(), without repetitions, sorted. Take
            them from tensors on the host: to count what a mask on a GPU selects would wait for it.
        inputs: input_ids and others.
    """
    head, tokens = _owner_and_head(model)[1], inputs["input_ids"]
    if not getattr(head, "may_have_parts", False):
        mask = torch.zeros(tokens.numel(), dtype=torch.bool, device=tokens.device)
        mask = mask.index_fill(0, places, True).view_as(tokens)
        logits = model(**inputs, logits_to_keep=mask).logits
        return F.cross_entropy(logits.float(), targets, reduction="none")

    def losses_of_head(states: torch.Tensor) -> torch.Tensor:
        states = states.reshape(tokens.numel(), head.in_features).index_select(0, places)
        if len(targets) * len(head.weight) > MAX_LOGITS:
            return _losses_in_parts(head, targets, states)[:, None]
        logits = nn.Linear.forward(head, states)
        return F.cross_entropy(logits.float(), targets, reduction="none")[:, None]

    # To DDP and to FSDP it is a head like any other, which returns one number for each token.
    head.forward = losses_of_head
    try:
        return model(**inputs).logits.squeeze(1)
    finally:
        del head.forward


def places_of(learned: torch.Tensor) -> torch.Tensor:
    """Return where learned[..., 1:].flatten() is true, int64.

    Call this where batches are made, on the host: to find them on a GPU would wait for it.
    """
    return learned[..., 1:].flatten().nonzero().squeeze(1)


def allow_parts(model: nn.Module) -> None:
    """Let the head compute token_losses, if the model returns its head's output as it is.

    Some models scale or cap their logits: their own logits are used. It runs the model's forward
    with known numbers in place of those of the layers and of the head. Call this before
    accelerator.prepare.
    """
    owner, head = _owner_and_head(model)
    if type(head) is not nn.Linear or owner.base_model is owner:
        return
    from transformers.modeling_outputs import MoeModelOutputWithPast

    logits = torch.linspace(-99, 99, 2 * head.out_features).view(1, 2, -1)
    output = MoeModelOutputWithPast(last_hidden_state=torch.zeros(1, 2, head.in_features))
    output.cross_attentions = None  # which some models read
    owner.base_model.forward = lambda *_, **__: output
    head.forward = lambda _: logits.clone()  # some models scale theirs in place
    try:
        returned = owner.forward(input_ids=torch.zeros(1, 2, dtype=torch.int64)).logits
        head.may_have_parts = torch.equal(returned, logits)
    except (TypeError, AttributeError, IndexError):  # it reads more of what the layers return
        head.may_have_parts = False
    finally:
        del owner.base_model.forward, head.forward


def _owner_and_head(model: nn.Module) -> tuple[Any, Any]:
    owner = next(part for part in model.modules() if hasattr(part, "get_output_embeddings"))
    return owner, owner.get_output_embeddings()


def _losses_in_parts(head: nn.Linear, targets: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Compute the losses of some tokens at a time, and again in backward, so no logits are kept.

    torch's own F.linear_cross_entropy rounds each loss to the type of the states.
    """
    kind = states.device.type
    is_cast = torch.is_autocast_enabled(kind)

    def losses_of(states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # Without the cache each part casts the weights for itself, so that the gradients of all
        # parts are added up in the type of the weights: in bfloat16 each sum would be rounded.
        with torch.autocast(kind, enabled=is_cast, cache_enabled=False):
            logits = nn.Linear.forward(head, states)
        return F.cross_entropy(logits.float(), targets, reduction="none")

    # Fewer tokens would read and write the weights and their gradient too often.
    size = max(MAX_LOGITS // head.out_features, head.in_features // 8, 1)
    how = {"use_reentrant": False, "preserve_rng_state": False}
    parts = zip(states.split(size), targets.split(size), strict=True)
    return torch.cat([checkpoint(losses_of, *part, **how) for part in parts])
