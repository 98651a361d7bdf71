"""Classify texts of different lengths: from which Python package is this line of documentation?

python examples/text.py
accelerate launch --config_file accelerate_configs/2cpu.yaml examples/text.py --resume auto
"""

import importlib.util
import re
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # trainkit/ lies beside examples/
from trainkit import (
    Run,
    make_loaders,
    make_optimizer,
    make_scheduler,
    startup,
)

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from trainkit.config import Count, Schedule, TrainingConfig, parse

PACKAGES = ["matplotlib", "numpy", "pandas"]  # already installed: nothing is downloaded
FIRST_LINE = re.compile(r':\n +r?"""\s*(\S.{19,}?)\s*(?:"""|\n)')  # of a docstring
MAX_LENGTH, NUM_TOKENS = 32, 4096


def tokenize(text: str) -> torch.Tensor:
    """Return at most MAX_LENGTH hashed words, int64; 0 is reserved for padding."""
    words = re.findall(r"\w+|[^\w\s]", text)[:MAX_LENGTH]
    return torch.tensor([zlib.crc32(word.encode()) % (NUM_TOKENS - 1) + 1 for word in words])


def collate(samples: list) -> tuple[torch.Tensor, ...]:
    """Return tokens (n, longest), lengths (n,) and labels (n,)."""
    tokens, labels = zip(*samples, strict=True)
    lengths = torch.tensor([len(row) for row in tokens])
    return pad_sequence(tokens, batch_first=True), lengths, torch.tensor(labels)


class Classifier(nn.Module):
    """A small transformer. The result for a text does not depend on padding or the other texts."""

    def __init__(self, num_classes: int, width: int = 64, num_layers: int = 2):
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, width)
        self.position = nn.Parameter(0.02 * torch.randn(MAX_LENGTH, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, num_classes)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        num_rows = len(tokens)
        if num_rows == 0:
            tokens, lengths = tokens.new_ones(1, 1), lengths.new_ones(1)
        is_padding = torch.arange(tokens.shape[1], device=tokens.device) >= lengths[:, None]
        states = self.embedding(tokens) + self.position[: tokens.shape[1]]
        states = self.encoder(states, src_key_padding_mask=is_padding)
        mean = states.masked_fill(is_padding[:, :, None], 0).sum(1) / lengths[:, None]
        return self.head(mean)[:num_rows]


@dataclass
class Config(TrainingConfig):
    num_lines: Count | None = None
    """to train on, and to evaluate on (default: all)"""

    run_dir: Path = Path("runs/text")
    epochs: int = 5
    batch_size: int = 60
    learning_rate: float = 2e-3
    weight_decay: float = 0.05
    schedule: Schedule = "cosine"
    warmup: float = 0.1
    clip_norm: float = 1.0


def load_data(config: Config) -> tuple[list, list]:
    """Return samples (tokens, label) to train on and, from every fifth line, to evaluate on."""
    origin: dict[str, set[int]] = {}
    for label, package in enumerate(PACKAGES):
        folder = Path(importlib.util.find_spec(package).origin).parent
        for path in folder.rglob("*.py"):
            for line in FIRST_LINE.findall(path.read_text(encoding="utf-8", errors="ignore")):
                origin.setdefault(line, set()).add(label)
    # A line that occurs in two packages is left out.
    lines = [(tokenize(line), *ids) for line, ids in sorted(origin.items()) if len(ids) == 1]
    parts = [line for n, line in enumerate(lines) if n % 5], lines[::5]
    return tuple(part[: config.num_lines] for part in parts)


def compute_losses(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    """Return the loss of each sample, and whether it was classified correctly."""
    tokens, lengths, labels = batch
    logits = model(tokens, lengths)
    losses = F.cross_entropy(logits, labels, reduction="none")
    return {"loss": losses, "accuracy": logits.argmax(1) == labels}


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train, evaluate, write the run folder; return the last metrics."""
    config = parse(Config, argv)
    with Run(config, "text") as run:
        accelerator = run.accelerator
        train_set, eval_set = run.load(load_data)
        train_loader, eval_loader = make_loaders(accelerator, train_set, eval_set, config, collate)
        model = Classifier(len(PACKAGES))
        # Matrices have weight decay; biases and norms have none, and a third of the learning rate.
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim == 1]
        rate = config.peak_learning_rate / 3
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": rate}]
        optimizer = make_optimizer(accelerator, groups, config)
        scheduler = make_scheduler(optimizer, config, run.steps_per_epoch)
        model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
            model, optimizer, train_loader, eval_loader, scheduler
        )
        run.begin(model, {"script": Path(__file__).stem, "classes": PACKAGES})

        for _ in run.epochs():
            for batch in run.steps(train_loader):
                with accelerator.accumulate(model):
                    values = compute_losses(model, batch)
                    accelerator.backward(run.step_mean(values["loss"]))
                    run.clip_and_check(optimizer)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                run.add(**values)
                if run.must_save():
                    run.save()
            run.end_epoch(run.evaluate(eval_loader, lambda batch: compute_losses(model, batch)))
        return run.finish()


if __name__ == "__main__":
    startup.run(main)
