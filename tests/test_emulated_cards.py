"""The scripts on CUDA cards that do not exist (tests/emulated_cards), by the real launcher.

What this shows and what only a real card will show is said in tests/emulated_cards/emulate.py.
Where there are real cards, `python -m pytest -m gpu` runs the same tests on them.
"""

import hashlib
import itertools
import json
import math
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import conftest
import pytest
import torch
from conftest import ROOT, rows

FOLDER = ROOT / "tests" / "emulated_cards"
LAST = 10  # steps of a run of `problems`, five per epoch
# Not those that shard: emulated cards lie beneath DTensors, and a fused AdamW would meet DTensors
# before they are taken apart; moving a CPU parameter to a card by .data fails as well.
CONFIGS = (ROOT / "accelerate_configs").glob("[1-8]gpu*.yaml")
YAMLS = sorted(path.stem for path in CONFIGS if "fsdp" not in path.stem)
PRECISIONS = ("no", "fp16", "bf16")
SCHEDULES = ("onecycle", "cosine", "exponential", "exponential+cosine", "constant")
COPIES_PER_STEP = 3  # pictures, labels, indices


@pytest.fixture(scope="session")
def emulated_cards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that believes in cards."""
    if sys.platform != "linux":
        pytest.skip("the stub of the driver's library is for Linux")
    if not torch.backends.cuda.is_built():
        pytest.skip("this torch was built without CUDA")
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc, which makes the stub of the driver's library")
    library = tmp_path_factory.mktemp("cards") / "libcuda.so.1"
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o"]
    subprocess.run([*command, library, FOLDER / "libcuda.c"], check=True)
    return {"LD_PRELOAD": str(library)}


@pytest.fixture(scope="session")
def real_cards() -> dict[str, str]:
    """The environment of a process on the cards of this machine."""
    if not torch.cuda.is_available():
        pytest.skip("this machine has no GPU")
    return {}


@pytest.fixture(scope="session", params=["emulated", pytest.param("real", marks=pytest.mark.gpu)])
def cards(request: pytest.FixtureRequest) -> dict[str, str]:
    """The environment of a process on emulated cards, or on real ones."""
    return request.getfixturevalue(f"{request.param}_cards")


def are_emulated(cards: dict[str, str]) -> bool:
    return "LD_PRELOAD" in cards


def starter(cards: dict[str, str]) -> str:
    return "emulate.py" if are_emulated(cards) else "real.py"


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
STEPS = [  # what a step does besides, how often it waits for the device, copies to it
    ("pass", [], 0),
    ("total.item()", ["_local_scalar_dense"], 0),
    ("bool(total > 1e9)", ["_local_scalar_dense"], 0),
    ("data[data > 3].sum(); data.nonzero()", ["index with a mask", "nonzero"], 0),
    ("total.tolist(); total.cpu()", ["tolist", "copy to the host"], 0),
    ("torch.tensor([1.0], device=device)", ["blocking copy to the card"], 1),
    ("host.to(device, non_blocking=True)", ["blocking copy to the card"], 1),  # it is not pinned
    ("host.pin_memory().to(device, non_blocking=True)", [], 1),
    ("data[torch.tensor([1, 2])]", ["blocking copy to the card"], 1),
    ("e = torch.Event(device=device); e.record(); e.synchronize()", ["event"], 0),
    ("torch.empty(8, 4, pin_memory=True).copy_(data, non_blocking=True)", [], 0),
    ("torch.cuda.synchronize()", ["synchronize"], 0),
    ("dist.all_reduce(total); dist.all_reduce(host, group=gloo)", [], 0),
    ("dist.all_gather_object([None], 1)", ["all_gather_object"], 0),
    ("with torch.inference_mode(): model.weight[:, :2].sum(); model(data)", [], 0),
]
BATCHES = [  # what an augmentation makes of a batch on the card, and why that cannot be
    ("batch * torch.rand(8, 1)", "Expected all tensors to be on the same device"),
    ("torch.cat((batch, torch.rand(1, 4)))", "Expected all tensors to be on the same device"),
    ("host[torch.zeros(8, dtype=torch.int64, device=device)]", "to be on the same device"),
    ("torch.zeros(()).add_(batch.sum())", "Expected all tensors to be on the same device"),
    ("batch.to('cuda:1')", "a tensor on cuda:1 in a process that uses cuda:0"),
    ("batch.to('cuda:8')", "invalid device ordinal"),
    ("batch.numpy()", "can't convert cuda:0 device type tensor to numpy"),
    ("dist.all_reduce(host)", "No backend type associated with device type cpu"),
    ("next(iter(torch.utils.data.DataLoader(batch, num_workers=1, "
     "multiprocessing_context='fork')))", "Cannot re-initialize CUDA in forked subprocess"),
]  # fmt: skip


def emulate(
    cards: dict[str, str], folder: Path, program: str, *args: str
) -> tuple[subprocess.CompletedProcess, list[dict[str, Any]]]:
    """Run a program in one process; return what became of it and, if emulated, its steps."""
    (folder / "program.py").write_text(program)
    result = conftest.run(
        FOLDER / starter(cards),
        folder / "program.py",
        *args,
        cwd=folder,
        env={**cards, "EMULATED_CARDS_REPORT": str(folder / "report")},
    )
    report = folder / "report.0.json"
    return result, json.loads(report.read_text())["steps"] if are_emulated(cards) else []


def test_each_wait_and_each_copy_of_a_step_is_counted_with_its_line(
    emulated_cards: dict[str, str], tmp_path: Path
) -> None:
    program = PROGRAM
    for line, _, _ in STEPS:
        program += f"{line}\ntrain(lambda batch: batch)\n"
    result, steps = emulate(emulated_cards, tmp_path, program)
    assert result.returncode == 0, result.stderr
    assert len(steps) == len(STEPS) + 1
    for (line, waits, copies), step in zip(STEPS, steps[1:], strict=True):
        assert [key[key.rindex("[") + 1 : -1] for key in step["waits"]] == waits, line
        assert {*step["waits"].values()} <= {1}
        assert sum(step["copies"].values()) == copies, line
        place = f"program.py:{program[: program.index(line)].count(chr(10)) + 1} {line}"
        assert all(key.startswith(place) for key in (*step["waits"], *step["copies"]))
    assert steps[1]["operators"] > 10


def test_a_tensor_on_the_wrong_device_is_refused_with_its_line(
    emulated_cards: dict[str, str], tmp_path: Path
) -> None:
    program = PROGRAM
    for line, _ in BATCHES:
        program += f"def augment(batch):\n    return {line}\n"
        program += "try:\n    train(augment)\n    print('not refused')\n"
        program += "except (RuntimeError, TypeError) as error:\n"
        program += "    print(str(error).strip().splitlines()[-1])\n"
    result, steps = emulate(emulated_cards, tmp_path, program)
    assert result.returncode == 0 and len(steps) == 1, result.stderr
    for (line, error), output in zip(BATCHES, result.stdout.splitlines(), strict=True):
        place = f"program.py:{program[: program.index(line)].count(chr(10)) + 1} "
        assert error in output and (place in output or "dist" in line), (line, output)


SAVED = """
import sys, torch
torch.cuda.set_device(int(sys.argv[1]))
here = torch.ones(3, device="cuda")
if sys.argv[2] == "save":
    torch.save({"state": [here]}, "file.pt")
for map_location in sys.argv[3:]:
    try:
        loaded = torch.load("file.pt", map_location=eval(map_location))["state"][0]
        print(loaded.device, (here + loaded).sum().item())
    except RuntimeError as error:
        print(error)
"""


def test_a_file_is_loaded_where_map_location_says(
    emulated_cards: dict[str, str], tmp_path: Path
) -> None:
    first, _ = emulate(emulated_cards, tmp_path, SAVED, "0", "save", "None")
    assert first.stdout == "cuda:0 6.0\n"
    places = ["torch.device('cuda:1')", "None", "'cpu'"]
    second, _ = emulate(emulated_cards, tmp_path, SAVED, "1", "load", *places)
    right, wrong, host = second.stdout.splitlines()
    assert right == "cuda:1 6.0"
    assert wrong.startswith("a tensor on cuda:0 in a process that uses cuda:1 (program.py:9 ")
    assert host.startswith("Expected all tensors to be on the same device")


# The scripts, by the launcher.


@pytest.fixture(scope="session")
def problems(tiny_mnist: Path) -> dict[str, list[object]]:
    """Per script, a run of ten steps in two epochs, on up to eight cards."""
    shared = ["--batch-size", 64, "--epochs", 2, "--log-every", 4, "--save-every", 4, "--keep", 9]
    shared += ["--eval-batch-size", 56, "--timeout", 60, "--no-pictures"]
    return {
        "train_mnist": ["--dataset", tiny_mnist, *shared],
        "train_regression": ["--num-samples", 400, "--model", "mlp", *shared],
    }


# Rows, checkpoints and evaluations are made after steps 4, 5, 8 and 10, and the first step of a
# process, whichever it is, includes its start. What is left is a step like most.
QUIET_STEPS = (2, 3, 4, 7, 8)
QUIET_STEPS_AFTER_4 = (7, 8)


def launch(
    cards: dict[str, str],
    yaml: str,
    script: str,
    *args: object,
    processes: int | None = None,
    fault: dict[str, Any] | None = None,
    expect: int | None = 0,
) -> subprocess.CompletedProcess:
    """`accelerate launch` of a script; its reports lie beside its --run-dir, its last argument."""
    if not are_emulated(cards):
        wanted = processes or (8 if "by_id" in yaml else int(yaml[0]))
        if wanted > torch.cuda.device_count():
            pytest.skip(f"needs {wanted} GPUs, this machine has {torch.cuda.device_count()}")
    before = [] if fault is None else [FOLDER / "faulty.py", json.dumps(fault)]
    result = conftest.run(
        FOLDER / starter(cards),
        *before,
        ROOT / f"{script}.py",
        *args,
        config=yaml,
        launcher_flags=[] if processes is None else ["--num_processes", str(processes)],
        env={**cards, "EMULATED_CARDS_REPORT": f"{args[-1]}.report"},
        timeout=240,
    )
    if expect is not None:
        assert result.returncode == expect, result.stdout + result.stderr
    if result.returncode == 0:
        card = "emulated card" if are_emulated(cards) else torch.cuda.get_device_name(0)
        assert f" on {card}, " in result.stdout.splitlines()[0]
    return result


def digests(run_dir: Path) -> dict[str, str]:
    """What must be equal between an undisturbed run and one that was broken and resumed."""
    last = max((run_dir / "checkpoints").glob("step-*"))
    files = [run_dir / "metrics.jsonl", run_dir / "model.safetensors"]
    files += sorted(path for path in last.glob("state/*") if not path.match("random_states_*"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def reports(run_dir: Path) -> list[dict[str, Any]]:
    """What each process counted, by rank."""
    files = sorted(run_dir.parent.glob(f"{run_dir.name}.report.*.json"))
    return [json.loads(path.read_text()) for path in files]


def check_steps(run_dir: Path, quiet: tuple[int, ...], first: int = 1) -> list[tuple[int, int]]:
    """The waits and copies of the quiet steps, which must be few; the same on all processes."""
    counts = set()
    for rank, report in enumerate(reports(run_dir)):
        assert report["card"] == f"cuda:{rank}"
        found = []
        for step in quiet:
            entry = report["steps"][step - first]
            assert sum(entry["waits"].values()) <= 1, entry["waits"]
            assert sum(entry["copies"].values()) <= COPIES_PER_STEP, entry["copies"]
            found.append((sum(entry["waits"].values()), sum(entry["copies"].values())))
        counts.add(tuple(found))
    assert len(counts) == 1
    return [*counts.pop()]


def kill_and_resume(
    cards: dict[str, str], where: Path, yaml: str, script: str, args: list[object], **options: Any
) -> None:
    """A run that loses all processes after step 6, and resumes, against an undisturbed one."""
    whole, broken = where / "whole", where / "broken"
    launch(cards, yaml, script, *args, "--run-dir", whole, **options)
    killed = launch(
        cards, yaml, script, *args, "--run-dir", broken, fault={"kill": 6}, expect=None, **options
    )
    assert killed.returncode != 0 and not (broken / "DONE").exists()
    again = launch(cards, yaml, script, *args, "--resume", "auto", "--run-dir", broken, **options)
    assert f"resuming from {broken / 'checkpoints' / 'step-0000000004'}" in again.stdout
    assert "FutureWarning" not in again.stderr
    assert digests(broken) == digests(whole)
    last = max((whole / "checkpoints").glob("step-*")) / "trainer.json"
    num_skipped = json.loads(last.read_text())["progress"]["num_skipped"]
    if are_emulated(cards) and num_skipped == 0:  # else all steps are shifted
        before = check_steps(whole, QUIET_STEPS)
        after = check_steps(broken, QUIET_STEPS_AFTER_4, first=5)
        assert after == before[QUIET_STEPS.index(7) :], "a resumed run waits or copies more often"


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_killed_run_ends_with_the_bytes_of_an_undisturbed_one(
    cards: dict[str, str], problems: dict, tmp_path: Path, precision: str
) -> None:
    kill_and_resume(
        cards, tmp_path, f"4gpu_{precision}", "train_mnist", problems["train_mnist"], processes=2
    )


@pytest.mark.parametrize(
    ("precision", "calls"),
    [("no", ["behind", "behind", "device"]), ("fp16", ["here", "device", "here", "device"])],
)
def test_a_lost_process_is_noticed_before_the_host_waits_for_the_device(
    emulated_cards: dict[str, str], tmp_path: Path, precision: str, calls: list[str]
) -> None:
    """On a card that would not end: its work waits for the lost process.

    The guard looks at the step before, which all are known to have made; GradScaler at this one.
    """
    program = """
import sys
from types import SimpleNamespace
import torch
from accelerate import Accelerator
from emulate import ledger
from trainkit.guards.finite import Position
from trainkit.step import Step
accelerator = Accelerator(mixed_precision=sys.argv[1])
weight = torch.nn.Parameter(torch.ones(5, device="cuda"))
fused = None if accelerator.scaler else True
optimizer = accelerator.prepare(torch.optim.SGD([weight], lr=0.1, fused=fused))
args = SimpleNamespace(clip_norm=float("inf"), batch_size=5, accumulate=1, seed=0)
signals = SimpleNamespace(wait=lambda: print("behind"), barrier=lambda: print("here"))
step = Step(accelerator, args, 10, signals, [])
ledger.wait = lambda what: print("device")
for batch in range(2):
    step.start(0, batch, Position(batch + 1))
    step.start_micro_batch()
    accelerator.backward(step.mean(weight, None))
    step.clip_and_check(optimizer)
    optimizer.step()
    step.finish()
    optimizer.zero_grad()
"""
    result, _ = emulate(emulated_cards, tmp_path, program, precision)
    assert result.stdout.split() == calls, result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("yaml", YAMLS)
def test_every_single_machine_yaml_trains_and_resumes_both_scripts(
    cards: dict[str, str], problems: dict, tmp_path: Path, yaml: str
) -> None:
    for script, args in problems.items():
        kill_and_resume(cards, tmp_path / script, yaml, script, args)
        number = int(yaml[0])
        assert len(reports(tmp_path / script / "whole")) == number * are_emulated(cards)
        world = json.loads((tmp_path / script / "whole" / "run.json").read_text())
        assert world["num_processes"] == number
        assert world["tf32"] is False


VARIANTS = [
    ["--accumulate", 4],
    ["--clip-norm", 1],
    ["--no-drop-last"],
    ["--num-workers", 2],
    *(["--optimizer", name] for name in ("adam", "sgd")),
    *(["--schedule", name, "--warmup", 0.25] for name in SCHEDULES),
]


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("flags", VARIANTS, ids=lambda flags: "=".join(map(str, flags[:2])))
def test_every_flag_of_training_resumes_exactly_in_every_precision(
    cards: dict[str, str], problems: dict, tmp_path: Path, flags: list[object], precision: str
) -> None:
    yaml = "4gpu" if precision == "no" else f"4gpu_{precision}"
    for script, args in problems.items():
        launch_args = [*args, *flags, "--run-dir", tmp_path / script]
        launch(cards, yaml, script, *launch_args, processes=2)
        whole = digests(tmp_path / script)
        path = tmp_path / script / "checkpoints" / "step-0000000004"
        launch(
            cards, yaml, script, *launch_args[:-2], "--resume", path, *launch_args[-2:], processes=2
        )
        assert digests(tmp_path / script) == whole, (script, flags)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_dropout_resumes_exactly(
    cards: dict[str, str], problems: dict, tmp_path: Path, precision: str
) -> None:
    args = [*problems["train_mnist"], "--model", "wide", "--epochs", 1, "--save-every", 2]
    args += ["--run-dir", tmp_path / "run"]
    yaml = "4gpu" if precision == "no" else f"4gpu_{precision}"
    launch(cards, yaml, "train_mnist", *args, processes=2)
    whole = digests(tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / "step-0000000002"
    launch(cards, yaml, "train_mnist", "--resume", path, *args, processes=2)
    assert digests(tmp_path / "run") == whole


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_four_cards_go_on_as_one_or_two(
    cards: dict[str, str], problems: dict, tmp_path: Path, processes: int
) -> None:
    run_dir = tmp_path / "run"
    args = [*problems["train_mnist"], "--run-dir", run_dir]
    launch(cards, "4gpu", "train_mnist", *args)
    before = rows(run_dir)
    path = run_dir / "checkpoints" / "step-0000000004"
    yaml, number = ("1gpu", None) if processes == 1 else ("4gpu", processes)
    again = launch(cards, yaml, "train_mnist", "--resume", path, *args, processes=number)
    assert f"num_processes was 4 and is {processes}" in again.stdout
    for there, here in zip(before, rows(run_dir), strict=True):
        assert there["step"] == here["step"]
        exact = 1e-5 if are_emulated(cards) else 1e-3
        assert here["train_loss"] == pytest.approx(there["train_loss"], rel=exact)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [*itertools.permutations(PRECISIONS, 2)])
def test_a_checkpoint_of_one_precision_goes_on_in_another(
    cards: dict[str, str], problems: dict, tmp_path: Path, before: str, after: str
) -> None:
    run_dir = tmp_path / "run"
    args = [*problems["train_mnist"], "--run-dir", run_dir]
    yamls = {"no": "4gpu", "fp16": "4gpu_fp16", "bf16": "4gpu_bf16"}
    launch(cards, yamls[before], "train_mnist", *args, processes=2)
    expected = rows(run_dir)
    path = run_dir / "checkpoints" / "step-0000000004"
    again = launch(
        cards,
        yamls[after],
        "train_mnist",
        "--resume",
        path,
        *args,
        processes=2,
        expect=None if after == "fp16" else 0,
    )
    if after == "fp16":
        assert "so it has no loss scale, which fp16 needs: resume with the YAML" in again.stderr
        return
    assert f"mixed_precision was {before!r} and is {after!r}" in again.stdout
    if are_emulated(cards):
        check_steps(run_dir, QUIET_STEPS_AFTER_4, first=5)
    for there, here in zip(expected, rows(run_dir), strict=True):
        assert here["train_loss"] == pytest.approx(there["train_loss"], rel=0.05)


@pytest.mark.slow
def test_a_gradient_that_overflows_in_fp16_is_skipped_and_the_scheduler_waits(
    cards: dict[str, str], problems: dict, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    args = [*problems["train_mnist"], "--log-every", 1, "--run-dir", run_dir]
    launch(cards, "4gpu_fp16", "train_mnist", *args, processes=2, fault={"scale_loss": [3, 1e30]})
    steps = rows(run_dir, "steps")
    assert [row["step"] for row in steps] == [*range(1, LAST)]  # of ten batches one made no step
    assert all(math.isfinite(row["train_loss"]) for row in steps)
    last = max((run_dir / "checkpoints").glob("step-*"))
    scheduler = torch.load(last / "state" / "scheduler.bin", weights_only=True)
    progress = json.loads((last / "trainer.json").read_text())["progress"]
    assert progress["num_skipped"] == 1 and progress["step"] == LAST - 1
    assert scheduler["_step_count"] == LAST  # 1 at the start


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("factor", ["nan", "inf"])
def test_a_gradient_that_is_not_finite_stops_all_with_one_sentence(
    cards: dict[str, str], problems: dict, tmp_path: Path, precision: str, factor: str
) -> None:
    args = [*problems["train_mnist"], "--run-dir", tmp_path / "run"]
    yaml = "4gpu" if precision == "no" else f"4gpu_{precision}"
    result = launch(
        cards, yaml, "train_mnist", *args, expect=None, fault={"rank": 3, "scale_loss": [6, factor]}
    )
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert result.returncode != 0 and len(errors) == 1, result.stderr
    assert "loss or gradient is not finite at step 6" in errors[0]
    assert max((tmp_path / "run" / "checkpoints").glob("step-*")).name == "step-0000000004"


@pytest.mark.slow
@pytest.mark.parametrize("yaml", ["1gpu_fp16", "4gpu_bf16"])
def test_sigterm_saves_and_the_resume_is_exact(
    cards: dict[str, str], problems: dict, tmp_path: Path, yaml: str
) -> None:
    args = problems["train_mnist"]
    launch(cards, yaml, "train_mnist", *args, "--run-dir", tmp_path / "whole")
    args = [*args, "--run-dir", tmp_path / "stopped"]
    stopped = launch(
        cards,
        yaml,
        "train_mnist",
        *args,
        expect=None,
        fault={"rank": 0, "signal": [2, signal.SIGTERM]},
    )
    assert "stopped by SIGTERM at step " in stopped.stdout, stopped.stderr
    launch(cards, yaml, "train_mnist", "--resume", "auto", *args)
    assert digests(tmp_path / "stopped") == digests(tmp_path / "whole")


@pytest.mark.slow
def test_four_cards_evaluate_each_of_ten_thousand_pictures_once(
    cards: dict[str, str], tiny_mnist: Path, tmp_path: Path
) -> None:
    import pyarrow.parquet as pq

    file = "{}-00000-of-00001.parquet"
    pq.write_table(
        pq.read_table(ROOT / "data/mnist" / file.format("test")), tmp_path / file.format("test")
    )
    shutil.copy(tiny_mnist / file.format("train"), tmp_path)
    run_dir = tmp_path / "run"
    launch(
        cards,
        "4gpu_fp16",
        "train_mnist",
        "--dataset",
        tmp_path,
        "--batch-size",
        64,
        "--stop-after-steps",
        2,
        "--no-pictures",
        "--run-dir",
        run_dir,
    )
    assert rows(run_dir, "epochs")[-1]["eval_samples"] == 10_000


@pytest.mark.slow
def test_a_run_on_one_card_gives_the_numbers_of_the_cpu(
    cards: dict[str, str], problems: dict, tmp_path: Path
) -> None:
    """If emulated, the same kernels made them: only the GPU's own path could make a difference."""
    close = {"rel": 1e-6} if are_emulated(cards) else {"rel": 1e-3, "abs": 0.02}
    for script, args in problems.items():
        launch(cards, "1gpu", script, *args, "--run-dir", tmp_path / "card")
        assert conftest.run(f"{script}.py", *args, "--run-dir", tmp_path / "cpu").returncode == 0
        for there, here in zip(rows(tmp_path / "cpu"), rows(tmp_path / "card"), strict=True):
            assert here == pytest.approx(there, **close)


@pytest.mark.slow
def test_cuda_graphs_with_micro_batches_are_refused(
    cards: dict[str, str], problems: dict, tmp_path: Path
) -> None:
    args = [*problems["train_mnist"], "--accumulate", 2, "--run-dir", tmp_path / "run"]
    result = launch(cards, "1gpu_bf16_compile", "train_mnist", *args, expect=None)
    assert "use --accumulate 1, or dynamo_mode: default" in result.stderr


@pytest.mark.slow
def test_pictures_that_lie_on_the_card_are_not_copied(
    emulated_cards: dict[str, str], problems: dict, tmp_path: Path
) -> None:
    args = [*problems["train_mnist"], "--run-dir", tmp_path / "run"]
    launch(emulated_cards, "1gpu", "train_mnist", *args)
    assert {copies for _, copies in check_steps(tmp_path / "run", QUIET_STEPS)} == {0}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["text", "gan", "colour_pictures"])
def test_each_example_trains_and_evaluates_in_fp16(
    cards: dict[str, str], tiny_mnist: Path, tmp_path: Path, name: str
) -> None:
    flags, num_evaluated = {
        "text": (["--num-lines", 109], 109),
        "gan": (["--dataset", tiny_mnist], 101),
        "colour_pictures": (["--num-pictures", 44], 11),
    }[name]
    run_dir = tmp_path / "run"
    launch(
        cards,
        "4gpu_fp16",
        f"examples/{name}",
        *flags,
        "--batch-size",
        4,
        "--eval-batch-size",
        26,
        "--stop-after-steps",
        4,
        "--log-every",
        1,
        "--no-pictures",
        "--timeout",
        60,
        "--run-dir",
        run_dir,
        processes=2,
    )
    assert [row["step"] for row in rows(run_dir, "steps")] == [1, 2, 3, 4]
    epoch = rows(run_dir, "epochs")[-1]
    assert epoch["eval_samples"] == num_evaluated
    assert all(map(math.isfinite, epoch.values()))


@pytest.mark.slow
def test_the_mean_over_tokens_goes_through_the_loss_scale(
    cards: dict[str, str], tmp_path: Path
) -> None:
    """By SGD, which sees every factor; after the skipped steps the batches are others."""
    flags = ["--answers-only", "--num-bytes", 1_030_000, "--layers", 1, "--width", 32]
    flags += ["--optimizer", "sgd", "--learning-rate", 0.3, "--min-learning-rate", 0]
    flags += ["--schedule", "constant", "--warmup", 0, "--clip-norm", "inf", "--batch-size", 24]
    flags += ["--stop-after-steps", 8, "--eval-every", 99, "--log-every", 1]
    flags += ["--no-pictures", "--timeout", 60]
    losses = []
    for yaml, processes, accumulate in (("1gpu", 1, 1), ("1gpu_fp16", 1, 1), ("4gpu_fp16", 2, 4)):
        run_dir, overflows = tmp_path / yaml, "fp16" in yaml
        launch(
            cards,
            yaml,
            "examples/gpt",
            *flags,
            "--accumulate",
            accumulate,
            "--run-dir",
            run_dir,
            processes=processes,
            fault={"scale_loss": [2 * accumulate + 1, 1e30]} if overflows else None,
        )
        last = max((run_dir / "checkpoints").glob("step-*"))
        progress = json.loads((last / "trainer.json").read_text())["progress"]
        assert (progress["num_skipped"] > 0) == overflows and progress["step"] == 8
        losses.append([row["train_loss"] for row in rows(run_dir, "steps")])
    assert losses[0][-1] < losses[0][0] - 0.4
    for found in losses[1:]:
        assert found == pytest.approx(losses[0], rel=0.05)


@pytest.mark.gpu
def test_the_doctor_calls_every_card_healthy(real_cards: dict[str, str], tmp_path: Path) -> None:
    """Not on emulated ones: it multiplies matrices as large as a card needs to show its rate."""
    number = torch.cuda.device_count()
    config = "4gpu" if number > 1 else "1gpu"
    flags = ["--num_processes", str(number)]
    done = conftest.run(
        "doctor.py", "--run-dir", tmp_path / "run", config=config, launcher_flags=flags, timeout=300
    )
    assert done.returncode == 0 and done.stdout.endswith("ready to train\n"), done
