"""The losses of tokens from a vocabulary so large that their logits would fill the memory."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

MAX_LOGITS = 2**24  # numbers, 64 MiB in float32: more than these are computed in parts


def token_losses(
    model: nn.Module, targets: torch.Tensor, places: torch.Tensor, **inputs: Any
) -> torch.Tensor:
    """Return F.cross_entropy(logits, targets, reduction="none"), in float32, (n,).

    The logits are those of model(**inputs) at these places alone. If there are more than MAX_LOGITS
    of them, and allow_parts has found that the head may compute the losses, they are computed in
    parts, and no logits are kept.

    Args:
        model: a transformers model for causal language modelling, also as prepared by Accelerate.
        targets: int64 (n,).
        places: int64 (n,), their indices in input_ids.flatten(), without repetitions, sorted. Take
            them from tensors on the host: to count what a mask on a GPU selects would wait for it.
        inputs: input_ids and others.
    """
    head, tokens = _head_of(model), inputs["input_ids"]
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


def allow_parts(model: nn.Module) -> None:
    """Let the head compute token_losses, if the model returns its head's output as it is.

    Some models scale or cap their logits: their own logits are used. It runs the model's forward
    with known numbers in place of those of the layers and of the head. Call this before
    accelerator.prepare.
    """
    head, owner = _head_of(model), _owner_of(model)
    if type(head) is not nn.Linear or owner.base_model is owner:
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


def _losses_in_parts(head: nn.Linear, targets: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    kind = states.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype
    with torch.autocast(kind, enabled=False):
        return _LossesInParts.apply(states, head.weight, head.bias, targets, dtype)


class _LossesInParts(torch.autograd.Function):
    """F.cross_entropy(F.linear(states, weight, bias), targets, reduction="none"), in float32.

    It computes the logits of a part of the tokens at a time, again in backward, and keeps none.
    torch's own F.linear_cross_entropy, of torch 2.13 and later, rounds each loss to the type of the
    states, and in bfloat16 it takes more memory and on a CPU twice the time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        ctx.save_for_backward(states, weight, bias, targets)
        ctx.dtype = dtype
        weight, bias = _cast(weight, dtype), _cast(bias, dtype)
        parts = _parts(states, weight)
        return torch.cat(
            [_losses_of(states[part].to(dtype), weight, bias, targets[part]) for part in parts]
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, weight, bias, targets = ctx.saved_tensors
        needs_states, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        of_states = torch.zeros_like(states) if needs_states else None
        # In float32, because in bfloat16 each part that is added would round the sum again.
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        of_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        weight, bias = _cast(weight, ctx.dtype), _cast(bias, ctx.dtype)
        for part in _parts(states, weight):
            inputs = states[part].to(ctx.dtype)
            of_logits = _gradient_of_logits(inputs, weight, bias, targets[part], grad[part])
            if of_states is not None:
                of_states[part] = of_logits @ weight
            if of_weight is not None and of_weight.dtype == ctx.dtype:
                of_weight.addmm_(of_logits.T, inputs)  # no memory for the product
            elif of_weight is not None:
                of_weight += of_logits.T @ inputs
            if of_bias is not None:
                of_bias += of_logits.sum(0)
            del of_logits  # before the next part is computed
        return of_states, of_weight, of_bias, None, None


def _losses_of(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    log_probs = F.linear(inputs, weight, bias).log_softmax(1, dtype=torch.float32)
    return F.nll_loss(log_probs, targets, reduction="none")


def _gradient_of_logits(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    grad: torch.Tensor,
) -> torch.Tensor:
    """Return grad * (probabilities - 1 at the target), in the type of the inputs."""
    probs = F.linear(inputs, weight, bias).softmax(1, dtype=torch.float32)
    probs.scatter_add_(1, targets[:, None], -torch.ones_like(grad[:, None]))
    return probs.mul_(grad[:, None]).to(inputs.dtype)


def _cast(tensor: Any, dtype: torch.dtype) -> Any:
    return None if tensor is None else tensor.to(dtype)


def _parts(states: torch.Tensor, weight: torch.Tensor) -> list[slice]:
    """Slices of the tokens: of each, the logits are MAX_LOGITS or an eighth of the head's weights.

    Fewer tokens than that would read and write the weights and their gradient too often.
    """
    size = max(MAX_LOGITS // len(weight), weight.shape[1] // 8, 1)
    return [slice(start, start + size) for start in range(0, len(states), size)]
