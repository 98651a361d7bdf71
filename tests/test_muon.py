"""The steps of Muon are those of its formula, and of AdamW where a weight is no hidden matrix."""

import math

import pytest
import torch
from torch import nn

from trainkit.numbers.muon import COEFFICIENTS, Muon

RATE, DECAY, MOMENTUM = 0.02, 0.3, 0.8


def net() -> nn.Sequential:
    """Of its hidden matrices one is a convolution's, one is tall and one is wide."""
    torch.manual_seed(0)
    convolutions = nn.Conv2d(1, 3, 3), nn.Conv2d(3, 4, 3)
    linear = nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 5), nn.Linear(5, 2)
    return nn.Sequential(*convolutions, nn.Flatten(), *linear).double()


def stretched(matrix: torch.Tensor) -> torch.Tensor:
    """Three iterations of Newton and Schulz, on the singular values themselves."""
    u, s, v = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
    a, b, c = COEFFICIENTS
    for _ in range(3):
        s = a * s + b * s**3 + c * s**5
    return u * s @ v


@pytest.mark.parametrize("in_groups", [False, True])
def test_a_step_is_that_of_the_formula_and_of_adamw_for_what_is_left(in_groups):
    model, same = net(), net()
    parameters = [*model.parameters()]
    groups = [{"params": parameters[:3]}, {"params": parameters[3:], "weight_decay": 0.0}]

    def make() -> Muon:
        return Muon(groups if in_groups else parameters, RATE, DECAY, MOMENTUM, fused=True)

    muon = make()
    decay = {name: DECAY for name, _ in same.named_parameters()}
    if in_groups:
        decay |= dict.fromkeys([*decay][3:], 0.0)
    hidden = dict.fromkeys(("1.weight", "3.weight", "5.weight"), 0.0)  # their momentum
    others = [
        {"params": [weight], "weight_decay": decay[name]}
        for name, weight in same.named_parameters()
        if name not in hidden
    ]
    adamw = torch.optim.AdamW(others, RATE)
    for step in range(4):
        x = torch.randn(7, 1, 5, 5, dtype=torch.float64)
        for each in (model, same):
            each.zero_grad()
            each(x).square().sum().backward()
        if step == 2:  # a state that is loaded is the same
            state, muon = muon.state_dict(), make()
            muon.load_state_dict(state)
        muon.step()
        adamw.step()
        with torch.no_grad():
            for name in hidden:
                weight = same.get_parameter(name)
                hidden[name] = MOMENTUM * hidden[name] + (1 - MOMENTUM) * weight.grad
                update = (1 - MOMENTUM) * weight.grad + MOMENTUM * hidden[name]
                matrix = stretched(update.flatten(1))
                weight *= 1 - RATE * decay[name]
                weight -= RATE * 0.2 * math.sqrt(max(matrix.shape)) * matrix.view_as(weight)
        torch.testing.assert_close(model.state_dict(), same.state_dict(), rtol=0, atol=1e-7)


def test_without_hidden_matrices_it_is_adamw():
    losses = []
    for kind in (Muon, torch.optim.AdamW):
        model = net()[3:6]
        optimizer = kind(model.parameters(), lr=RATE, weight_decay=DECAY)
        for _ in range(3):
            losses.append(model(torch.ones(1, 4).double()).square().sum())
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
    assert losses[:3] == losses[3:]
