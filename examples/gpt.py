"""A small GPT that learns the bytes of Python's own standard library: 36 s on 2 CPU cores.

python examples/gpt.py    and read what it writes: runs/gpt/sample-*.txt, one for each evaluation
python examples/gpt.py --answers-only --start-from runs/gpt/model.safetensors --run-dir runs/answers
"""

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # trainkit/ lies beside examples/
from trainkit import Run, arguments, make_loaders, make_optimizer, make_scheduler, startup

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from examples.windows import Windows
from trainkit.data.rows import ParquetRows
from trainkit.run_dir.files import write_durably

CONTEXT = 128
PAIR = re.compile(rb'(def [^\n]+:\n +""")([^\n]+\n)')  # a prompt, and its answer


class GPT(nn.Module):
    """Tokens (n, length) to logits (n, length, vocabulary) of the one that follows each."""

    def __init__(self, args: argparse.Namespace, vocabulary: int = 256, context: int = CONTEXT):
        super().__init__()
        width, heads = args.width, args.width // 32
        self.embedding, self.position = (nn.Embedding(n, width) for n in (vocabulary, context))
        self.dropout = nn.Dropout(args.dropout)  # rng.Dropout cannot draw again for a checkpoint
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, args.dropout, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, args.layers, enable_nested_tensor=False).layers
        self.norm, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.embedding.weight
        for weight in (weight for weight in self.parameters() if weight.ndim > 1):
            nn.init.normal_(weight, std=0.02)
        self.checkpointing = args.checkpointing

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.embedding(tokens) + self.position.weight[: tokens.shape[1]])
        future = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], x.device)
        for block in self.blocks:
            if self.checkpointing and self.training:
                x = checkpoint(block, x, future, is_causal=True, use_reentrant=False)
            else:
                x = block(x, future, is_causal=True)
        return self.lm_head(self.norm(x))


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = arguments.Parser(__doc__)
    add = parser.add_argument_group("problem").add_argument
    add("--answers-only", action="store_true", help="learn docstrings, each from its function")
    add("--num-bytes", type=int, default=500_000, help="of text")
    add("--data", nargs=2, help="Parquet files to train on and to evaluate on: folders, s3://...")
    add("--column", default="tokens", help="of these files: lists of one length")
    add("--vocabulary", type=int, default=256, help="number of different tokens")
    add("--layers", type=int, default=2, help="blocks")
    add("--width", type=int, default=128, help="a multiple of 32")
    add("--dropout", type=float, default=0.0, help="its masks depend on the number of processes")
    add("--checkpointing", action="store_true", help="less memory, more time, the same numbers")
    arguments.add_training_arguments(parser)
    arguments.add_run_arguments(parser, "runs/gpt", ["checkpointing", "data"])
    parser.set_defaults(epochs=2, batch_size=12, learning_rate=1e-3, warmup=0.05)
    parser.set_defaults(schedule="cosine", min_learning_rate=1e-4, weight_decay=0.1, clip_norm=1.0)
    return parser.parse_args(argv)


def load_data(args: argparse.Namespace) -> tuple:
    """The training set and the evaluation set."""
    if args.data:
        return tuple(ParquetRows(pattern, args.column) for pattern in args.data)
    path = args.run_dir.parent / f"stdlib-{sys.hexversion:x}.txt"
    if not path.exists():
        files = sorted(Path(argparse.__file__).parent.glob("[a-z]*.py"))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, b"".join(file.read_bytes() for file in files))
    spans = range(0, min(args.num_bytes, path.stat().st_size) - CONTEXT, CONTEXT)
    if args.answers_only:
        spans = [(p.start(), *p.span(2)) for p in PAIR.finditer(path.read_bytes()[: spans.stop])]
    return tuple(Windows(path, CONTEXT + 1, spans, held_out) for held_out in (False, True))


def compute_losses(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The loss of each token after the first, and where it counts."""
    tokens = batch[0].long()
    logits, targets = model(tokens[:, :-1]), tokens[:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    place = torch.arange(1, tokens.shape[1], device=tokens.device).expand_as(targets)
    first, end = (each[:, None] for each in batch[1:]) if batch[1:] else (place, place + 1)
    return {"loss": losses.view_as(targets), "mask": (first <= place) & (place < end)}


@torch.inference_mode()
def write_sample(run: Run) -> None:
    """Write what the model makes of `def `, and show its start. Every process must call this."""
    model, text = run.models[0].eval(), torch.tensor([[*b"def "]], device=run.accelerator.device)
    torch.manual_seed(0)
    for _ in range(300):
        text = torch.cat((text, model(text[:, -CONTEXT:])[:, -1].softmax(1).multinomial(1)), 1)
    model.train()
    path, written = f"sample-{run.progress.step:06d}.txt", bytes(text[0].tolist())
    run.print(f"{run.config.run_dir / path}:\n{written[:150].decode(errors='replace')}")
    if run.accelerator.is_main_process:
        (run.config.run_dir / path).write_bytes(written)


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Train, evaluate, write a sample and the run folder; return the last metrics."""
    with Run(args := parse_args(argv), "gpt") as run:
        accelerator = run.accelerator
        train_set, eval_set = run.load(load_data)
        order = train_set.order(args.batch_size, args.seed) if args.data else None
        loaders = make_loaders(accelerator, train_set, eval_set, args, order=order)
        model = GPT(args, args.vocabulary, len(train_set[0][0]) - 1)
        matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == m] for m in (1, 0))
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = make_optimizer(accelerator, groups, args)
        scheduler = make_scheduler(optimizer, args, run.steps_per_epoch)
        model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
            model, optimizer, *loaders, scheduler
        )
        run.begin(model, {"script": Path(__file__).stem, "width": args.width})
        for _ in run.epochs():
            for batch in run.steps(train_loader):
                with accelerator.accumulate(model):
                    values = compute_losses(model, batch)
                    accelerator.backward(run.step_mean(values["loss"], values["mask"]))
                    run.clip_and_check(optimizer)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                run.add(**values)
                if run.must_save():
                    run.save()
            if not args.data:
                write_sample(run)
            run.end_epoch(run.evaluate(eval_loader, lambda batch: compute_losses(model, batch)))
        return run.finish()


if __name__ == "__main__":
    startup.run(main)
