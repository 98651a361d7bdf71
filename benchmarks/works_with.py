"""Which optimizers and sets of others train, resume and split exactly: docs/works_with.md.

    python -m benchmarks.works_with [--only TEXT] [--out FILE]

Each is rehearsed in a script of its own, benchmarks/_works_with.py, in the worlds of
trainkit/tools/rehearse. It prints a table with the versions of the packages.
"""

import argparse
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("_works_with.py")
TORCH = "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax LBFGS Muon NAdam RAdam RMSprop Rprop SGD"
TIMM = """adabelief adafactorbv adahessian adamp adamuon adan adopt cadamw clion kron lamb laprop
    lars lion madgrad mars muon nadamw novograd radabelief rmsproptf sgdp sgdw"""
FREE = "AdamWScheduleFree SGDScheduleFree RAdamScheduleFree"
SETS = """InMemory list TensorDataset Dataset Subset ConcatDataset StackDataset random_split
    datasets.Dataset np.memmap torchvision.FakeData IterableDataset"""
WORLDS = {
    "resumed": "resumed after step 12",
    "`--accumulate 2`": "--accumulate 2",
    "2 processes": "2 processes",
    "sharded": "sharded over 2",
}
SECONDS = 600


def rehearse(flag: str, name: str) -> dict[str, str]:
    """What the rehearsal says of each world, by its name."""
    command = [sys.executable, "-m", "trainkit.tools.rehearse", str(SCRIPT), flag, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    said: dict[str, str] = {}
    world = ""
    for line in done.stdout.splitlines():
        found = next((w for w in ("the same again", *WORLDS.values()) if line.startswith(w)), "")
        if found or not line.startswith(" "):
            world = found
        if world:
            said[world] = f"{said.get(world, '')} {line.removeprefix(found).strip()}".strip()
    if not said:
        last = (done.stdout + done.stderr).strip().splitlines()[-1:]
        reason = " ".join(last).rpartition("does not run: ")[2]
        said = dict.fromkeys(WORLDS.values(), f"does not run: {reason}")
    return said


def cell(text: str) -> str:
    """One word for what was said of a world."""
    if number := re.match(r"equal to (\S+)", text):
        return number[1].rstrip(":;")
    for begin, word in (("equal bytes", "bytes"), ("refused", "refused"), ("fails", "fails")):
        if text.startswith(begin):
            return word
    return "-" if text.startswith("does not run") else "differs" if text else ""


def surprise(said: dict[str, str]) -> str:
    """The first sentence of what is no equality, without what a cell says."""
    for text in said.values():
        if not text.startswith("equal"):
            sentence = re.split(r"(?<=[a-z)`])[.;] ", text.split("see docs/")[0])[0]
            return sentence.replace("|", "/")[:160]
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="those whose name has this text")
    parser.add_argument("--out", type=Path, default=Path("works_with.txt"))
    arguments = parser.parse_args()
    names = [("--optimizer-of", f"torch.{name}") for name in TORCH.split()]
    names += [("--optimizer-of", f"timm.{name}") for name in TIMM.split()]
    names += [("--optimizer-of", f"schedulefree.{name}") for name in FREE.split()]
    names += [("--set-of", name) for name in SETS.split()]
    packages = ("torch", "accelerate", "timm", "schedulefree", "datasets", "torchvision")
    lines = [", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages), ""]
    lines += [f"| | {' | '.join(WORLDS)} | what surprises |", "| --- " * 6 + "|"]
    for flag, name in names:
        if arguments.only in name:
            said = rehearse(flag, name)
            cells = [cell(said.get(world, "")) for world in WORLDS.values()]
            lines.append(f"| {name} | {' | '.join(cells)} | {surprise(said)} |")
            print(lines[-1], flush=True)
            arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
