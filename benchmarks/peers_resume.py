"""How exactly the peers resume: each is killed one step after a checkpoint, and resumed.

    python -m benchmarks.peers_resume [PEER ...] [--out FILE] [--venv FOLDER]

All train the same: 803 pictures of MNIST in batches of 32, a network with dropout, AdamW with a
rate that falls in each step, 3 epochs of 26 steps, a checkpoint every 7. The process ends
(os._exit) before the forward pass of step 37, and the run goes on as the peer's documentation says,
from its newest checkpoint. It is compared with a run that was not killed, whose first 35 steps it
must have had. `a sample draws`: each sample draws noise from torch. `a torn file`: the kernel ends
the process when a file that is written after step 35 passes half the size of the largest before it
(RLIMIT_FSIZE). The network itself writes down which rows it gets and what dropout it draws. Each
peer is a function of a few lines. The packages are installed into a folder that is removed.
"""

import argparse
import hashlib
import importlib
import importlib.metadata
import io
import itertools
import json
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, Dataset

from benchmarks._venv import environment, install

PINS = "lightning==2.6.6 pytorch-ignite==0.5.5 torchdata==0.11.0 h5py==3.16.0 transformers==5.24.0"
ALONE = """mosaicml==0.32.1 torch-optimizer==0.3.0 pytorch-ranger==0.1.1 py-cpuinfo coolname
    lazy-importer backoff gql graphql-core keras==3.15.1 namex optree"""
ROWS, BATCH, EPOCHS, EVERY, DIE_AT = 803, 32, 3, 7, 37
PER_EPOCH = -(-ROWS // BATCH)
STEPS = EPOCHS * PER_EPOCH
SECONDS = 300  # of one life
SAVED = (DIE_AT - 1) // EVERY * EVERY


@dataclass
class Life:
    """What this process is: `kind` is whole, killed, torn or resumed."""

    kind: str = ""
    notes: Path = Path()
    workers: int = 0
    is_noisy: bool = False


HERE = Life()


class Digits(Dataset):
    """Pictures, whose number in the set stands before the first pixel."""

    def __init__(self) -> None:
        import pandas as pd
        from PIL import Image

        path = Path(__file__).parents[1] / "data/mnist/test-00000-of-00001.parquet"
        table = pd.read_parquet(path).iloc[:ROWS]
        pictures = [Image.open(io.BytesIO(each["bytes"])) for each in table["image"]]
        pixels = [
            torch.frombuffer(bytearray(each.tobytes()), dtype=torch.uint8) for each in pictures
        ]
        self.x = torch.stack(pixels).float() / 255
        self.y = torch.tensor(table["label"].to_numpy())

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.x[index]
        if HERE.is_noisy:
            x = x + 0.1 * torch.randn(x.shape)
        return torch.cat([torch.tensor([float(index)]), x]), self.y[index]


class Dicts(Digits):
    """The same samples as transformers and Composer's users write them."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return {"x": x, "labels": y}


class Net(nn.Module):
    """A network that writes down what it gets in each step of training."""

    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(784, 64), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, x = x[:, 0].long(), x[:, 1:]
        hidden = self.first(x).relu()
        if not self.training:
            return self.last(hidden)
        Net.steps += 1
        if HERE.kind == "killed" and Net.steps == DIE_AT:
            os._exit(9)
        if HERE.kind == "torn" and Net.steps == SAVED:
            tear()
        drawn = F.dropout(torch.ones_like(hidden), 0.2)
        note(rows=rows.tolist(), drawn=hashlib.sha256(drawn.numpy().tobytes()).hexdigest()[:16])
        return self.last(hidden * drawn)


def note(**values: Any) -> None:
    with open(HERE.notes, "a") as file:
        file.write(json.dumps(values) + "\n")


def tear() -> None:
    """Let the kernel end this process as soon as a file passes half of a checkpoint's size."""
    files = [path for path in HERE.notes.parent.rglob("*") if path.is_file() and path != HERE.notes]
    half = max(path.stat().st_size for path in files) // 2
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (half, half))


def note_rate(optimizer: Any, *_: Any) -> None:
    note(rate=optimizer.param_groups[0]["lr"])


def parts() -> tuple[Net, Any, Any]:
    """The network, its optimizer and its schedule."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    return net, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 - n / STEPS)


def loader_of(kind: Callable[..., Any] = DataLoader, rows: Any = None) -> Any:
    return kind(rows or Digits(), batch_size=BATCH, shuffle=True, num_workers=HERE.workers)


def is_resumed() -> bool:
    return HERE.kind == "resumed"


def plain_torch(folder: Path) -> nn.Module:
    """A loop that counts its steps, as nanoGPT's; one file, written anew each time."""
    net, optimizer, schedule = parts()
    loader, step, path = loader_of(), 0, folder / "ckpt.pt"
    if is_resumed():
        held = torch.load(path)
        net.load_state_dict(held["model"])
        optimizer.load_state_dict(held["optimizer"])
        schedule.load_state_dict(held["schedule"])
        step = held["step"]
    while step < STEPS:
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            schedule.step()
            step += 1
            if step % EVERY == 0:
                states = {"model": net, "optimizer": optimizer, "schedule": schedule}
                held = {name: each.state_dict() for name, each in states.items()}
                torch.save({**held, "step": step}, path)
            if step == STEPS:
                break
    return net


def transformers(folder: Path) -> nn.Module:
    """Trainer, train(resume_from_checkpoint=True)."""
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self, net: Net):
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.net(x)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    net, optimizer, schedule = parts()
    arguments = TrainingArguments(
        str(folder),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        save_steps=EVERY,
        seed=0,
        use_cpu=True,
        report_to=[],
        dataloader_num_workers=HERE.workers,
        disable_tqdm=True,
    )
    trainer = Trainer(
        Model(net), arguments, train_dataset=Dicts(), optimizers=(optimizer, schedule)
    )
    trainer.train(resume_from_checkpoint=is_resumed() or None)
    return net


def lightning(folder: Path, kind: Callable[..., Any] = DataLoader) -> nn.Module:
    """Trainer.fit(ckpt_path="last") with a ModelCheckpoint."""
    from lightning import LightningModule, Trainer, seed_everything
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.optimizer, self.schedule = parts()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return [self.optimizer], [{"scheduler": self.schedule, "interval": "step"}]

    seed_everything(0)
    model = Model()
    saving = ModelCheckpoint(folder, every_n_train_steps=EVERY, save_last=True)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=EPOCHS,
        callbacks=[saving],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, loader_of(kind), ckpt_path="last" if is_resumed() else None)
    return model.net


def lightning_stateful(folder: Path) -> nn.Module:
    """The same with torchdata's StatefulDataLoader."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return lightning(folder, StatefulDataLoader)


def accelerate(folder: Path, skip: bool = True, **options: Any) -> nn.Module:
    """load_state, and skip_first_batches for the rest of the epoch."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    set_seed(0)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    net, optimizer, schedule = parts()
    net, optimizer, schedule, loader = accelerator.prepare(net, optimizer, schedule, loader_of())
    step = 0
    if is_resumed():
        saved = sorted(folder.glob("step_*"), key=lambda path: int(path.name[5:]))
        accelerator.load_state(saved[-1])
        step = int(saved[-1].name[5:])
    for epoch in range(step // PER_EPOCH, EPOCHS):
        batches = loader
        if not skip or "use_seedable_sampler" in options:
            loader.set_epoch(epoch)
        if skip and step % PER_EPOCH:
            batches = accelerator.skip_first_batches(loader, step % PER_EPOCH)
        for x, y in batches:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(net(x), y))
            optimizer.step()
            schedule.step()
            step += 1
            if step % EVERY == 0:
                accelerator.save_state(folder / f"step_{step}")
    return accelerator.unwrap_model(net)


def accelerate_stateful(folder: Path) -> nn.Module:
    """use_stateful_dataloader=True, where load_state is to put the loader back."""
    return accelerate(folder, skip=False, use_stateful_dataloader=True)


def accelerate_seedable(folder: Path) -> nn.Module:
    """use_seedable_sampler=True and loader.set_epoch(epoch), with skip_first_batches."""
    return accelerate(folder, use_seedable_sampler=True)


def composer(folder: Path, has_sampler: bool = False) -> nn.Module:
    """Trainer(autoresume=True)."""
    from composer import Trainer
    from composer.models import ComposerModel
    from composer.utils import dist

    class Model(ComposerModel):
        def __init__(self, net: Net):
            super().__init__()
            self.net = net

        def forward(self, batch: Any) -> torch.Tensor:
            return self.net(batch[0])

        def loss(self, outputs: Any, batch: Any, *_: Any) -> torch.Tensor:
            return F.cross_entropy(outputs, batch[1])

    net, optimizer, schedule = parts()
    loader, digits = loader_of(), Digits()
    if has_sampler:
        sampler = dist.get_sampler(digits, shuffle=True)
        loader = DataLoader(digits, BATCH, sampler=sampler, num_workers=HERE.workers)
    Trainer(
        model=Model(net),
        train_dataloader=loader,
        max_duration=f"{EPOCHS}ep",
        optimizers=optimizer,
        schedulers=schedule,
        step_schedulers_every_batch=True,
        save_folder=str(folder / "saved"),
        save_interval=f"{EVERY}ba",
        autoresume=True,
        run_name="run",
        seed=0,
        device="cpu",
        progress_bar=False,
    ).fit()
    return net


def composer_sampler(folder: Path) -> nn.Module:
    """The same with composer.utils.dist.get_sampler."""
    return composer(folder, has_sampler=True)


def ignite(folder: Path, kind: str = "Engine") -> nn.Module:
    """An Engine with a Checkpoint, and Checkpoint.load_objects of the newest file."""
    import ignite.engine
    from ignite.engine import Events
    from ignite.engine.deterministic import DeterministicEngine
    from ignite.handlers import Checkpoint, DiskSaver

    net, optimizer, schedule = parts()

    def update(_: Any, batch: Any) -> float:
        net.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(net(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss.item()

    engine = (
        DeterministicEngine(update) if kind == "Deterministic" else ignite.engine.Engine(update)
    )
    kept = {"trainer": engine, "model": net, "optimizer": optimizer, "schedule": schedule}
    saver = DiskSaver(str(folder / "saved"), require_empty=False)
    saving = Checkpoint(
        kept, saver, n_saved=3, global_step_transform=lambda *_: engine.state.iteration
    )
    engine.add_event_handler(Events.ITERATION_COMPLETED(every=EVERY), saving)
    if is_resumed():
        found = sorted(folder.glob("saved/*.pt"), key=lambda path: path.stat().st_mtime)
        held = torch.load(found[-1], weights_only=kind == "Engine")  # the other has random states
        Checkpoint.load_objects(kept, held)
    engine.run(loader_of(), max_epochs=EPOCHS)
    return net


def ignite_deterministic(folder: Path) -> nn.Module:
    """The same with a DeterministicEngine."""
    return ignite(folder, "Deterministic")


def keras(folder: Path) -> nn.Module:
    """BackupAndRestore(save_freq=7), with torch as backend."""
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    keras.utils.set_random_seed(0)
    net, _, _ = parts()
    model = keras.Sequential([keras.Input((785,)), keras.layers.TorchModuleWrapper(net)])
    rate = keras.optimizers.schedules.PolynomialDecay(1e-3, STEPS, 0.0)
    model.compile(
        keras.optimizers.AdamW(rate),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    restoring = keras.callbacks.BackupAndRestore(str(folder / "backup"), save_freq=EVERY)
    model.fit(loader_of(), epochs=EPOCHS, callbacks=[restoring], verbose=0)
    return net


def this_project(folder: Path) -> nn.Module:
    """Run, with --save-every 7 and --resume auto."""
    from trainkit import Run, make_loaders

    from trainkit.config import TrainingConfig, parse

    @dataclass
    class Config(TrainingConfig):
        pass

    flags = f"--run-dir {folder}/run --epochs {EPOCHS} --batch-size {BATCH} --save-every {EVERY}"
    flags += f" --num-workers {HERE.workers} --no-pictures"
    config = parse(Config, [*flags.split(), *(["--resume", "auto"] if is_resumed() else [])])
    with Run(config, "peers") as run:
        sets = run.load(lambda _: (Digits(), Digits()))
        loaders = make_loaders(run.accelerator, *sets, config)
        net, optimizer, schedule = run.accelerator.prepare(*parts())
        loader, eval_loader = run.accelerator.prepare(*loaders)
        run.begin(net, {})

        def losses_of(batch: Any) -> dict[str, torch.Tensor]:
            return {"loss": F.cross_entropy(net(batch[0]), batch[1], reduction="none")}

        for _ in run.epochs():
            for x, y in run.steps(loader):
                losses = F.cross_entropy(net(x), y, reduction="none")
                run.accelerator.backward(run.step_mean(losses))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                run.add(loss=losses)
                if run.end_step():
                    run.save()
            run.end_epoch(run.evaluate(eval_loader, losses_of))
        run.finish()
    return run.accelerator.unwrap_model(net)


PEERS: dict[str, tuple[Callable[[Path], nn.Module], str, str]] = {
    "transformers Trainer": (transformers, "transformers.trainer", "transformers"),
    "lightning": (lightning, "lightning", "lightning"),
    "lightning, StatefulDataLoader": (lightning_stateful, "lightning", "lightning"),
    "accelerate, skip_first_batches": (accelerate, "accelerate", "accelerate"),
    "accelerate, stateful loader": (accelerate_stateful, "accelerate", "accelerate"),
    "accelerate, seedable sampler": (accelerate_seedable, "accelerate", "accelerate"),
    "composer, shuffle=True": (composer, "composer", "mosaicml"),
    "composer, dist.get_sampler": (composer_sampler, "composer", "mosaicml"),
    "ignite Engine": (ignite, "ignite.engine", "pytorch-ignite"),
    "ignite DeterministicEngine": (ignite_deterministic, "ignite.engine", "pytorch-ignite"),
    "keras": (keras, "torch", "keras"),
    "plain torch": (plain_torch, "torch", "torch"),
    "this project": (this_project, "trainkit.run", "accelerate"),
}


def be(peer: str, life: Life) -> None:
    """Be one life of a peer, in a process of its own."""
    output = os.open(life.notes.with_suffix(".txt"), os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    vars(HERE).update(vars(life))
    np.random.seed(None)  # as in a process that was not forked
    torch.set_num_threads(1)
    register_optimizer_step_pre_hook(note_rate)
    folder = life.notes.parent / "files"
    folder.mkdir(exist_ok=True)
    net = PEERS[peer][0](folder)
    torch.save(net.state_dict(), life.notes.with_suffix(".pt"))


def live(peer: str, kind: str, folder: Path, **more: Any) -> str:
    """Run one life of a peer, forked from this process, and return its last words, if it failed."""
    folder.mkdir(exist_ok=True)
    life = Life(kind, folder / f"notes-{kind}", **more)
    process = multiprocessing.get_context("fork").Process(target=be, args=(peer, life))
    process.start()
    process.join(SECONDS)
    if process.is_alive():
        process.kill()
        return f"it did not end within {SECONDS} s"
    if process.exitcode == 0:
        return ""
    lines = life.notes.with_suffix(".txt").read_text(errors="replace").splitlines()
    said = [line for line in lines if re.match(r"[\w.]*(Error|Exception|error)\b", line)]
    return said[-1][:200] if said else f"it ended with {process.exitcode}"


class Told:
    """What a life of a peer has written down."""

    def __init__(self, folder: Path, life: str):
        path = folder / f"notes-{life}"
        lines = (
            [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        )
        self.rows = [each["rows"] for each in lines if "rows" in each]
        self.drawn = [each["drawn"] for each in lines if "drawn" in each]
        # Others are steps that only make the state of an optimizer, before it is loaded.
        after = itertools.pairwise(lines)
        self.rates = [each["rate"] for one, each in after if "rate" in each and "rows" in one]
        weights = path.with_suffix(".pt")
        self.weights = torch.load(weights) if weights.exists() else {}

    def gap(self, other: "Told") -> str:
        """Whether the weights are equal, or by how much at most they differ."""
        pairs = zip(self.weights.values(), other.weights.values(), strict=True)
        worst = max(float((one - two).abs().max()) for one, two in pairs)
        return f"{worst:.0e}" if worst else "equal"


def compared(whole: Told, killed: Told, resumed: Told, step: int) -> dict[str, str]:
    """A run that was resumed after this step, beside one that was not killed."""
    rows = killed.rows[:step] + resumed.rows
    counts = Counter(row for batch in rows[PER_EPOCH : 2 * PER_EPOCH] for row in batch)
    twice = sum(count - 1 for count in counts.values())
    left = STEPS - step
    same = sum(a == b for a, b in zip(whole.drawn[step:], resumed.drawn, strict=False))
    rates = "-"
    if whole.rates:
        rates = "same" if whole.rates[step:] == resumed.rates else "others"
    return {
        "weights": whole.gap(resumed),
        "twice, never": f"{twice}, {ROWS - len(counts)}",
        "rates": rates,
        "dropout": f"{same} of {left}",
        "steps": f"{len(resumed.rows)} of {left}",
    }


def measure(peer: str, folder: Path) -> list[str]:
    """The cells of a peer in the table."""
    cells: list[str] = []
    variants: dict[str, dict[str, Any]] = {
        "none": {},
        "noise": {"is_noisy": True},
        "workers": {"workers": 2},
    }
    for name, variables in variants.items():
        whole, cut = folder / f"whole-{name}", folder / f"cut-{name}"
        for place, life in ((whole, "whole"), (cut, "killed"), (cut, "resumed")):
            said = live(peer, life, place, **variables)
            if said and life != "killed":
                print((place / f"notes-{life}.txt").read_text()[-2000:], file=sys.stderr)
                return [*cells, f"{name}, {life}: {said}"]
        lives = Told(whole, "whole"), Told(cut, "killed"), Told(cut, "resumed")
        if lives[0].drawn[:SAVED] != lives[1].drawn[:SAVED]:
            return [*cells, "two equal runs differ"]
        step = SAVED
        if len(lives[2].rows) in range(STEPS - SAVED, STEPS) and peer == "this project":
            step = STEPS - len(lives[2].rows)  # the newest checkpoint was not complete yet
        found = compared(*lives, step)
        if name == "none":
            cells += [*found.values()]
        else:
            cells += [found["weights"], *([found["twice, never"]] if name == "workers" else [])]
    torn = folder / "torn"
    live(peer, "torn", torn)
    died = len(Told(torn, "torn").rows)
    said = live(peer, "resumed", torn)
    steps = len(Told(torn, "resumed").rows)
    how = f"error: {said}" if said else f"goes on, {steps} steps more"
    return [*cells, f"ended in step {died}; {how}"]


HEAD = (
    "weights",
    "twice, never in epoch 2",
    "rates",
    "dropout",
    "steps after the resume",
    "weights, if a sample draws",
    "2 workers: weights",
    "2 workers: twice, never",
    "a torn file",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peers", nargs="*", default=[*PEERS], metavar="PEER")
    parser.add_argument("--out", type=Path, default=Path("peers_resume.txt"))
    parser.add_argument("--venv", type=Path, help="a folder to keep the packages in")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        if "PEERS_RESUME" not in os.environ:
            python = install(args.venv or Path(made) / "venv", PINS, ALONE)
            command = [python, "-m", "benchmarks.peers_resume", *args.peers, "--out", args.out]
            done = subprocess.run(command, env=environment(PEERS_RESUME="1"), check=False)
            sys.exit(done.returncode)
        lines = [f"| peer | {' | '.join(HEAD)} |", "| --- " * (len(HEAD) + 1) + "|"]
        for number, peer in enumerate(args.peers):
            folder = Path(made) / str(number)
            folder.mkdir()
            module, distribution = PEERS[peer][1:]
            importlib.import_module(module)
            version = importlib.metadata.version(distribution)
            name = peer if peer == "this project" else f"{peer} ({version})"
            lines.append(f"| {name} | {' | '.join(measure(peer, folder))} |")
            print(lines[-1], flush=True)
            args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
