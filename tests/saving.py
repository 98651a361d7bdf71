"""A small run that saves checkpoints, and files of them that somebody else made."""

import os
import pickle
from pathlib import Path

import torch
from accelerate import Accelerator
from conftest import contents, forget_accelerator, refused

from trainkit.checkpoints.contents import Contents, Frozen
from trainkit.checkpoints.save import Checkpoints
from trainkit.config import TrainingConfig
from trainkit.hashes import KIND, digest_file
from trainkit.numbers.means import RunningMeans
from trainkit.numbers.orders import Progress
from trainkit.repairs.private_names import prepared_models
from trainkit.store.log import JsonlTracker
from trainkit.store.manifest import write_manifest


class Run:
    """A small run: a linear model, its optimizer and scheduler, and its checkpoints."""

    def __init__(self, run_dir: Path, keep: int = 9, **options):
        forget_accelerator()
        self.accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        model = torch.nn.Linear(50, 7)
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(
            model, optimizer, scheduler
        )
        self.run_dir, self.tracker = run_dir, JsonlTracker(run_dir)
        (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        self.means = RunningMeans(self.accelerator)
        self.checkpoints = Checkpoints(
            self.accelerator,
            TrainingConfig(run_dir=run_dir, keep=keep, **{"resume": "auto"} | options),
            {},
            self.tracker,
            self.means,
            Contents(self.accelerator, Frozen(prepared_models(self.accelerator))),
        )
        self.progress = Progress()

    def train(self, num_steps: int):
        for _ in range(num_steps):
            loss = self.model(torch.randn(4, 50)).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.means.add_all([("loss", loss, 4)])
            self.progress.step += 1
            self.progress.step_in_epoch += 1
            self.tracker.log({"train_loss": loss.item()}, step=self.progress.step)
            self.checkpoints.save(self.progress)
        self.checkpoints.commits.wait()

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def refuses(self, wanted: str | Path) -> str:
        """The message with which it does not resume; no weight and no file has changed."""
        before, files = self.weights(), contents(self.run_dir)
        with refused("") as raised:
            self.checkpoints.resume(str(wanted))
        assert all(map(torch.equal, before, self.weights())), "a weight changed"
        assert contents(self.run_dir) == files
        return str(raised.value)


def step(run_dir: Path, number: int) -> Path:
    return run_dir / "checkpoints" / f"step-{number:010d}"


def reforge(path: Path):
    """Make the manifest say that the folder as it is now is what was saved."""
    files = {}
    for file in path.rglob("*"):
        if file.is_file() and file.name != "MANIFEST.json":
            described = {"bytes": file.stat().st_size, KIND: digest_file(file)}
            files[file.relative_to(path).as_posix()] = described
    write_manifest(path, files)


class Payload:
    """Unpickling it writes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def write_hostile(file: Path, kind: str, mark: Path):
    if kind == "raw":
        file.write_bytes(pickle.dumps(Payload(mark)))
    else:
        torch.save(Payload(mark), file, _use_new_zipfile_serialization=kind == "zip")
