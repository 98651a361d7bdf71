"""The losses of tokens from a vocabulary so large that their logits would fill the memory."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

MAX_LOGITS = 2**24  # numbers: more than these are computed in parts, 64 MiB each in float32


def token_losses(model: nn.Module, targets: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """Return F.cross_entropy(model(**inputs).logits, targets, reduction="none"), in float32.

    If there are many logits, and allow_parts has found that the head may compute the losses, then
    the logits are computed in parts, twice, and never kept: then the logits of a large vocabulary
    take 64 MiB, and their part of the step a third more time.

    Args:
        model: a transformers model for causal language modelling, also as prepared by Accelerate.
        targets: int64 (n,), as many as the model returns logits for. See its logits_to_keep.
    """
    head = _head_of(model)
    if not getattr(head, "may_have_parts", False) or len(targets) * len(head.weight) <= MAX_LOGITS:
        return F.cross_entropy(model(**inputs).logits.float(), targets, reduction="none")
    # To DDP and to FSDP it is a head like any other, which returns one number for each token.
    head.forward = partial(_losses_of_head, head, targets)
    try:
        return model(**inputs).logits.squeeze(1)
    finally:
        del head.forward


def allow_parts(model: nn.Module) -> None:
    """Let token_losses compute in parts, if the model returns its head's output as it is.

    Some models scale or cap their logits: their own logits are used. It runs the model's forward
    with known numbers in place of those of the layers and of the head. Call this before
    accelerator.prepare.
    """
    head, owner = _head_of(model), _owner_of(model)
    if not isinstance(head, nn.Linear) or owner.base_model is owner:
        return
    from transformers.modeling_outputs import MoeModelOutputWithPast

    logits = torch.linspace(-99, 99, 2 * head.out_features).view(1, 2, -1)
    found = MoeModelOutputWithPast(last_hidden_state=torch.zeros(1, 2, head.in_features))
    found.cross_attentions = None  # which some models read
    owner.base_model.forward = lambda *_, **__: found
    head.forward = lambda _: logits
    try:
        returned = owner.forward(input_ids=torch.zeros(1, 2, dtype=torch.int64)).logits
        head.may_have_parts = torch.equal(returned, logits)
    except (TypeError, AttributeError, IndexError):  # it reads more of what the layers return
        head.may_have_parts = False
    finally:
        del owner.base_model.forward, head.forward


def _owner_of(model: nn.Module) -> Any:
    return next(each for each in model.modules() if hasattr(each, "get_output_embeddings"))


def _head_of(model: nn.Module) -> Any:
    return _owner_of(model).get_output_embeddings()


def _losses_of_head(head: nn.Linear, targets: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    kind = states.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype
    bias = None if head.bias is None else head.bias.to(dtype)
    with torch.autocast(kind, enabled=False):
        losses = _LossesInParts.apply(states.to(dtype), head.weight.to(dtype), bias, targets)
    return losses[:, None]


class _LossesInParts(torch.autograd.Function):
    """F.cross_entropy(F.linear(states, weight, bias).float(), targets, reduction="none").

    Args:
        states: (n, width).
        weight: (num_tokens, width).
        bias: (num_tokens,) or None.
        targets: int64 (n,).
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
    ) -> torch.Tensor:
        ctx.size = max(1, MAX_LOGITS // len(weight))
        chosen, sums = [], []
        for part, wanted in zip(states.split(ctx.size), targets.split(ctx.size), strict=True):
            logits = F.linear(part, weight, bias).float()
            sums.append(logits.logsumexp(1))
            chosen.append(logits.gather(1, wanted[:, None]).squeeze(1))
        ctx.save_for_backward(states, weight, bias, targets, sums := torch.cat(sums))
        return sums - torch.cat(chosen)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, weight, bias, targets, sums = ctx.saved_tensors
        of_states = torch.empty_like(states)
        of_weight = torch.zeros_like(weight).float() if ctx.needs_input_grad[1] else None
        of_bias = torch.zeros_like(bias).float() if ctx.needs_input_grad[2] else None
        for start in range(0, len(states), ctx.size):
            part = slice(start, start + ctx.size)
            logits = F.linear(states[part], weight, bias).float()
            slopes = logits.sub_(sums[part, None]).exp_()  # the probabilities
            slopes.scatter_add_(1, targets[part, None], -torch.ones_like(slopes[:, :1]))
            slopes = slopes.mul_(grads[0][part, None]).to(states.dtype)
            torch.mm(slopes, weight, out=of_states[part])
            if of_weight is not None:
                of_weight += slopes.T @ states[part]
            if of_bias is not None:
                of_bias += slopes.sum(0)
        of_both = (each if each is None else each.to(weight.dtype) for each in (of_weight, of_bias))
        return of_states, *of_both, None
