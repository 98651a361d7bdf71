"""The private names of torch and Accelerate that the kit uses: a release that changes one fails."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from conftest import ROOT


def nodes() -> Iterator[tuple[Path, ast.AST]]:
    """All of the kit and the scripts but trainkit/repairs."""
    for folder in ("trainkit", "trainkit/*", "examples", "."):
        for path in {*ROOT.glob(f"{folder}/*.py")} - {*(ROOT / "trainkit/repairs").glob("*.py")}:
            yield from ((path, node) for node in ast.walk(ast.parse(path.read_text())))


def test_no_other_module_imports_a_private_name_of_another_package():
    """Private attributes: ruff's SLF, see pyproject.toml."""
    for path, node in nodes():
        if isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found = [n for n in names if n.startswith("_") and not n.endswith("__")]
            assert not found, (path, node.lineno, found)


OWN = {"self", "args", "part", "progress", "run", "column", "table", "settings"}
OWN |= {"outcome", "step", "layer", "batches", "ctx", "chat"}
# What is set on an object of another package elsewhere: settings that are meant to be set.
SETTINGS = {
    "sys.stdout",
    "sys.stderr",
    "torch.backends.cuda.matmul.allow_tf32",
    "torch.backends.cudnn.allow_tf32",
    "Image.MAX_IMAGE_PIXELS",
    "plugin.activation_checkpointing",
    "shard.sync_files",
    "config.eos_token_id",
    "encoder.pooler",  # None, as transformers builds it without one
    "model.config",  # with its dropout, which the model was loaded without
    "model.generation_config",
    "written.generation_config",
    "head.forward",  # see trainkit/language/losses.py, which puts it back
    "owner.base_model.forward",
    "output.cross_attentions",
    "head.may_have_parts",
    "weight.grad",  # a sparse one, whose rows are added up over the processes
    "weight.data",  # see trainkit/checkpoints/sharded.py
    "wrap.subsequent_indent",
}


def test_no_other_module_replaces_what_belongs_to_another_package():
    for path, node in nodes():
        if not path.is_relative_to(ROOT / "trainkit"):
            continue
        if path.parent.name == "rehearse":  # its processes end with a rehearsal
            continue
        if isinstance(node, ast.Name):
            assert node.id not in ("setattr", "delattr"), (path, node.lineno)
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            name = ast.unparse(node)
            assert name.split(".")[0] in OWN or name in SETTINGS, (path, node.lineno, name)


def test_an_import_calls_nothing_and_changes_nothing():
    """What changes the whole process stands in functions, which trainkit.launch.startup calls.

    trainkit/__init__.py alone opens standard files that are closed, before any other file.
    """
    for path in [*ROOT.glob("*.py"), *(ROOT / "trainkit").glob("[!_]*.py")]:
        for node in ast.parse(path.read_text()).body:
            call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
            targets = getattr(node, "targets", [])
            changes = any(isinstance(each, ast.Attribute | ast.Subscript) for each in targets)
            assert not call and not changes, (path, node.lineno)


STEPS = """
import torch
weight, calls = torch.linspace(0, 1, 50).requires_grad_(), []
for kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
    optimizer = kind([weight], lr=0.1, fused=True)
    optimizer.register_step_post_hook(lambda *_: calls.append(kind))
    optimizer.load_state_dict(optimizer.state_dict())
    for step in range(3):
        weight.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


PARALLEL = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
parallel(torch.ones(1, 2)).sum().backward()
assert parallel.module.weight.grad.tolist() == [[1.0, 1.0]]
"""


def test_without_the_compiler_numbers_are_the_same_and_hooks_are_called():
    plain = {}
    exec(STEPS, plain)
    assert "torch._dynamo" in sys.modules  # this process is as torch made it
    code = (
        "from trainkit.repairs import replaced\nreplaced.skip_the_compiler()"
        + STEPS
        + PARALLEL
        + "import sys\nassert 'torch._dynamo' not in sys.modules, 'it was imported'\n"
        + f"assert weight.tolist() == {plain['weight'].tolist()} and len(calls) == 9"
        # In the teardown a thread of gloo may abort a process that is done: see startup.finish.
        + "\nimport os\nos._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
