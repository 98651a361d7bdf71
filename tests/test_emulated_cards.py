"""The scripts on CUDA cards that do not exist (tests/emulated_cards), by the real launcher.

What this shows and what only a real card will show is said in tests/emulated_cards/emulate.py.
Where there are real cards, `python -m pytest -m gpu` runs the same tests on them.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import conftest
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, rows
from faults import digests

FOLDER = ROOT / "tests" / "emulated_cards"
LAST = 10  # steps of a run of `problems`, five per epoch
# Not those that shard: emulated cards lie beneath DTensors, and a fused AdamW would meet DTensors
# before they are taken apart; moving a CPU parameter to a card by .data fails as well.
CONFIGS = (ROOT / "accelerate_configs").glob("[1-8]gpu*.yaml")
YAMLS = sorted(path.stem for path in CONFIGS if "fsdp" not in path.stem)
COPIES_PER_STEP = 3  # pictures, labels, indices


@pytest.fixture(scope="session")
def emulated_cards(tmp_path_factory):
    """The environment of a process that believes in cards."""
    if sys.platform != "linux" or not torch.backends.cuda.is_built() or not shutil.which("gcc"):
        pytest.skip("emulated cards need Linux, a torch with CUDA, and gcc")
    library = tmp_path_factory.mktemp("cards") / "libcuda.so.1"
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o"]
    subprocess.run([*command, library, FOLDER / "libcuda.c"], check=True)
    return {"LD_PRELOAD": str(library), "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}


@pytest.fixture(scope="session")
def real_cards():
    """The environment of a process on the cards of this machine, which conftest hides."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", conftest.CARDS)
        if conftest.CARDS == "all":
            patch.delenv("CUDA_VISIBLE_DEVICES")
        visible = ",".join(map(str, range(torch.cuda.device_count())))
    if not visible:
        pytest.skip("this machine has no GPU")
    return {"CUDA_VISIBLE_DEVICES": visible if conftest.CARDS == "all" else conftest.CARDS}


@pytest.fixture(scope="session", params=["emulated", pytest.param("real", marks=pytest.mark.gpu)])
def cards(request):
    """The environment of a process on emulated cards, or on real ones."""
    return request.getfixturevalue(f"{request.param}_cards")


def are_emulated(cards: dict[str, str]) -> bool:
    return "LD_PRELOAD" in cards


def num_cards(cards: dict[str, str]) -> int:
    return len(cards["CUDA_VISIBLE_DEVICES"].split(","))


# The emulation itself, on small programs.

PROGRAM = """
import torch
import torch.distributed as dist
device = torch.device("cuda")
model = torch.nn.Linear(4, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
data = torch.arange(32.0).view(8, 4).to(device)
host = torch.ones(8, 4)
total = torch.zeros((), device=device)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
gloo = dist.new_group(backend="gloo")

def train(augment):
    global total
    loss = model(augment(data)).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total += loss.detach()

train(lambda batch: batch)
"""
# What a step does besides | how often it copies to the device | what it waits for the device by
STEPS = """
pass | 0
total.item() | 0 | _local_scalar_dense
data[data > 3].sum(); data.nonzero() | 0 | index with a mask, nonzero
data.masked_scatter(data < 4, model.weight).sum().backward() | 0 | masked_scatter_backward
total.tolist(); total.cpu() | 0 | tolist, copy to the host
torch.tensor([1.0], device=device) | 1 | blocking copy to the card
host.to(device, non_blocking=True)  # it is not pinned | 1 | blocking copy to the card
host.pin_memory().to(device, non_blocking=True) | 1
data[torch.tensor([1, 2])] | 1 | blocking copy to the card
e = torch.Event(device=device); e.record(); e.synchronize() | 0 | event
torch.empty(8, 4, pin_memory=True).copy_(data, non_blocking=True) | 0
dist.all_reduce(total); dist.all_reduce(host, group=gloo) | 0
dist.all_gather_object([None], 1) | 0 | all_gather_object
with torch.inference_mode(): model.weight[:, :2].sum(); model(data) | 0
"""
FORKED = "num_workers=1, multiprocessing_context='fork'"
# What an augmentation makes of a batch on the card | and why that cannot be
BATCHES = f"""
batch * torch.rand(8, 1) | Expected all tensors to be on the same device
batch.to('cuda:1') | a tensor on cuda:1 in a process that uses cuda:0
batch.numpy() | can't convert cuda:0 device type tensor to numpy
dist.all_reduce(host) | No backend type associated with device type cpu
next(iter(torch.utils.data.DataLoader(batch, {FORKED}))) | Cannot re-initialize CUDA in forked subp
"""


def emulate(
    cards: dict[str, str], folder: Path, program: str
) -> tuple[list[str], list[dict[str, Any]]]:
    """Run a program in one process; return the lines it printed and its steps."""
    (folder / "program.py").write_text(program)
    env = {**cards, "EMULATED_CARDS_REPORT": str(folder / "report")}
    result = conftest.run(FOLDER / "emulate.py", folder / "program.py", cwd=folder, env=env)
    return result.stdout.splitlines(), json.loads((folder / "report.0.json").read_text())["steps"]


def cells(table: str) -> list[list[str]]:
    return [line.split(" | ") for line in table.strip().splitlines()]


def test_waits_and_copies_are_counted_and_wrong_devices_refused_with_their_lines(
    emulated_cards, tmp_path
):
    program = PROGRAM
    for line, *_ in cells(STEPS):
        program += f"{line}\ntrain(lambda batch: batch)\n"
    attempt = "try:\n    {}\nexcept (RuntimeError, TypeError) as error:\n"
    attempt += "    print(str(error).strip().splitlines()[-1])\n"
    program += "".join(attempt.format(f"train(lambda batch: {line})") for line, _ in cells(BATCHES))
    printed, steps = emulate(emulated_cards, tmp_path, program)
    for (line, copies, *waits), step in zip(cells(STEPS), steps[1:], strict=True):
        expected = {f"{line} [{what}]": 1 for words in waits for what in words.split(", ")}
        found = {key.partition(" ")[2]: number for key, number in step["waits"].items()}
        assert found == expected, step
        assert sum(step["copies"].values()) == int(copies), line
    for (line, said), output in zip(cells(BATCHES), printed, strict=True):
        assert said in output, (line, output)


def test_a_lost_process_is_noticed_before_the_host_waits_for_the_device(emulated_cards, tmp_path):
    """On a card that would not end: its work waits for the lost process.

    The guard looks at the step before, which all are known to have made; GradScaler at this one.
    """
    program = """
from types import SimpleNamespace
import torch
from accelerate import Accelerator
from conftest import forget_accelerator
from emulate import ledger
from trainkit.numbers.orders import Length, Progress
from trainkit.run.step import Step
shared = dict(batch_size=5, accumulate=1, seed=0, drop_last=False, epochs=1)
config = SimpleNamespace(clip_norm=float("inf"), stop_after_steps=None, log_every=1, **shared)
wait, barrier = (lambda: print("behind")), (lambda: print("here"))
signals = SimpleNamespace(wait=wait, barrier=barrier, differ=False)
ledger.wait = lambda what: print("device")
for precision in ("no", "fp16"):
    forget_accelerator()
    accelerator = Accelerator(mixed_precision=precision)
    weight = torch.nn.Parameter(torch.ones(5, device="cuda"))
    fused = None if accelerator.scaler else True
    optimizer = accelerator.prepare(torch.optim.SGD([weight], lr=0.1, fused=fused))
    step = Step(accelerator, config, signals, [], Length(config, 10))
    print(precision)
    for batch in range(2):
        step.start(Progress(step=batch, step_in_epoch=batch))
        step.start_micro_batch(SimpleNamespace())
        accelerator.backward(step.mean(weight, None, None))
        step.clip_and_check(optimizer)
        optimizer.step()
        step.finish()
        optimizer.zero_grad()
"""
    path = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}
    printed, _ = emulate(emulated_cards | path, tmp_path, program)
    expected = "no behind behind device fp16 here device here device"
    assert printed == expected.split()


# The scripts, by the launcher.


@pytest.fixture(scope="session")
def problems(tiny_mnist):
    """Per script, a run of ten steps in two epochs, on up to eight cards."""
    shared = "--batch-size 64 --epochs 2 --log-every 2 --save-every 4 --keep 9 --timeout 60"
    shared += " --eval-batch-size 56 --no-pictures"
    return {
        "train_mnist": f"--dataset {tiny_mnist} {shared}",
        "train_regression": f"--num-samples 400 --model mlp {shared}",
    }


# Checkpoints and evaluations are made after steps 4, 5, 8 and 10. The first step of a process,
# whichever it is, includes its start, and after each of the first three the processes compare the
# sizes of their values. What is left is a step like most, with a row of the log after step 6.
QUIET_STEPS = (7, 8, 10)
QUIET_STEPS_AFTER_4 = (10,)


def launch(
    cards: dict[str, str],
    yaml: str,
    script: str,
    *args: object,
    processes: int | None = None,
    fault: dict[str, Any] | None = None,
) -> subprocess.CompletedProcess:
    """`accelerate launch` of a script; its reports lie beside its --run-dir, its last argument."""
    if not are_emulated(cards):
        wanted = processes or (8 if "by_id" in yaml else int(yaml[0]))
        if wanted > num_cards(cards):
            pytest.skip(f"needs {wanted} GPUs, this machine has {num_cards(cards)}")
    first, *others = (FOLDER / name for name in ["emulate.py"] * are_emulated(cards) + ["start.py"])
    env = {"EMULATED_CARDS_REPORT": f"{args[-1]}.report", "FAULT": json.dumps(fault)}
    result = conftest.run(
        first,
        *others,
        ROOT / f"{script}.py",
        *args,
        config=yaml,
        launcher_flags=[] if processes is None else ["--num_processes", str(processes)],
        env=cards | env,
        timeout=240,
        code=None,
    )
    assert (result.returncode == 0) == (fault is None), result.stdout + result.stderr
    if fault is None:
        (device,) = re.findall(r" on (.+?), ", result.stdout.splitlines()[0])
        assert (device == "emulated card") == are_emulated(cards) and device != "cpu"
    return result


def progress(run_dir: Path) -> dict[str, Any]:
    last = max((run_dir / "checkpoints").glob("step-*"))
    return json.loads((last / "trainer.json").read_text())["progress"]


def check_steps(
    run_dir: Path, yaml: str, quiet: tuple[int, ...], first: int = 1
) -> list[tuple[int, int]]:
    """The waits and copies of the quiet steps, which must be few; the same on all processes.

    They wait for what the step before has copied: the norm and losses for the guard, and a row of
    the log with its sums and its norm. Under fp16 GradScaler waits for the step itself.
    """
    counts = set()
    for rank, path in enumerate(sorted(run_dir.parent.glob(f"{run_dir.name}.report.*.json"))):
        report = json.loads(path.read_text())
        assert report["card"] == f"cuda:{rank}"
        steps = [report["steps"][step - first] for step in quiet]
        for step in steps:
            events = sum(num for line, num in step["waits"].items() if line.endswith("[event]"))
            num_others = sum(step["waits"].values()) - events
            assert events <= 3 and num_others <= ("fp16" in yaml), step
            assert sum(step["copies"].values()) <= COPIES_PER_STEP, step
        found = [tuple(sum(step[what].values()) for what in ("waits", "copies")) for step in steps]
        counts.add(tuple(found))
    assert len(counts) == 1
    return [*counts.pop()]


@pytest.mark.slow
@pytest.mark.parametrize("yaml", YAMLS)
def test_every_single_machine_yaml_trains_and_resumes_both_scripts(cards, problems, tmp_path, yaml):
    """All processes of one script are killed after step 9; the other gets SIGTERM.

    The save of step 8 has waited until that of step 4 was durable, from which all go on.
    """
    faults = [{"signal": [9, signal.SIGKILL]}, {"rank": 0, "signal": [2, signal.SIGTERM]}]
    plans = zip(problems.items(), faults, (101, 80), strict=True)
    for (script, args), fault, num_evaluated in plans:
        whole, broken = tmp_path / script / "whole", tmp_path / script / "broken"
        launch(cards, yaml, script, args, "--run-dir", whole)
        launch(cards, yaml, script, args, "--run-dir", broken, fault=fault)
        assert not (broken / "DONE").exists()
        shutil.rmtree(broken / "checkpoints" / "step-0000000008", ignore_errors=True)
        again = launch(cards, yaml, script, args, "--resume", "auto", "--run-dir", broken)
        assert f"resuming from {broken / 'checkpoints' / 'step-'}" in again.stdout
        assert digests(broken) == digests(whole)
        world = json.loads((whole / "run.json").read_text())
        assert world["num_processes"] == int(yaml[0])
        assert rows(whole)[-1]["eval_samples"] == num_evaluated
        if are_emulated(cards) and progress(whole)["num_skipped"] == 0:  # else all are shifted
            before = check_steps(whole, yaml, QUIET_STEPS)
            if script == "train_mnist":
                after = check_steps(broken, yaml, QUIET_STEPS_AFTER_4, first=5)
                assert after == before[-1:], "a resumed run waits more often"


@pytest.mark.slow
def test_a_run_on_one_card_gives_the_numbers_of_the_cpu(cards, problems, tmp_path):
    """If emulated, the same kernels made them: only the GPU's own path could make a difference."""
    close = {"rel": 1e-6} if are_emulated(cards) else {"rel": 1e-3, "abs": 0.02}
    for script, args in problems.items():
        launch(cards, "1gpu", script, args, "--run-dir", tmp_path / "card")
        conftest.run(f"{script}.py", args, "--run-dir", tmp_path / "cpu")
        for there, here in zip(rows(tmp_path / "cpu"), rows(tmp_path / "card"), strict=True):
            assert here == pytest.approx(there, **close)
        if are_emulated(cards) and script == "train_mnist":  # its pictures lie on the card
            assert {
                copies for _, copies in check_steps(tmp_path / "card", "1gpu", QUIET_STEPS)
            } == {0}


FEW = "--batch-size 8 --eval-batch-size 8 --stop-after-steps 10 --log-every 100 --no-pictures"
SHORT = {
    "PHOTOS": "--dataset {photos}/data --size 32 --model test_convnext --scratch",
    "TUNED": "--base {tuned}/base --data {tuned}",
    "GPT": "--layers 1 --width 32",
    "PADDING": "_local_scalar_dense",  # transformers looks whether a batch has padding
    "POSITIONS": "_local_scalar_dense",  # transformers looks whether samples share rows
}
# A run | its module and flags | copies to the card in a step | waits besides that of the guard,
# which looks at the step before (of gan.py, which has two optimizers, both guards)
RUNS = """
digits | train_mnist --dataset {digits} --max-shift 2 --max-turn 5 --ema 0.9 | 0
pictures --balance | examples.pictures PHOTOS --balance | 0
text | examples.text --data {texts}/lines.csv | 4
finetune --pack | examples.finetune TUNED/pairs.jsonl --pack --max-tokens 99 | 4 | POSITIONS
pictures | examples.pictures PHOTOS | 0
preference | examples.preference TUNED/preferred.jsonl --sft-weight 1 | 4 | POSITIONS
regression | train_regression --model mlp --loss huber --accumulate 2 | 0
table | examples.table --data {table}/t.csv --target y --features a,b | 0
classes | examples.table --data {table}/t.csv --target kind --features a,b | 0
text --balance | examples.text --data {texts}/lines.csv --balance | 4
text --base | examples.text --data {texts}/lines.csv --base {texts} | 4 | PADDING
gan | examples.gan --dataset {digits} | 0
towers | examples.two_towers --dataset {digits} | 0
gpt | examples.gpt --num-bytes 60000 --checkpointing GPT | 3
answers | examples.gpt --answers-only --num-bytes 1030000 GPT | 3
tokens | examples.gpt --data {ids} GPT | 1
finetune | examples.finetune TUNED/pairs.jsonl --checkpointing | 3 | POSITIONS
finetune --lora | examples.finetune TUNED/pairs.jsonl --lora 4 --accumulate 2 | 6 | POSITIONS
preference --lora | examples.preference TUNED/preferred.jsonl --lora 4 | 4 | POSITIONS
"""
NUM_QUICK = 1


# The fixtures that make the data of RUNS.
FOLDERS = {
    "digits": "tiny_mnist", "photos": "photos", "texts": "base", "tuned": "tuned_base",
    "table": "table", "ids": "ids",
}  # fmt: skip


@pytest.fixture(scope="session")
def ids(tmp_path_factory):
    """A folder of rows of tokens."""
    folder = tmp_path_factory.mktemp("ids")
    tokens = torch.randint(0, 256, (200, 17), generator=torch.Generator().manual_seed(0))
    for part, rows_of in {"train": tokens, "test": tokens[:20]}.items():
        column = pa.FixedSizeListArray.from_arrays(rows_of.int().flatten().numpy(), 17)
        pq.write_table(pa.table({"tokens": column}), folder / f"{part}.parquet")
    return folder


@pytest.mark.parametrize(
    "part", [slice(NUM_QUICK), pytest.param(slice(NUM_QUICK, None), marks=pytest.mark.slow)]
)
def test_in_a_quiet_step_no_script_waits_for_the_card(emulated_cards, request, tmp_path, part):
    table = RUNS
    for name, text in SHORT.items():
        table = table.replace(name, text)
    runs = cells(table)[part]
    plan = []
    used = [name for name in FOLDERS if any(f"{{{name}}}" in words for _, words, *_ in runs)]
    folders = {name: request.getfixturevalue(FOLDERS[name]) for name in used}
    for name, words, *_ in runs:
        module, *flags = words.format(**folders).split()
        plan.append([name, module, [*flags, *FEW.split(), "--run-dir", f"{tmp_path}/{name}"]])
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    env = emulated_cards | {"PYTHONPATH": str(ROOT)}
    words = FOLDER / "emulate.py", FOLDER / "several.py", tmp_path / "plan.json"
    conftest.run(*words, env=env, timeout=400)
    for name, _, copies, *waits in runs:
        steps = json.loads((tmp_path / f"{name}.0.json").read_text())["steps"][-3:]
        expected = {"event", *", ".join(waits).split(", ")} - {""}
        for step in steps:  # the last ones; no row, evaluation or save is between them
            found = {key.rpartition("[")[2].rstrip("]") for key in step["waits"]}
            assert found | {"event"} == expected, (name, step["waits"])
            assert sum(step["waits"].values()) <= 2 * (1 + len(waits)), (name, step["waits"])
            assert sum(step["copies"].values()) <= int(copies), (name, step["copies"])


@pytest.mark.gpu
def test_the_doctor_calls_every_card_healthy(real_cards, tmp_path):
    """Not on emulated ones: it multiplies matrices as large as a card needs to show its rate."""
    number = num_cards(real_cards)
    plan = {"config": "4gpu" if number > 1 else "1gpu", "timeout": 300, "env": real_cards}
    plan["launcher_flags"] = ["--num_processes", str(number), "--module"]
    done = conftest.run("trainkit.tools.doctor", "--run-dir", tmp_path / "run", **plan)
    assert done.stdout.endswith("ready to train\n"), done
