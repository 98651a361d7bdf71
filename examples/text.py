"""Classify texts, by their words and n-grams of letters or with a pretrained encoder.

python examples/text.py                         from which Python package is this documentation?
python examples/text.py --data reviews.csv --base sentence-transformers/all-MiniLM-L6-v2
accelerate launch --config_file accelerate_configs/2cpu.yaml examples/text.py --resume auto
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # trainkit/ lies beside examples/
from trainkit import Run, make_loaders, make_optimizer, make_scheduler, startup  # pip install .

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from trainkit.config import Schedule, parse
from trainkit.texts import (
    Bag,
    TextConfig,
    check_tokens,
    choose_order,
    fit_bag,
    make_encoder,
    make_samples,
    read_docstrings,
    read_encoder,
    read_sets,
    weigh,
    write_results,
)

PACKAGES = ["matplotlib", "numpy", "pandas"]  # already installed: nothing is downloaded


@dataclass
class Config(TextConfig):
    run_dir: Path = Path("runs/text")
    schedule: Schedule = "cosine"
    warmup: float = 0.1
    clip_norm: float = 1.0


class Batch(NamedTuple):
    tokens: torch.Tensor  # (n, longest), padded with 0
    lengths: torch.Tensor  # (n,)
    labels: torch.Tensor  # (n,)
    pieces: torch.Tensor  # the tokens without padding, one text after the other


def load_data(config: Config) -> tuple:
    """Return samples (tokens, label) to train and evaluate on, and what else main needs."""
    no_file = config.data is None
    sets = read_docstrings(PACKAGES, config.num_lines) if no_file else read_sets(config)
    encoder, tokenizer = read_encoder(config)
    *parts, num_bits, plan = make_samples(sets, config.max_tokens, tokenizer)
    check_tokens(encoder, tokenizer, parts)
    plan = plan | fit_bag(config, len(sets.train))
    metadata = {"script": Path(__file__).stem, "input": "text", "classes": sets.classes}
    metadata |= {"encoder": encoder, "max_tokens": config.max_tokens, "num_bits": num_bits}
    return *parts, metadata | sets.columns, plan, tokenizer


def collate(samples: list) -> Batch:
    """Make a batch of samples."""
    tokens, labels = zip(*samples, strict=True)
    lengths = torch.tensor([len(row) for row in tokens])
    padded = pad_sequence(tokens, batch_first=True)
    return Batch(padded, lengths, torch.tensor(labels), torch.cat(tokens))


class Classifier(nn.Module):
    """Encoder, mean of its states, linear layer. Neither padding nor the other texts matter."""

    def __init__(self, encoder: nn.Module, width: int, num_classes: int):
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(width, num_classes)

    def forward(
        self, tokens: torch.Tensor, lengths: torch.Tensor, pieces: torch.Tensor
    ) -> torch.Tensor:
        """pieces: what Bag takes instead of padded tokens."""
        is_padding = torch.arange(tokens.shape[1], device=tokens.device) >= lengths[:, None]
        states = self.encoder(input_ids=tokens, attention_mask=(~is_padding).long())[0]
        mean = states.masked_fill(is_padding[:, :, None], 0).sum(1) / lengths[:, None]
        return self.head(mean)


def make_model(metadata: dict[str, Any], base: str | None = None) -> nn.Module:
    """Make the model that the metadata describe; an encoder has the weights of base, if any."""
    num_classes = len(metadata["classes"])
    if metadata["encoder"] is None:
        return Bag(2 ** metadata["num_bits"], num_classes)
    return Classifier(*make_encoder(metadata["encoder"], base), num_classes)


def make_groups(model: nn.Module, rate: float) -> list[dict[str, Any]]:
    """Weight decay is for the encoder's matrices only; the last layer learns 20 times as fast."""
    encoder = [*model.encoder.parameters()]
    matrices = [p for p in encoder if p.ndim > 1]
    vectors = [p for p in encoder if p.ndim <= 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return [*groups, {"params": [*model.head.parameters()], "lr": 20 * rate}]


def compute_losses(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """Return the loss of each sample, and whether it was recognised."""
    logits = model(batch.tokens, batch.lengths, batch.pieces)
    losses = F.cross_entropy(logits, batch.labels, reduction="none")
    return {"loss": losses, "accuracy": logits.argmax(1) == batch.labels}


def validate(run: Run, model: nn.Module, loader: Any, samples: list, classes: list[str]) -> tuple:
    """Return metrics, predictions and their metadata. Every process must call this."""
    target = torch.tensor([label for _, label in samples])
    logits = run.predict(
        loader, lambda batch: model(batch.tokens, batch.lengths, batch.pieces).float()
    )
    prediction = logits.argmax(1)
    loss = F.cross_entropy(logits.double(), target)
    hits = (prediction == target).double()
    metrics = {"eval_loss": loss.item(), "eval_accuracy": hits.mean().item()}
    shares = [hits[target == number].mean() for number in target.unique()]  # of each class
    metrics["eval_balanced_accuracy"] = torch.stack(shares).mean().item()
    predictions = {"logits": logits, "prediction": prediction, "target": target}
    return metrics | {"eval_samples": len(target)}, predictions, {"classes": classes}


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train, evaluate, write the run folder; return the last metrics."""
    config = parse(Config, argv)
    with Run(config, "text") as run:
        accelerator = run.accelerator
        train_set, eval_set, metadata, plan, tokenizer = run.load(load_data)
        how = choose_order(train_set, config)  # weights of the texts, or batches by length
        loaders = make_loaders(accelerator, train_set, eval_set, config, collate, *how)
        model = make_model(metadata, config.base)
        if config.base:
            parameters = make_groups(model, config.peak_learning_rate)
        else:
            parameters = model.parameters()
            model.rarity = weigh([tokens for tokens, _ in train_set], metadata["num_bits"])
        optimizer = make_optimizer(accelerator, parameters, config)
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
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                run.add(**values)
                if run.end_step():
                    run.save()
            run.end_epoch(*validate(run, model, eval_loader, eval_set, metadata["classes"]))
        write_results(run, tokenizer)
        return run.finish()


if __name__ == "__main__":
    startup.run(main)
