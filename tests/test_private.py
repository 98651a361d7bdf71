"""The private names of torch and Accelerate that the kit uses: a release that changes one fails."""

import ast
import sys
from collections.abc import Callable

from trainkit import private

import torch
from accelerate import Accelerator
from conftest import ROOT
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader


def test_accelerate_keeps_what_it_prepared_in_order(accelerator: Accelerator) -> None:
    models = [nn.Linear(1, 1), nn.Linear(2, 2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    schedulers = [LambdaLR(optimizer, lambda step: 1.0) for optimizer in optimizers]
    loaders = [DataLoader(range(4)), DataLoader(range(2))]
    made = accelerator.prepare(*models, *optimizers, *schedulers, *loaders)
    assert private.prepared_models(accelerator) == models
    assert private.prepared_optimizers(accelerator) == list(made[2:4])
    assert private.prepared_schedulers(accelerator) == list(made[4:6])
    assert private.prepared_loaders(accelerator) == list(made[6:])


def test_no_other_module_uses_a_private_name_of_another_package() -> None:
    folders = ("trainkit", "trainkit/*", "examples", ".")
    for path in (path for folder in folders for path in ROOT.glob(f"{folder}/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Attribute):
                own = ast.unparse(node.value) in ("self", "cls", "os", "super()")
                names = [] if own else [node.attr]
            elif isinstance(node, ast.ImportFrom):
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            private = [n for n in names if n.startswith("_") and not n.endswith("__")]
            assert not private or path.stem == "private", (path, node.lineno, private)


def test_optimizers_work_without_the_compiler_and_call_their_hooks(
    in_fresh_process: Callable,
) -> None:
    in_fresh_process("""
import sys, torch
from trainkit import private
weight = torch.ones(3, requires_grad=True)
private.skip_the_compiler()
calls = []
for kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
    optimizer = kind([weight], lr=0.1, fused=True)
    optimizer.register_step_post_hook(lambda *args: calls.append(kind))
    state = optimizer.state_dict()
    for step in range(2):
        weight.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.load_state_dict(state)
assert len(calls) == 6, calls
assert "torch._dynamo" not in sys.modules, "the compiler was imported"
""")


STEPS = """
import torch
weight = torch.linspace(0, 1, 50).requires_grad_()
optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
for step in range(5):
    weight.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_numbers_are_the_same_without_the_compiler(in_fresh_process: Callable) -> None:
    plain: dict[str, torch.Tensor] = {}
    exec(STEPS, plain)
    assert "torch._dynamo" in sys.modules  # this process is as torch made it
    in_fresh_process(
        "from trainkit import private\nprivate.skip_the_compiler()"
        + STEPS
        + "import sys\nassert 'torch._dynamo' not in sys.modules and weight.tolist() == plain",
        plain=plain["weight"].tolist(),
    )


NO_SEARCH = """
import sys, importlib.util, torch
from accelerate import Accelerator
from trainkit import private
private.skip_sharded_check()
private.skip_lookups()
weight = torch.ones(3, requires_grad=True)
accelerator = Accelerator(cpu=True)
accelerator.prepare(torch.nn.Linear(1, 1))
assert "torch.distributed.tensor" not in sys.modules, "it was imported"
optimizer = accelerator.prepare(torch.optim.SGD([weight], lr=0.1))
def step():
    weight.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
step()
def find_spec(name, *args):
    raise AssertionError(f"searched for {name}")
find_package, importlib.util.find_spec = importlib.util.find_spec, find_spec
step()
importlib.util.find_spec = find_package
import accelerate.accelerator, torch.distributed.tensor
assert accelerate.accelerator.model_has_dtensor(torch.nn.Linear(1, 1)) is False
del accelerate.accelerator.model_has_dtensor, accelerate.optimizer.is_lomo_available
private.skip_sharded_check()  # the plain way where the target is gone
private.skip_lookups()
"""


def test_a_start_looks_for_no_sharded_weights_and_a_step_for_no_package(
    in_fresh_process: Callable,
) -> None:
    in_fresh_process(NO_SEARCH)
