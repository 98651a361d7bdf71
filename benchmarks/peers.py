"""The scripts that a user would pick instead, beside train_mnist.py: seconds, accuracy, memory.

    python -m benchmarks.peers --pytorch CLONE --fabric CLONE
    python -m benchmarks.peers --only accelerate ours fast --rounds 3

CLONE is a git repository (bare or not) of pytorch/examples and of Lightning-AI/pytorch-lightning,
whose HEAD is run unmodified; a peer without its clone is left out. Each has its own defaults but
for the epochs:

    pytorch     mnist/main.py, 4 epochs
    fabric      examples/fabric/image_classifier/train_fabric.py, 4 epochs; `pip install lightning`
    accelerate  benchmarks/_cv_example.py: Accelerate's examples/cv_example.py, written for MNIST
    ours        train_mnist.py, 3 epochs
    fast        train_mnist.py @recipes/fast, 1 epoch

All get the shipped pictures, the peers as the files that torchvision would download, and whatever
threads the environment says. That download and our first start, which decodes, are not counted.
Fabric prints whole percents: it is started such that tensors are printed with four decimals.

`lines` are those with code: no blank lines, comments or docstrings. Training, evaluation and
images/s are medians over epochs; the peers' by the time at which each line comes, an epoch at the
pace from its first progress line to its last. `to 99 %` is from the start of the process to the
line of its first evaluation at 99.0 % or more, `process` to its exit; `memory` is the largest
resident size of one process, loader workers not added. Figures are medians over --rounds.
"""

import argparse
import io
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import tokenize
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow.parquet
from PIL import Image

from benchmarks._runs import MNIST, ROOT

FABRIC = "examples/fabric/image_classifier/train_fabric.py"
IN_CLONES = {"pytorch": "mnist/main.py", "fabric": FABRIC}
UNROUNDED = (
    "import runpy, sys, torch; del sys.argv[0]\n"
    "torch.Tensor.__format__ = lambda self, _: f'{self.item():.4f}'\n"
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
VERSIONS = (  # and imports them, so that no run has to compile them
    "import contextlib, importlib, sys\n"
    "for name in ('torch', 'torchvision', 'accelerate', 'lightning'):\n"
    "  with contextlib.suppress(ImportError):\n"
    "    print(f'{name} {importlib.import_module(name).__version__}', end=', ')\n"
    "print('Python', sys.version.split()[0])"
)
COMMANDS = {
    "pytorch": ["{python}", "{folder}/mnist/main.py", "--epochs", "4"],
    "fabric": ["{python}", "-c", UNROUNDED, "{folder}/" + FABRIC, "--epochs", "4"],
    "accelerate": ["{python}", f"{ROOT}/benchmarks/_cv_example.py", "--data_dir", "{folder}/rows"],
    "ours": [sys.executable, str(MNIST)],
    "fast": [sys.executable, str(MNIST), f"@{ROOT}/recipes/fast"],
}
PROGRESS = re.compile(r"Train Epoch: \d+ \[(\d+)/(\d+)")
ACCURACY = re.compile(r"Accuracy: (?:(\d+)/(\d+)|\(([\d.]+)%)")


def lay_data(folder: Path, number: int | None) -> None:
    """The shipped data as Parquet under rows/, as IDX files where torchvision looks for them."""
    (folder / "rows").mkdir()
    raw = folder / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    (folder / "Datasets").symlink_to("data")  # what Fabric's example calls it
    for split, prefix in (("train", "train"), ("test", "t10k")):
        source = ROOT / "data" / "mnist" / f"{split}-00000-of-00001.parquet"
        rows = pyarrow.parquet.read_table(source).slice(0, number)
        pyarrow.parquet.write_table(rows, folder / "rows" / f"{split}.parquet")
        files = (io.BytesIO(picture["bytes"]) for picture in rows["image"].to_pylist())
        pictures = np.stack([np.asarray(Image.open(file)) for file in files])
        labels = rows["label"].to_numpy().astype(np.uint8)
        for kind, values in (("images-idx3", pictures), ("labels-idx1", labels)):
            head = struct.pack(f">{1 + values.ndim}I", 0x800 + values.ndim, *values.shape)
            (raw / f"{prefix}-{kind}-ubyte").write_bytes(head + values.tobytes())


def count_lines(*paths: Path) -> int:
    """Lines with code: no blank lines, comments or docstrings."""
    layout = (tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines = set()
    for path in paths:
        begins = True  # a statement; a string that does so is a docstring
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type not in (*layout, tokenize.NEWLINE):
                if not (begins and token.type == tokenize.STRING):
                    lines |= {(path, n) for n in range(token.start[0], token.end[0] + 1)}
                begins = False
            begins |= token.type == tokenize.NEWLINE
    return len(lines)


def run(words: list[str], cwd: Path) -> dict[str, Any]:
    """Run it to its end: each line of its output with the second at which it came, and the cost."""
    shutil.rmtree(cwd, ignore_errors=True)  # what the run before left
    cwd.mkdir()
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1",
           "HF_HOME": str(cwd.with_name("cache"))}  # fmt: skip
    started_at = time.perf_counter()
    with subprocess.Popen(words, cwd=cwd, env=env, stdout=subprocess.PIPE, text=True) as process:
        lines = [(time.perf_counter() - started_at, line) for line in process.stdout or ()]
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {process.returncode}")
    seconds = time.perf_counter() - started_at
    return {"lines": lines, "process": seconds, "memory": usage.ru_maxrss / 1024}


def epochs_of_peer(lines: list[tuple[float, str]]) -> list[dict[str, float]]:
    """Accuracy in percent, seconds and images/s of each epoch, from what the script printed."""
    epochs, marks = [], []
    for at, line in lines:
        if found := PROGRESS.search(line):
            marks.append((at, *map(int, found.groups())))
        elif found := ACCURACY.search(line):
            correct, samples, percent = found.groups()
            (first_at, first, _), (last_at, last, total) = marks[0], marks[-1]
            pace, marks = (last - first) / (last_at - first_at), []
            epochs.append({"accuracy": float(percent or 100 * int(correct) / int(samples)),
                           "at": at, "train": total / pace, "images_per_second": pace,
                           "eval": at - last_at - (total - last) / pace})  # fmt: skip
    return epochs


def epochs_of_ours(lines: list[tuple[float, str]], run_dir: Path) -> list[dict[str, float]]:
    """The same of train_mnist.py, which measures itself."""
    timing, metrics = ([json.loads(line) for line in (run_dir / name).read_text().splitlines()]
                       for name in ("timing.jsonl", "metrics.jsonl"))  # fmt: skip
    times = [at for at, line in lines if "eval_accuracy" in line]
    accuracies = [100 * row["eval_accuracy"] for row in metrics if "eval_accuracy" in row]
    return [{"accuracy": accuracy, "at": at, "train": row["train_seconds"],
             "images_per_second": row["train_samples"] / row["train_seconds"],
             "eval": row["eval_seconds"]}
            for at, accuracy, row in zip(times, accuracies, timing, strict=True)]  # fmt: skip


def table_row(name: str, lines: str, runs: list[dict[str, Any]]) -> str:
    """Medians over the runs of one script."""
    epochs = [*zip(*(run["epochs"] for run in runs), strict=True)]  # the rounds of each
    accuracy = ", ".join(f"{median(row['accuracy'] for row in rows):.2f}" for rows in epochs)
    train, evaluation, pace = (median(row[key] for rows in epochs for row in rows)
                               for key in ("train", "eval", "images_per_second"))  # fmt: skip
    # A round that does not get there counts as infinite; a float32 of 99.0 may lie below it.
    to_99 = median(min((row["at"] for row in run["epochs"] if row["accuracy"] > 98.999),
                       default=float("inf")) for run in runs)  # fmt: skip
    process, memory = (median(run[key] for run in runs) for key in ("process", "memory"))
    reached = f"{to_99:.1f}" if to_99 < float("inf") else "-"
    return (f"| {name} | {lines} | {train:.2f} | {evaluation:.2f} | {pace:,.0f} | {accuracy} | "
            f"{reached} | {process:.1f} | {memory:,.0f} |")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, path in IN_CLONES.items():
        parser.add_argument(f"--{name}", type=Path, metavar="CLONE", help=f"that has {path}")
    parser.add_argument("--python", default=sys.executable, help="that starts the peers")
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=None)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--pictures", type=int, default=None,
                        help="of each split, 700 or more, to try it out; None: all")  # fmt: skip
    parser.add_argument("--json", type=Path, default=None, help="also write the figures there")
    args = parser.parse_args()
    if args.pictures is not None and args.pictures < 700:
        parser.error("--pictures: 700 or more, or a peer prints too little")
    clones = {name: getattr(args, name) for name in IN_CLONES}
    names = args.only or [name for name in COMMANDS if clones.get(name, ROOT)]
    for name in names:
        if name in clones and clones[name] is None:
            parser.error(f"{name} needs --{name} CLONE")
    print(f"{os.cpu_count()} cores, OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'not set')}")
    for python in dict.fromkeys((sys.executable, args.python)):
        subprocess.run([python, "-c", VERSIONS], check=True)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        # In a process of its own: the peak of what is started here is at least that of this one.
        with ProcessPoolExecutor(1) as pool:
            pool.submit(lay_data, folder, args.pictures).result()
        cwd = folder / "cwd"  # beside data/: mnist/main.py asks for ../data
        for name in filter(clones.get, dict.fromkeys(names)):
            script, git = folder / IN_CLONES[name], ["git", "-C", str(clones[name].resolve())]
            script.parent.mkdir(parents=True)
            script.write_bytes(subprocess.check_output([*git, "show", f"HEAD:{IN_CLONES[name]}"]))
            commit = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True)
            print(f"{name}: {IN_CLONES[name]} of commit {commit.strip()}", flush=True)
        commands = {
            name: [word.replace("{python}", args.python).replace("{folder}", directory)
                   for word in words]
            for name, words in COMMANDS.items()
        }  # fmt: skip
        for name in ("ours", "fast") if args.pictures else ():
            commands[name] += ["--dataset", str(folder / "rows")]
        if {*names} & {"ours", "fast"}:
            run([*commands["ours"], "--stop-after-steps", "1"], cwd)  # fills the cache
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for _ in range(args.rounds):
            for name in names:
                done = run(commands[name], cwd)
                printed, run_dir = done.pop("lines"), cwd / "runs" / "mnist"
                done["epochs"] = (epochs_of_ours(printed, run_dir) if run_dir.exists()
                                  else epochs_of_peer(printed))  # fmt: skip
                runs[name].append(done)
                print(f"{name}: {done['process']:.1f} s", flush=True)
        lines = {name: str(count_lines(next(Path(word) for word in words if word.endswith(".py"))))
                 for name, words in commands.items() if name in names}  # fmt: skip
    kit = count_lines(MNIST, *(ROOT / "trainkit").glob("*.py"))
    print("| script | lines | training, s/epoch | evaluation, s | images/s | accuracy by epoch, % "
          "| to 99 %, s | process, s | memory, MB |\n|" + " --- |" * 9)  # fmt: skip
    for name in names:
        more = f"; {kit:,} with trainkit" if name in ("ours", "fast") else ""
        print(table_row(name, lines[name] + more, runs[name]))
    if args.json:
        args.json.write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main()
