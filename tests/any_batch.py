"""A run whose batches hold what people have in theirs, drawn by weight, for tests to start.

A batch is a NamedTuple of: texts; dicts with tensors; what tokenizer.pad returns; a numpy array; an
object with .to(); a graph, whose edges have two rows for any number of samples; and a number.
"""

import functools
import os
from dataclasses import dataclass
from typing import NamedTuple

from trainkit import Run, make_loaders, make_optimizer

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import BatchEncoding

from trainkit.config import MayChange, TrainingConfig, parse

NUM_TRAIN, NUM_EVAL = 61, 21  # batches of 18 leave seven samples for the last
WEIGHTS = (torch.arange(NUM_TRAIN) % 4).double()  # of a sample; every fourth is never drawn
MOST = 17  # texts with a "b", after which the run stops: batches of 18 have them in 12 steps
WRONG = os.environ.get("WRONG")  # what differs on process 1, though it must not
RANK = int(os.environ.get("RANK", "0"))


class Nodes:
    """Numbers of the nodes of each sample, as torch_geometric has them in an object."""

    def __init__(self, numbers: torch.Tensor):
        self.numbers = numbers

    def to(self, device, **options):
        return Nodes(self.numbers.to(device))


class Batch(NamedTuple):
    texts: list[str]
    dicts: list[dict[str, torch.Tensor]]
    encoding: BatchEncoding
    array: np.ndarray
    nodes: Nodes
    edges: torch.Tensor  # (2, edges)
    temperature: torch.Tensor  # ()


def make_sample(index: int) -> str:
    """A text of 2 to 10 letters; that of the stand-in, sample 0, is the longest of all."""
    return "abcdefgh"[index % 8] * (index * 7 % 9 + 2) if index else "zyxw" * 10


def collate(texts: list[str]) -> Batch:
    tokens = [torch.tensor([*text.encode()]) - 96 for text in texts]
    ids = pad_sequence(tokens, batch_first=True)
    firsts = torch.stack([row[0] for row in tokens]).to(torch.get_default_dtype())
    edges = torch.arange(len(texts)).repeat(2, 3)  # each node has three edges to itself
    encoding = BatchEncoding({"input_ids": ids, "attention_mask": ids > 0})
    dicts = [{"length": torch.tensor(len(text) / 10)} for text in texts]
    return Batch(texts, dicts, encoding, firsts.numpy(), Nodes(firsts), edges, torch.tensor(2.0))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(27, 8), nn.Linear(8, 27)
        self.size = nn.Linear(2, 1)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.embedding(batch.encoding["input_ids"])) / batch.temperature
        degree = torch.zeros_like(batch.nodes.numbers).index_add(
            0, batch.edges[1], batch.nodes.numbers[batch.edges[0]]
        )
        features = torch.stack((torch.from_numpy(batch.array).to(degree), degree / 3), 1)
        return logits, self.size(features / 26)[:, 0]


@functools.cache
def teacher() -> nn.Module:
    """A module that is not trained and belongs to the experiment."""
    module = nn.Linear(1, 1).requires_grad_(False)
    module.weight.fill_(0.5)
    module.bias.fill_(1.0)
    return module


def compute_losses(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """A loss for each token, of which a mask selects; one with a weight; one for each sample."""
    logits, size = model(batch)
    ids = batch.encoding["input_ids"]
    lengths = torch.stack([each["length"] for each in batch.dicts])
    has_b = torch.tensor([("b" in text) + 0.25 for text in batch.texts])
    return {
        "loss": F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none"),
        "loss_size": (size - lengths).square(),
        "loss_plain": (size - teacher()(size[:, None].detach())[:, 0]).abs(),
        "mask": {"loss": ids[:, 1:] > 0},
        "weights": {"loss_size": has_b.to(size)},
    }


def count(batch: Batch) -> dict[str, torch.Tensor | float]:
    return {
        "tokens": (batch.encoding["input_ids"][:, 1:] > 0).sum() + RANK * (WRONG == "COUNT"),
        "sizes": sum(("b" in text) + 0.25 for text in batch.texts),
    }


@dataclass
class Config(TrainingConfig):
    power: MayChange[float] = 1.0


def main(argv):
    config = parse(Config, argv)
    with Run(config, "any_batch") as run:
        accelerator = run.accelerator
        sets = [[make_sample(n) for n in range(num)] for num in (NUM_TRAIN, NUM_EVAL)]
        train_loader, eval_loader = make_loaders(
            accelerator, *run.load(lambda _: sets), config, collate, weights=WEIGHTS**config.power
        )
        model = Model()
        optimizer = make_optimizer(accelerator, model.parameters(), config)
        model, optimizer, train_loader, eval_loader = accelerator.prepare(
            model, optimizer, train_loader, eval_loader
        )
        run.begin(model, {}, fixed={"teacher": teacher()})
        evaluate = functools.partial(
            run.evaluate, eval_loader, functools.partial(compute_losses, model)
        )
        evaluate()  # before any step
        for _ in run.epochs():
            for batch in run.steps(train_loader, count=count if config.accumulate > 1 else None):
                over = ("tokens", "sizes") if config.accumulate > 1 else (None, None)
                with accelerator.accumulate(model):
                    values = compute_losses(model, batch)
                    mask, weights = values["mask"]["loss"], values["weights"]["loss_size"]
                    loss = run.step_mean(values["loss"], mask=mask, over=over[0])
                    loss = loss + run.step_mean(values["loss_size"], weights=weights, over=over[1])
                    accelerator.backward(loss + run.step_mean(values["loss_plain"]))
                    with torch.no_grad():
                        model(batch)  # computed before the step, and not to be used after it
                    optimizer.step()
                    optimizer.zero_grad()
                assert run.num_samples <= len(batch.texts) == max(1, run.num_samples)
                if WRONG == "SIZES" and run.progress.step == 4:  # not one of the first
                    run.add(ragged=torch.ones(len(batch.texts), 2 + accelerator.process_index))
                run.add(**values)
                drawn = accelerator.reduce(torch.tensor(sum("b" in text for text in batch.texts)))
                run.state["drawn"] = run.state.get("drawn", 0) + int(drawn)
                if run.state["drawn"] >= MOST:
                    run.stop()
                if run.end_step():
                    run.save()
            collected = run.predict(
                eval_loader,
                lambda batch: {
                    "text": [*batch.texts],
                    "size": model(batch)[1],
                    "first": batch.array,
                    "is_long": torch.tensor([len(text) > 3 for text in batch.texts]),
                    "nothing": torch.empty(len(batch.texts), 0),
                },
            )
            assert collected["text"] == sets[1]
            assert collected["nothing"].shape == (NUM_EVAL, 0)
            assert collected["is_long"].tolist() == [len(text) > 3 for text in sets[1]]
            assert collected["first"].tolist() == [ord(text[0]) - 96 for text in sets[1]]
            run.end_epoch(evaluate() | {"eval_size": collected["size"].double().mean().item()})
        return run.finish()
