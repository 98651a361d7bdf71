"""Tokens per second of examples/gpt.py, of a bare PyTorch loop with its model, and of peers.

    OMP_NUM_THREADS=1 python -m benchmarks.tokens
    OMP_NUM_THREADS=1 python -m benchmarks.tokens --trainer --nanogpt CLONE

    loop      examples/gpt.py: it also masks, logs, counts, checks and follows its schedule
    bare      the same model, batches and clipping, and nothing else: the limit
    trainer   the same model under Transformers' Trainer (pip install transformers)
    nanogpt   train.py of karpathy/nanoGPT, unmodified: its own model of the same sizes

All clip the gradient, and take turns in one process. The figure is based on the median CPU time
from one optimizer step to the next, so other work on the machine has little influence on it.
CLONE is a git repository (bare or not), whose HEAD is run.
"""

import contextlib
import io
import itertools
import pickle
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

from trainkit import startup

import numpy as np
import torch
import torch.nn.functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from benchmarks._runs import Parser, in_process, in_turn, spread, table
from examples import gpt
from trainkit.config import parse

NUM_TOKENS = parse(gpt.Config, []).batch_size * gpt.CONTEXT  # in a batch


def loop(flags: list[str], precision: str) -> None:
    with mock.patch.object(gpt, "write_sample", lambda run: None):
        in_process(gpt, *flags, precision=precision)


class WithLoss(gpt.GPT):
    """The GPT as most loops call it: it returns its mean loss."""

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = super().forward(tokens[:, :-1])
        return {"loss": F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())}


def bare(flags: list[str], precision: str) -> None:
    args = parse(gpt.Config, flags)
    model = WithLoss(args)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for tokens, *_ in DataLoader(gpt.load_data(args)[0], args.batch_size, shuffle=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = model(tokens.long())["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_norm)
        optimizer.step()
        optimizer.zero_grad()


def trainer(flags: list[str], precision: str) -> None:
    from transformers import Trainer, TrainingArguments

    args = parse(gpt.Config, flags)
    options = TrainingArguments(
        tempfile.gettempdir(),
        per_device_train_batch_size=args.batch_size,
        num_train_epochs=args.epochs,
        max_grad_norm=args.clip_norm,
        bf16=precision == "bf16",
        optim="adamw_torch_fused",
        use_cpu=True,
        save_strategy="no",
    )
    samples = [{"tokens": torch.tensor(text).long()} for text, *_ in gpt.load_data(args)[0]]
    Trainer(WithLoss(args), options, train_dataset=samples).train()


def nanogpt(clone: Path, flags: list[str], precision: str) -> None:
    args = parse(gpt.Config, flags)
    samples = gpt.load_data(args)[0]
    text = np.concatenate([text for text, *_ in samples]).astype("u2")
    words = (
        f"train.py --n_layer={args.layers} --n_embd={args.width} --n_head={args.width // 32} "
        f"--block_size={gpt.CONTEXT} --batch_size={args.batch_size} --eval_iters=1 "
        f"--max_iters={len(samples) // args.batch_size} --gradient_accumulation_steps=1 "
        f"--dtype={'bfloat16' if precision == 'bf16' else 'float32'} --device=cpu --dataset=. "
        "--compile=False"
    )
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        files = subprocess.check_output(["git", "-C", clone, "archive", "HEAD"])
        subprocess.run(["tar", "x"], input=files, check=True)
        for split in ("train", "val"):
            text.tofile(f"data/{split}.bin")
        Path("data/meta.pkl").write_bytes(pickle.dumps({"vocab_size": 256}))
        with mock.patch.multiple(sys, argv=words.split(), path=[folder, *sys.path]):
            runpy.run_path("train.py")


def rate(train: Callable[[], None], num_tokens: int) -> float:
    """Return tokens per second of `train`. num_tokens: those in a batch."""
    stamps = []
    hook = register_optimizer_step_post_hook(lambda *_: stamps.append(time.process_time()))
    with contextlib.redirect_stdout(io.StringIO()):
        train()
    hook.remove()
    seconds = statistics.median(b - a for a, b in itertools.pairwise(stamps))
    return num_tokens / seconds


def compare(ways: dict[str, Callable[[], None]], rounds: int, num_tokens: int) -> tuple:
    """Return tokens per second of each way, measured in turns, and the ratio loop / bare."""
    calls = {name: partial(rate, way, num_tokens) for name, way in ways.items()}
    rates = in_turn(calls, rounds, warm_up=1)
    ratios = [a / b for a, b in zip(rates["loop"], rates["bare"], strict=True)]
    return *map(spread, rates.values()), statistics.median(ratios)


def main() -> None:
    parser = Parser(__doc__, rounds=7)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--trainer", action="store_true")
    parser.add_argument("--nanogpt", type=Path, metavar="CLONE")
    args = parser.parse_args()
    ways = {"loop": loop, "bare": bare}
    ways |= {"trainer": trainer} if args.trainer else {}
    ways |= {"nanogpt": partial(nanogpt, args.nanogpt.resolve())} if args.nanogpt else {}
    # A tenth of the bytes is for the evaluation.
    flags = f"--epochs 1 --num-bytes {NUM_TOKENS * args.steps * 10 // 9}".split()
    rows = []
    for precision in ("no", "bf16"):
        calls = {name: partial(way, flags, precision) for name, way in ways.items()}
        rows.append((precision, *compare(calls, args.rounds, NUM_TOKENS)))
    table(f"{torch.get_num_threads()} threads | {' | '.join(ways)} | loop / bare", rows)


if __name__ == "__main__":
    startup.run(main)  # with the settings of a run, for the others as well
