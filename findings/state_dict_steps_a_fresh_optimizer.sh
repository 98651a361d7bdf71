#!/usr/bin/env bash
# torch 2.14.1: get_state_dict of torch.distributed.checkpoint takes a step of an optimizer that has no state.
#
# One would guess that asking for a state dict reads it and changes nothing. For an optimizer that has
# not been stepped yet, torch.distributed.checkpoint.state_dict.get_state_dict calls its step() once,
# with gradients of zero and a learning rate of zero, so that there is a state to return. The weights
# stay, but AdamW then counts that step: the bias correction of each later step is that of the step
# after it, hooks on step() have been called, and training gives other weights than without the
# question. It happens where a checkpoint is written before the first step, to try the disk or to have
# one at step 0. The page of get_state_dict does not say so; the comment of the private function
# _init_optim_state in torch/distributed/checkpoint/state_dict.py does, for the case of loading.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-cache-dir torch==2.14.1 numpy==2.4.6
cat > "$folder/ask.py" <<'PYTHON'
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict


def train(ask: bool) -> tuple[int, float, torch.Tensor]:
    """Three steps; return the calls of step(), the step that AdamW counts, and the weights."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    if ask:
        before = model.weight.clone()
        get_state_dict(model, optimizer)
        assert torch.equal(before, model.weight)
    for number in range(3):
        optimizer.zero_grad()
        (model(torch.full((4, 3), 1.0 + number)) ** 2).mean().backward()
        optimizer.step()
    counted = optimizer.state[model.weight]["step"].item()
    return len(calls), counted, model.weight.detach()


plain, asked = train(ask=False), train(ask=True)
print("torch", torch.__version__)
print("not asked: calls of step()", plain[0], "counted", plain[1], "weights", plain[2].tolist())
print("asked:     calls of step()", asked[0], "counted", asked[1], "weights", asked[2].tolist())
assert plain[:2] == (3, 3.0) and asked[:2] == (4, 4.0), (plain, asked)
assert not torch.allclose(plain[2], asked[2], atol=1e-4)
PYTHON
"$folder/venv/bin/python" "$folder/ask.py"
