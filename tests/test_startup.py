"""Settings of the whole process: each does what it says, and is noticed if its target changes."""

import os
import subprocess
import sys
import time

import pytest
from conftest import ROOT


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    """Run code in a process of its own, where nothing has been patched yet."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def passes(code: str, **environment: str) -> None:
    done = python(code, **environment)
    assert done.returncode == 0, done.stderr


OPTIMIZER = """
import sys, torch
from trainkit import startup
weight = torch.ones(3, requires_grad=True)
"""


def test_optimizers_work_without_the_compiler_and_call_their_hooks() -> None:
    passes(
        OPTIMIZER
        + """
startup.spare_the_compiler()
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
"""
    )


def test_an_optimizer_that_was_there_before_keeps_its_hooks() -> None:
    passes(
        OPTIMIZER
        + """
calls = []
optimizer = torch.optim.Adam([weight], lr=0.1)
optimizer.register_step_post_hook(lambda *args: calls.append(1))
startup.spare_the_compiler()
weight.sum().backward()
optimizer.step()
assert calls == [1]
"""
    )


def test_numbers_are_the_same_without_the_compiler() -> None:
    code = (
        OPTIMIZER
        + """
weight = torch.linspace(0, 1, 50).requires_grad_()
optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
for step in range(5):
    weight.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("torch._dynamo" in sys.modules, weight.tolist())
"""
    )
    plain = python(code).stdout.split(" ", 1)
    spared = python(code.replace("\nweight", "\nstartup.spare_the_compiler()\nweight", 1)).stdout
    assert spared.split(" ", 1) == ["False", plain[1]] and plain[0] == "True"


def test_preparing_a_model_looks_for_no_sharded_weights_unless_there_can_be_some() -> None:
    passes("""
import sys, torch
from accelerate import Accelerator
from trainkit import startup
startup.spare_sharded_tensors()
accelerator = Accelerator(cpu=True)
accelerator.prepare(torch.nn.Linear(1, 1))
assert "torch.distributed.tensor" not in sys.modules, "it was imported"
import accelerate.accelerator, torch.distributed.tensor
assert accelerate.accelerator.model_has_dtensor(torch.nn.Linear(1, 1)) is False
""")


def test_a_step_searches_the_disk_for_no_package() -> None:
    passes("""
import importlib.util, torch
from accelerate import Accelerator
from trainkit import startup
startup.spare_lookups()
weight = torch.ones(3, requires_grad=True)
accelerator = Accelerator(cpu=True)
optimizer = accelerator.prepare(torch.optim.SGD([weight], lr=0.1))
def step():
    weight.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
step()
def find_spec(name, *args):
    raise AssertionError(f"searched for {name}")
importlib.util.find_spec = find_spec
step()
""")


def test_the_plain_way_is_taken_where_a_target_is_gone() -> None:
    passes("""
import accelerate.accelerator, accelerate.optimizer
from trainkit import startup
del accelerate.accelerator.model_has_dtensor, accelerate.optimizer.is_lomo_available
startup.spare_sharded_tensors()
startup.spare_lookups()
""")


def test_freed_memory_is_kept() -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("glibc's settings")
    passes("""
import resource, torch
from trainkit import startup
startup.keep_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for step in range(20):
        torch.ones(4_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
assert faults() < 1000, "a freed tensor of 16 MB was given back"  # 3,900 pages each, else 78,000
""")


def test_no_code_is_unpickled_however_main_was_started() -> None:
    passes("""
import os, pickle, torch
import train_regression
try:
    train_regression.main(["--epochs", "0", "--run-dir", "/nowhere/at/all"])
except ValueError as refused:
    assert "--epochs 0" in str(refused)
import io
file = io.BytesIO()
torch.save(os.system, file)
file.seek(0)
try:
    torch.load(file, weights_only=False)
except pickle.UnpicklingError:
    pass
else:
    raise AssertionError("a function was unpickled")
""")


ORPHAN = """
import os, subprocess, sys, time
code = '''
import sys, time
time.sleep({wait})
from trainkit import startup
startup.run(lambda: print("trained on", flush=True))
'''
subprocess.Popen([sys.executable, "-c", code])
time.sleep({stay})
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal")
@pytest.mark.parametrize(("launched", "trains"), [(True, False), (False, True)])
def test_a_launcher_that_died_during_the_imports_is_found(launched: bool, trains: bool) -> None:
    environment = {"ACCELERATE_MIXED_PRECISION": "no"} if launched else {}
    orphan = subprocess.Popen(
        [sys.executable, "-c", ORPHAN.format(wait=1, stay=0)],
        cwd=ROOT, env={**os.environ, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    orphan.wait(30)
    output, errors = orphan.communicate(timeout=60)  # until the orphan has closed them too
    assert ("trained on" in output) == trains, output + errors
    assert ("the launcher of this process is gone" in errors) == launched, errors


def test_a_closed_pipe_ends_quietly() -> None:
    code = (
        "import time\nfrom trainkit import startup\n"
        "def main():\n"
        "    for number in range(100):\n        print('x' * 999, flush=True)\n"
        "startup.run(main)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    time.sleep(0.1)
    process.stdout.close()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and errors == b"", errors
