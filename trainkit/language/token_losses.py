"""The losses of tokens from a vocabulary so large that their logits would fill the memory."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

MAX_LOGITS = 2**24  # numbers, 64 MiB in float32: more than these are computed in parts
HAS_PARTS = hasattr(F, "linear_cross_entropy")  # torch 2.13 and later
PLAN = {} if HAS_PARTS else {"logits": f"kept, because torch {torch.__version__} is before 2.13"}


def token_losses(model: nn.Module, targets: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """Return F.cross_entropy(model(**inputs).logits, targets, reduction="none"), in float32.

    If there are many logits, and allow_parts has found that the head may compute the losses, torch
    computes them for 128 tokens at a time and keeps no logits. Under autocast each loss is then
    rounded to its type. Before torch 2.13 the logits are kept, and PLAN says so.

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
    if not HAS_PARTS or type(head) is not nn.Linear or owner.base_model is owner:
        return
    from transformers.modeling_outputs import MoeModelOutputWithPast

    logits = torch.linspace(-99, 99, 2 * head.out_features).view(1, 2, -1)
    output = MoeModelOutputWithPast(last_hidden_state=torch.zeros(1, 2, head.in_features))
    output.cross_attentions = None  # which some models read
    owner.base_model.forward = lambda *_, **__: output
    head.forward = lambda _: logits
    try:
        returned = owner.forward(input_ids=torch.zeros(1, 2, dtype=torch.int64)).logits
        head.may_have_parts = torch.equal(returned, logits)
    except (TypeError, AttributeError, IndexError):  # it reads more of what the layers return
        head.may_have_parts = False
    finally:
        del owner.base_model.forward, head.forward


def _owner_of(model: nn.Module) -> Any:
    return next(part for part in model.modules() if hasattr(part, "get_output_embeddings"))


def _head_of(model: nn.Module) -> Any:
    return _owner_of(model).get_output_embeddings()


def _losses_of_head(head: nn.Linear, targets: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    kind = states.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype
    # More at once would be a little faster and take more memory; torch's own choice is slower.
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=128)
    with torch.autocast(kind, enabled=False):
        losses = F.linear_cross_entropy(
            states.to(dtype),
            head.weight.to(dtype),
            targets,
            linear_bias=None if head.bias is None else head.bias.to(dtype),
            reduction="none",
            options=options,
        )
    return losses.float()[:, None]
