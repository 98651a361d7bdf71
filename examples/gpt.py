"""A small GPT that learns bytes: the source code of Python's own standard library.

python examples/gpt.py    and look at runs/gpt/sample-*.txt, one for each evaluation
python examples/gpt.py --answers-only --start-from runs/gpt/model.safetensors --run-dir runs/answers
"""

import argparse
import re
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # trainkit/ lies beside examples/

from trainkit import arguments, startup
from trainkit.optim import make_optimizer, make_scheduler
from trainkit.order import make_loaders
from trainkit.run import Run
from trainkit.rundir import write_durably

CONTEXT = 128
# --answers-only: the head of a function is the prompt, the first line of its docstring the answer.
PAIR = re.compile(rb'(def [^\n]+:\n +""")([^\n]+\n)')


class GPT(nn.Module):
    """Bytes (n, length) to logits (n, length, 256) of the byte that follows each."""

    def __init__(self, args: argparse.Namespace):
        super().__init__()
        width, heads = args.width, args.width // 32
        self.embedding, self.position = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.dropout = nn.Dropout(args.dropout)  # order.Dropout cannot draw again for a checkpoint
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, args.dropout, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, args.layers, enable_nested_tensor=False).layers
        self.norm, self.lm_head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.lm_head.weight = self.embedding.weight
        for weight in self.parameters():
            if weight.ndim > 1:
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
    add("--layers", type=int, default=2, help="blocks")
    add("--width", type=int, default=128, help="a multiple of 32")
    add("--dropout", type=float, default=0.0, help="its masks depend on the number of processes")
    add("--checkpointing", action="store_true", help="less memory, more time, the same numbers")
    arguments.add_training_arguments(parser)
    arguments.add_run_arguments(parser, "runs/gpt", not_the_experiment=["checkpointing"])
    parser.set_defaults(epochs=2, batch_size=12, eval_every=100, learning_rate=1e-3, warmup=0.05)
    parser.set_defaults(schedule="cosine", min_learning_rate=1e-4, weight_decay=0.1, clip_norm=1.0)
    return parser.parse_args(argv)


def load_data(args: argparse.Namespace) -> tuple[list, list]:
    """Samples are CONTEXT + 1 bytes, and from where to where they count; a tenth is held out."""
    path = args.run_dir.parent / f"stdlib-{sys.hexversion:x}.txt"
    if not path.exists():
        files = sorted(Path(argparse.__file__).parent.glob("[a-z]*.py"))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, b"".join(file.read_bytes() for file in files))
    # Memory-mapped: a slice reads nothing. "c", because torch warns of what it may not write to.
    text = np.memmap(path, np.uint8, "c")[: args.num_bytes]
    spans = [(n, n, n + CONTEXT + 1) for n in range(0, len(text) - CONTEXT, CONTEXT)]
    if args.answers_only:
        spans = [(pair.start(), *pair.span(2)) for pair in PAIR.finditer(text[:-CONTEXT])]
    samples = [(text[n : n + CONTEXT + 1], first - n, end - n) for n, first, end in spans]
    return [sample for n, sample in enumerate(samples) if n % 10], samples[::10]


def judge(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The loss of each byte after the first, and where it counts."""
    tokens, first, end = batch[0].long(), batch[1][:, None], batch[2][:, None]
    logits, targets = model(tokens[:, :-1]), tokens[:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    place = torch.arange(1, CONTEXT + 1, device=tokens.device)
    return {"loss": losses.view_as(targets), "where": (first <= place) & (place < end)}


@torch.inference_mode()
def sample(model: GPT) -> bytes:
    """What the model writes after `def `, byte by byte. Every process must call this."""
    text = torch.tensor([[*b"def "]], device=model.lm_head.weight.device)
    torch.manual_seed(0)
    model.eval()
    for _ in range(300):
        chances = model(text[:, -CONTEXT:])[:, -1].softmax(1)
        text = torch.cat((text, torch.multinomial(chances, 1)), 1)
    model.train()
    return bytes(text[0].tolist())


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Train, evaluate, write a sample and the run folder; return the last metrics."""
    args = parse_args(argv)
    with Run(args, "gpt") as run:
        accelerator = run.accelerator
        train_set, eval_set = run.load(load_data)
        train_loader, eval_loader = make_loaders(accelerator, train_set, eval_set, args)
        model = GPT(args)
        # Matrices decay; biases and norms do not.
        matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == m] for m in (1, 0))
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = make_optimizer(accelerator, groups, args)
        scheduler = make_scheduler(optimizer, args, run.steps_per_epoch)
        model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
            model, optimizer, train_loader, eval_loader, scheduler
        )
        run.begin(model, {"script": Path(__file__).stem, "width": args.width})
        for _ in run.epochs():
            for batch in run.steps(train_loader):
                with accelerator.accumulate(model):
                    values = judge(model, batch)
                    accelerator.backward(run.step_mean(values["loss"], values["where"]))
                    run.clip_and_check(optimizer)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                run.add(**values)
            text = sample(run.models[0])  # on all processes: a sharded model gathers its weights
            if accelerator.is_main_process:
                (args.run_dir / f"sample-{run.progress.step:06d}.txt").write_bytes(text)
            run.end_epoch(run.evaluate(eval_loader, lambda batch: judge(model, batch)))
        return run.finish()


if __name__ == "__main__":
    startup.run(main)
