"""Muon: hidden matrices move by orthogonal steps, all other weights as with AdamW."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.adamw import adamw

# One iteration makes a * s + b * s**3 + c * s**5 of each singular value s. With these, which are
# Jordan's, a small s grows by 3.4 times, and one that has grown stays between 0.7 and 1.2.
COEFFICIENTS = 3.4445, -4.7750, 2.0315
BETAS, EPSILON = (0.9, 0.999), 1e-8  # those of torch's AdamW


class Muon(torch.optim.Optimizer):
    """Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon/), with AdamW for what is left.

    Hidden matrices are the weights of two and more dimensions without the first and the last of
    them, which read the input and write the output; a kernel of a convolution counts as a matrix
    with a row for each output. An orthogonal step is as long as one of AdamW (Liu et al. 2025,
    arXiv:2502.16982), so one learning rate and one weight decay serve all weights.

    A hidden matrix that is sharded is put together on each process for a moment. Every process must
    call step() if there is one.

    Args:
        parameters: of a model in their order, or groups of them, each of which may have its own
            "lr" and "weight_decay".
        momentum: of hidden matrices (Nesterov's).
        iterations: of Newton and Schulz, in a step of a hidden matrix.
        fused: whether AdamW's part is one kernel; None leaves it to torch.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        momentum: float = 0.9,
        iterations: int = 3,
        fused: bool | None = None,
    ):
        given = list[Any](parameters)
        if given and not isinstance(given[0], dict):
            given = [{"params": given}]
        given = [group | {"params": [*group["params"]]} for group in given]
        matrices = [x for group in given for x in group["params"] if x.ndim > 1 and x.requires_grad]
        hidden = {*matrices[1:-1]}
        groups = []
        for group in given:
            both = [[x for x in group["params"] if (x in hidden) == h] for h in (False, True)]
            options = {"betas": BETAS, "fused": fused}, {"momentum": momentum}
            groups += [group | o | {"params": p} for o, p in zip(options, both, strict=True) if p]
        self.iterations = iterations
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Make one step; a weight without a gradient stays as it is."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if "momentum" in group:
                for weight in weights:
                    self._step_hidden(weight, group)
            elif weights:
                self._step_others(weights, group)
        return loss

    def _step_hidden(self, weight: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        mean = state["momentum_buffer"].lerp_(weight.grad, 1 - group["momentum"])
        update = weight.grad.lerp(mean, group["momentum"])
        whole = update.full_tensor() if hasattr(update, "full_tensor") else update
        step = orthogonalise(whole.flatten(1), self.iterations)
        length = 0.2 * math.sqrt(max(step.shape))  # times that of a step whose entries are 1
        step = step.reshape(whole.shape)
        if whole is not update:
            from torch.distributed.tensor import distribute_tensor

            mesh, placements = update.device_mesh, update.placements
            step = distribute_tensor(step, mesh, placements, src_data_rank=None)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.sub_(step, alpha=group["lr"] * length)

    def _step_others(self, weights: list[torch.Tensor], group: dict[str, Any]) -> None:
        for weight in weights:
            if not self.state[weight]:
                device = weight.device if group["fused"] else "cpu"
                self.state[weight] = {
                    "step": torch.zeros((), dtype=torch.float32, device=device),
                    "exp_avg": torch.zeros_like(weight),
                    "exp_avg_sq": torch.zeros_like(weight),
                }
        states = [self.state[weight] for weight in weights]
        adamw(
            weights,
            [weight.grad for weight in weights if weight.grad is not None],
            *([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq")),
            [],
            [state["step"] for state in states],
            fused=group["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=EPSILON,
            maximize=False,
        )


def orthogonalise(matrix: torch.Tensor, iterations: int) -> torch.Tensor:
    """Bring the singular values of a matrix near 1, as far as this many iterations reach."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = (matrix.T if is_tall else matrix) / (matrix.norm() + 1e-7)  # the largest is at most 1
    for _ in range(iterations):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if is_tall else wide
