"""Train a small GPT on the bytes of Python's own standard library, in 36 s on 2 CPU cores.

python examples/gpt.py    writes a sample of its text, runs/gpt/sample-*.txt, at each evaluation
python examples/gpt.py --answers-only --start-from runs/gpt/model.safetensors --run-dir runs/answers
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # trainkit/ lies beside examples/
from trainkit import (  # pip install .
    Run,
    make_loaders,
    make_optimizer,
    make_scheduler,
    shards,
    startup,
)

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from examples.windows import Batch, Windows, read_tokens, standard_library
from trainkit.config import Count, Fraction, MayChange, ReadOnlyIf, Schedule, TrainingConfig, parse

CONTEXT = 128
PAIR = re.compile(rb'(def [^\n]+:\n +""")([^\n]+\n)')  # a prompt, and its answer


@dataclass
class Config(TrainingConfig):
    # Learn docstrings, each from its function.
    answers_only: Annotated[bool, ReadOnlyIf("data", (None,))] = False
    num_bytes: Annotated[Count, ReadOnlyIf("data", (None,))] = 500_000  # of text
    # Parquet to train on: a file, a folder or a glob, from anywhere; instead of Python's library.
    data: MayChange[str | None] = None
    # The same, to evaluate on (default: the files of --data that are called test or validation).
    eval_data: Annotated[MayChange[str | None], ReadOnlyIf("data")] = None
    column: Annotated[str, ReadOnlyIf("data")] = "tokens"  # of these files: lists of one length
    vocabulary: Count = 256  # number of different tokens
    layers: Count = 2  # blocks
    width: Count = 128  # a multiple of 32
    dropout: Fraction = 0.0  # its masks depend on the number of processes
    checkpointing: MayChange[bool] = False  # less memory, more time, the same numbers
    run_dir: Path = Path("runs/gpt")
    epochs: int = 2
    batch_size: int = 12
    schedule: Schedule = "cosine"
    warmup: float = 0.05
    min_learning_rate: float = 1e-4
    weight_decay: float = 0.1
    clip_norm: float = 1.0

    def find_problems(self, num_processes: int) -> list[str]:
        """Add sizes that do not fit."""
        problems = super().find_problems(num_processes)
        if self.vocabulary < 256 and not self.data:
            problems.append(f"--vocabulary {self.vocabulary} must be at least 256, for bytes")
        if self.width % 32:
            problems.append(f"--width {self.width} must be a multiple of 32")
        return problems


class GPT(nn.Module):
    """Maps tokens (n, length) to logits (n, length, vocabulary) of the token after each."""

    def __init__(self, config: Config, vocabulary: int = 256, context: int = CONTEXT):
        super().__init__()
        width, heads = config.width, config.width // 32
        self.embedding, self.position = (nn.Embedding(n, width) for n in (vocabulary, context))
        self.dropout = nn.Dropout(config.dropout)  # rng.Dropout cannot draw again for a checkpoint
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, config.dropout, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, config.layers, enable_nested_tensor=False).layers
        self.norm, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.embedding.weight
        for weight in (weight for weight in self.parameters() if weight.ndim > 1):
            nn.init.normal_(weight, std=0.02)
        self.checkpointing = config.checkpointing

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.embedding(tokens) + self.position.weight[: tokens.shape[1]])
        future = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], x.device)
        for block in self.blocks:
            if self.checkpointing and self.training:
                x = checkpoint(block, x, future, is_causal=True, use_reentrant=False)
            else:
                x = block(x, future, is_causal=True)
        return self.lm_head(self.norm(x))


def load_data(config: Config) -> tuple:
    """Return the training set, the evaluation set, and lines of the plan."""
    if config.data:
        return read_tokens(config.data, config.eval_data, config.column, config.vocabulary)
    path = standard_library(config.run_dir.parent)
    spans = range(0, min(config.num_bytes, path.stat().st_size) - CONTEXT, CONTEXT)
    if config.answers_only:
        spans = [(p.start(), *p.span(2)) for p in PAIR.finditer(path.read_bytes()[: spans.stop])]
    sets = (Windows(path, CONTEXT + 1, spans, held_out) for held_out in (False, True))
    return *sets, {}


def compute_losses(model: nn.Module, columns: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the loss of each token after the first, and a mask of the tokens that count."""
    batch = Batch(*columns)
    tokens = batch.tokens.long()
    logits, targets = model(tokens[:, :-1]), tokens[:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return {"loss": losses.view_as(targets), "mask": batch.counted()}


@torch.inference_mode()
def write_sample(run: Run) -> None:
    """Write how the model continues `def ` and print the start. Every process must call this."""
    model = run.models[0].eval()
    text = torch.tensor([[*b"def "]], device=run.accelerator.device)
    torch.manual_seed(0)
    # Without cuDNN, which would make a plan of attention for each of 125 lengths.
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(backends):
        for _ in range(300):
            text = torch.cat((text, model(text[:, -CONTEXT:])[:, -1].softmax(1).multinomial(1)), 1)
    model.train()
    path = f"sample-{run.progress.step:06d}.txt"
    written = bytes(text[0].tolist())
    run.print(f"{run.config.run_dir / path}:\n{written[:150].decode(errors='replace')}")
    if run.accelerator.is_main_process:
        (run.config.run_dir / path).write_bytes(written)


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Train, evaluate, write a sample and the run folder; return the last metrics."""
    config = parse(Config, argv)
    with Run(config, "gpt") as run:
        accelerator = run.accelerator
        train_set, eval_set, plan = run.load(load_data)
        order = train_set.order(config.batch_size, config.seed) if config.data else None
        loaders = make_loaders(accelerator, train_set, eval_set, config, order=order)
        size = config.vocabulary, len(train_set[0][0]) - 1
        model = shards.make(accelerator, lambda: GPT(config, *size))
        matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == m] for m in (1, 0))
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = make_optimizer(accelerator, groups, config)
        scheduler = make_scheduler(optimizer, config, run.steps_per_epoch)
        model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
            model, optimizer, *loaders, scheduler
        )
        run.begin(model, {"script": Path(__file__).stem, "width": config.width}, plan)
        for _ in run.epochs():
            for batch in run.steps(train_loader, count=lambda x: Batch(*x).counted().sum()):
                with accelerator.accumulate(model):
                    values = compute_losses(model, batch)
                    accelerator.backward(run.step_mean(values["loss"], values["mask"]))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                run.add(**values)
                if run.end_step():
                    run.save()
            if not config.data:
                write_sample(run)
            run.end_epoch(run.evaluate(eval_loader, lambda batch: compute_losses(model, batch)))
        return run.finish()


if __name__ == "__main__":
    startup.run(main)
