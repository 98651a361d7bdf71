"""Which parts of others train, resume and split exactly: optimizers, sets, metrics, trackers.

    python -m benchmarks.works_with [--only TEXT] [--out FILE] [--venv FOLDER]

Each is a part of a script of its own, benchmarks/_works_with.py, which runs for 20 steps: whole,
resumed after step 12 of a run that went on, with --accumulate 2, in two processes and sharded over
two. A line of docs/works_with.md is printed for each part. The packages are installed into a folder
that is removed at the end.
"""

import argparse
import importlib.metadata
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks._venv import environment, install
from trainkit.tools.rehearse.causes import first_difference, has_same_files, number
from trainkit.tools.rehearse.worlds import SHARDED, Outcome, World

PINS = """timm==1.0.31 schedulefree==1.4.1 bitsandbytes==0.50.2 torchao==0.18.0
    pytorch_optimizer==4.1.0 galore-torch==1.0 apollo-torch==1.0.3 prodigyopt==1.1.2
    dadaptation==2.0 lion-pytorch==0.2.5 adabelief-pytorch==0.2.1 heavyball==3.2.1
    muon-optimizer==0.1.0 adam-mini==1.1.1 kron-torch==0.3.3 came-pytorch==0.1.3
    prodigy-plus-schedule-free==2.0.1 torch-optimi==0.3.3 adam-atan2-pytorch==0.4.1 h5py==3.16.0
    zarr==3.1.6 lmdb==3.0.0 webdataset==1.0.2 litdata==0.2.76 torch_geometric==2.8.1 monai==1.6.1
    polars==2.1.0 torchmetrics==1.9.0 scikit-learn==1.9.1 evaluate==0.4.6 mlflow-skinny==3.17.2
    sqlalchemy==2.1.9 alembic==1.20.1 tensorboard==2.21.0"""
# What these ask for are other versions than those that are here.
ALONE = "mosaicml-streaming==0.13.0 python-snappy cramjam zstd catalogue wids==0.1.11"
SECONDS = 240.0  # of one run
TOGETHER = 8  # parts that share their processes
TWO = ("two", "sharded")

TORCH = "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax LBFGS Muon NAdam RAdam RMSprop Rprop SGD"
TIMM = """adabelief adafactorbv adahessian adamp adamuon adan adopt cadamw clion kron lamb laprop
    lars lion madgrad mars nadamw novograd sgdp lookahead_adamw"""
OTHERS = """galore_torch.GaLoreAdamW galore_torch.safe.GaLoreAdamW apollo_torch.APOLLOAdamW
    schedulefree.AdamWScheduleFree prodigyopt.Prodigy torchao.AdamW8bit torchao.AdamW4bit
    bitsandbytes.AdamW8bit kron_torch.Kron dadaptation.DAdaptAdam muon.SingleDeviceMuon
    adam_mini.Adam_mini came_pytorch.CAME lion_pytorch.Lion adabelief_pytorch.AdaBelief
    heavyball.SOAP prodigyplus.ProdigyPlusScheduleFree optimi.StableAdamW
    adam_atan2_pytorch.AdamAtan2 schedulefree.SGDScheduleFree pytorch_optimizer.SOAP
    pytorch_optimizer.Lookahead pytorch_optimizer.ScheduleFreeWrapper pytorch_optimizer.Ranger21
    pytorch_optimizer.SCION pytorch_optimizer.ScalableShampoo pytorch_optimizer.AdEMAMix"""
SCHEDULES = """torch.OneCycleLR torch.ReduceLROnPlateau timm.CosineLRScheduler
    torch.CosineAnnealingWarmRestarts torch.CyclicLR transformers.get_cosine_schedule_with_warmup
    pytorch_optimizer.CosineScheduler"""
SETS = """streaming.MDS streaming.MDSReader litdata webdataset wids h5py lmdb zarr pyarrow.Table
    polars.DataFrame monai.CacheDataset torch_geometric torchvision.ImageFolder numpy_list InMemory
    list TensorDataset Dataset Subset ConcatDataset StackDataset random_split datasets.Dataset
    np.memmap torchvision.FakeData IterableDataset"""
METRICS = """torchmetrics.SumMetric.synced torchmetrics.SumMetric torchmetrics.AUROC
    torchmetrics.CalibrationError sklearn.roc_auc_score sklearn.f1_score monai.compute_roc_auc
    evaluate.EvaluationModule"""
TRACKERS = "tensorboard mlflow"
PARTS = [
    ("optimizer", *(f"torch.{name}" for name in TORCH.split())),
    ("optimizer", *(f"timm.{name}" for name in TIMM.split()), *OTHERS.split()),
    ("schedule", *SCHEDULES.split()),
    ("set", *SETS.split()),
    ("metric", *METRICS.split()),
    ("tracker", *TRACKERS.split()),
]
DISTRIBUTIONS = {
    "sklearn": "scikit-learn",
    "muon": "muon-optimizer",
    "optimi": "torch-optimi",
    "prodigyplus": "prodigy-plus-schedule-free",
    "streaming": "mosaicml-streaming",
    "np": "numpy",
    "mlflow": "mlflow-skinny",
}


def version_of(name: str) -> str:
    """The version of the package that a part is from; torch's for its sets."""
    package = name.partition(".")[0]
    try:
        return importlib.metadata.version(DISTRIBUTIONS.get(package, package))
    except importlib.metadata.PackageNotFoundError:
        return importlib.metadata.version("torch")


def meeting_point() -> dict[str, str]:
    """A port for one run of two processes: gloo would read what the run before has left at one."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def jobs_of(kind: str, name: str, folder: Path) -> list[dict[str, Any]]:
    """What is run for a part, by the name of the world."""
    flags = [f"--{kind}-of", name, "--timeout", "60"]
    if name == "tensorboard":
        flags[:2] = ["--tracker", name]
    whole = str(folder / "whole/run")
    more = {
        "whole": ([], {}, None),
        "resumed": (["--resume", "auto"], {}, whole),
        "accumulate": (["--accumulate", "2"], {}, None),
        "two": ([], meeting_point(), None),
        "sharded": ([], SHARDED | meeting_point(), None),
    }
    return [
        {"part": (kind, name), "world": world, "folder": str(folder / world), "job": job}
        for world, (added, variables, source) in more.items()
        for job in [([*flags, *added, "--run-dir", str(folder / world / "run")], variables, source)]
    ]


def run(jobs: list[dict[str, Any]], processes: int, folder: Path) -> None:
    """Run jobs one after another, in so many processes that stay, and note why each did not end."""
    results = folder / f"results-{processes}"
    results.touch()
    names = folder / f"jobs-{processes}.json"
    names.write_text(json.dumps([each["job"] for each in jobs]))
    command = [sys.executable, "-m", "benchmarks._works_with", names, results]
    if processes > 1:
        launch = ["torch.distributed.run", f"--nproc_per_node={processes}", "--standalone"]
        command[1:2] = ["-m", *launch, "-m"]
    while (done := len(results.read_text().splitlines())) < len(jobs):
        log = folder / f"log-{processes}"
        with open(log, "w") as file:
            working = subprocess.Popen(command, stdout=file, stderr=file)
        seen_at = time.monotonic()
        while working.poll() is None and time.monotonic() < seen_at + SECONDS:
            time.sleep(1)
            if len(results.read_text().splitlines()) > done:
                done, seen_at = len(results.read_text().splitlines()), time.monotonic()
        if working.poll() is None:
            working.terminate()
            working.wait()
        if len(results.read_text().splitlines()) == done < len(jobs):  # this one ended them all
            said = [line for line in log.read_text().splitlines() if "rror: " in line]
            reason = said[0] if said else f"it ended with {working.returncode}, or hung"
            with open(results, "a") as file:
                file.write(json.dumps([done, reason]) + "\n")
    for line in results.read_text().splitlines():
        number, jobs[number]["problem"] = json.loads(line)


def verdict(first: dict[str, Any], other: dict[str, Any]) -> str:
    """What is said of a world, beside the run in one process."""
    if other["problem"]:
        return f"fails: {other['problem']}"
    one, two = (
        Outcome(World(each["world"], is_exact=each["world"] == "resumed"), Path(each["folder"]))
        for each in (first, other)
    )
    if has_same_files(one, two):
        return "equal bytes"
    found = first_difference(one, two)
    return found.text or f"equal to {number(found.worst)}"


def counted(name: str, world: dict[str, Any]) -> str:
    """Whether a tracker has each of 20 steps once."""
    if world["problem"]:
        return f"fails: {world['problem']}"
    steps = steps_of(name, Path(world["folder"]) / "run")
    twice = sorted({step for step in steps if steps.count(step) > 1})
    missing = sorted({*range(1, 21)} - {*steps})
    if not twice and not missing:
        return "once"
    return f"twice: {twice}, never: {missing}".replace("[]", "none")


def steps_of(name: str, run: Path) -> list[int]:
    """The steps that a tracker has in its newest run."""
    if name == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(run / "tensorboard"), {"scalars": 0})
        events.Reload()
        return [event.step for event in events.Scalars("steps/train_loss")]
    if name == "mlflow":
        import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{run.resolve()}/mlflow.db")
    (found,) = client.search_experiments(filter_string="name = 'works_with'")
    newest = client.search_runs([found.experiment_id])[0]
    return [each.step for each in client.get_metric_history(newest.info.run_id, "grad_norm")]


def line_of(worlds: list[dict[str, Any]]) -> str:
    """The line of a part in the table."""
    kind, name = worlds[0]["part"]
    if kind == "tracker":
        said = [counted(name, world) for world in worlds if world["world"] != "accumulate"]
        return f"{kind}: | {name} | {version_of(name)} | {' | '.join(said)} |"
    if problem := worlds[0]["problem"]:
        cells, texts = ["-"] * 4, [problem]
    else:
        said = [verdict(worlds[0], world) for world in worlds[1:]]
        cells = [cell(text) for text in said]
        texts = list(dict.fromkeys(text for text in said if not text.startswith("equal")))
    text = " // ".join(text.replace("|", "/").replace("\n", " ")[:300] for text in texts)
    return f"{kind}: | {name} | {version_of(name)} | {' | '.join(cells)} | {text} |"


def cell(text: str) -> str:
    """One word for what was said of a world."""
    if found := re.match(r"equal to (.+)", text):
        return found[1]
    return {"equal": "bytes", "fails": "fails"}.get(re.split(r"\W", text)[0], "differs")


def measure(only: str, out: Path, folder: Path) -> None:
    """Run what was asked for, a part after another in one process, and then in two."""
    parts = [(kind, name) for kind, *names in PARTS for name in names]
    chosen = [part for part in parts if re.search(only, " ".join(part))]
    for begin in range(0, len(chosen), TOGETHER):
        some = chosen[begin : begin + TOGETHER]
        place = folder / str(begin)
        place.mkdir()
        jobs = [jobs_of(*part, place / str(number)) for number, part in enumerate(some)]
        every = [job for each in jobs for job in each]
        run([job for job in every if job["world"] not in TWO], 1, place)
        trained = {each[0]["part"] for each in jobs if not each[0]["problem"]}
        two = [job for job in every if job["world"] in TWO and job["part"] in trained]
        run(two, 2, place)
        for worlds in jobs:
            line = line_of(worlds)
            print(line, flush=True)
            with open(out, "a") as file:
                file.write(line + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="those whose kind and name match this pattern")
    parser.add_argument("--out", type=Path, default=Path("works_with.txt"))
    parser.add_argument("--venv", type=Path, help="a folder to keep the packages in")
    args = parser.parse_args()
    if "WORKS_WITH" in os.environ:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            measure(args.only, args.out, Path(folder))
        return
    with tempfile.TemporaryDirectory() as folder:
        python = install(args.venv or Path(folder) / "venv", PINS, ALONE)
        command = [python, "-m", "benchmarks.works_with", "--only", args.only, "--out", args.out]
        sys.exit(
            subprocess.run(
                command, env=environment(WORKS_WITH="1", TORCHDYNAMO_DISABLE="1"), check=False
            ).returncode
        )


if __name__ == "__main__":
    main()
