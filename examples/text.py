"""Classify texts, from scratch or with a pretrained encoder.

python examples/text.py                         from which Python package is this documentation?
python examples/text.py --data reviews.csv --base sentence-transformers/all-MiniLM-L6-v2
python predict.py runs/text lines.txt
accelerate launch --config_file accelerate_configs/2cpu.yaml examples/text.py --resume auto
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # trainkit/ lies beside examples/
from trainkit import Run, make_loaders, make_optimizer, make_scheduler, startup

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from trainkit.config import Schedule, parse
from trainkit.orders import by_length
from trainkit.texts import encoders, texts

PACKAGES = ["matplotlib", "numpy", "pandas"]  # already installed: nothing is downloaded
SCRATCH = {"epochs": 5, "batch_size": 60, "learning_rate": 2e-3}
PRETRAINED = {"epochs": 3, "batch_size": 32, "learning_rate": 5e-5}  # the last layer learns faster


@dataclass
class Config(texts.TextConfig):
    run_dir: Path = Path("runs/text")
    weight_decay: float = 0.05
    schedule: Schedule = "cosine"
    warmup: float = 0.1
    clip_norm: float = 1.0

    def __post_init__(self):
        values = PRETRAINED if self.base else SCRATCH
        vars(self).update({n: v for n, v in values.items() if getattr(self, n) is None})


def load_data(config: Config) -> tuple:
    """Return samples (tokens, label, index) to train and evaluate on, and what else main needs."""
    own = config.data is None
    sets = texts.read_docstrings(PACKAGES, config.num_lines) if own else texts.read_sets(config)
    encoder, tokenizer = encoders.read_base(config)
    *parts, plan = texts.make_samples(sets, config.max_tokens, tokenizer)
    metadata = {"script": Path(__file__).stem, "input": "text", "classes": sets.classes}
    metadata |= {"encoder": encoder, "max_tokens": config.max_tokens} | sets.columns
    return *parts, metadata, plan, tokenizer


def collate(samples: list) -> tuple[torch.Tensor, ...]:
    """Return tokens (n, longest), and lengths, labels and indices (n,)."""
    tokens, labels, indices = zip(*samples, strict=True)
    lengths = torch.tensor([len(row) for row in tokens])
    return pad_sequence(tokens, batch_first=True), lengths, *map(torch.tensor, (labels, indices))


class Classifier(nn.Module):
    """Encoder, mean of its states, linear layer. Neither padding nor the other texts matter."""

    def __init__(self, encoder: nn.Module, width: int, num_classes: int):
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(width, num_classes)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        is_padding = torch.arange(tokens.shape[1], device=tokens.device) >= lengths[:, None]
        states = self.encoder(input_ids=tokens, attention_mask=(~is_padding).long())[0]
        mean = states.masked_fill(is_padding[:, :, None], 0).sum(1) / lengths[:, None]
        return self.head(mean)


def make_model(metadata: dict[str, Any], base: str | None = None) -> nn.Module:
    """Make the model that the metadata describe, with the weights of base or random ones."""
    about = metadata["encoder"], metadata["max_tokens"]
    return Classifier(*encoders.make_encoder(*about, base), len(metadata["classes"]))


def make_groups(model: nn.Module, rate: float, base: str | None) -> list[dict[str, Any]]:
    """Matrices have weight decay; biases and norms, and a new last layer, have rates of theirs."""
    head = [*model.head.parameters()] if base else []
    rest = [p for p in model.parameters() if all(p is not own for own in head)]
    matrices, vectors = ([p for p in rest if (p.ndim > 1) == want] for want in (True, False))
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    groups[1]["lr"] = rate if base else rate / 3
    return [*groups, {"params": head, "lr": 20 * rate}] if base else groups


def compute_losses(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    """Return the loss of each sample, and whether it was recognised."""
    tokens, lengths, labels, _ = batch
    logits = model(tokens, lengths)
    losses = F.cross_entropy(logits, labels, reduction="none")
    return {"loss": losses, "accuracy": logits.argmax(1) == labels}


def validate(run: Run, model: nn.Module, loader: Any, samples: list, classes: list[str]) -> tuple:
    """Return metrics, predictions and their metadata. Every process must call this."""
    target = torch.tensor([label for _, label, _ in samples])
    logits = run.predict(loader, lambda batch: model(*batch[:2]).float())
    prediction = logits.argmax(1)
    metrics = {"eval_loss": F.cross_entropy(logits.double(), target).item()}
    metrics["eval_accuracy"] = (prediction == target).double().mean().item()
    metrics["eval_samples"] = len(target)
    predictions = {"logits": logits, "prediction": prediction, "target": target}
    return metrics, predictions, {"classes": classes}


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train, evaluate, write the run folder; return the last metrics."""
    config = parse(Config, argv)
    with Run(config, "text") as run:
        accelerator = run.accelerator
        train_set, eval_set, metadata, plan, tokenizer = run.load(load_data)
        lengths = [len(tokens) for tokens, *_ in train_set]
        order = by_length(lengths, config.batch_size, config.seed) if config.base else None
        loaders = make_loaders(accelerator, train_set, eval_set, config, collate, order=order)
        model = make_model(metadata, config.base)
        groups = make_groups(model, config.peak_learning_rate, config.base)
        optimizer = make_optimizer(accelerator, groups, config)
        scheduler = make_scheduler(optimizer, config, run.steps_per_epoch)
        model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
            model, optimizer, *loaders, scheduler
        )
        run.begin(model, metadata, plan)

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
                if run.end_step():
                    run.save()
            run.end_epoch(*validate(run, model, eval_loader, eval_set, metadata["classes"]))
        encoders.write_results(run, tokenizer)
        return run.finish()


if __name__ == "__main__":
    startup.run(main)
