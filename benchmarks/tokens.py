"""Tokens per second of the loop of examples/gpt.py, beside a bare PyTorch loop on the same model.

    OMP_NUM_THREADS=1 python -m benchmarks.tokens

Both clip the gradient; the loop also masks, logs, counts, checks and follows its schedule. They
take turns in one process. What counts is the median of the steps' seconds of CPU time, so that it
matters little what else the machine does.
"""

import itertools
import statistics
import time
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from benchmarks._runs import Parser, in_process, in_turn, spread, table
from examples import gpt
from trainkit import startup

NUM_TOKENS = gpt.parse_args([]).batch_size * gpt.CONTEXT  # in a batch


def rate(stamps: list[float]) -> float:
    """Tokens per second, of the CPU time at which each step began."""
    return NUM_TOKENS / statistics.median(b - a for a, b in itertools.pairwise(stamps))


def loop(flags: list[str], precision: str) -> float:
    stamps, judge = [], gpt.judge

    def stamping(model: torch.nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        if model.training:
            stamps.append(time.process_time())
        return judge(model, batch)

    with mock.patch.multiple(gpt, judge=stamping, write=mock.Mock()):
        in_process(gpt, *flags, precision=precision)
    return rate(stamps)


def bare(flags: list[str], precision: str) -> float:
    args, stamps = gpt.parse_args(flags), []
    loader = DataLoader(gpt.load_data(args)[0], args.batch_size, shuffle=True)
    model = gpt.GPT(args)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for tokens, *_ in loader:
        stamps.append(time.process_time())
        tokens = tokens.long()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    return rate(stamps)


def main() -> None:
    parser = Parser(__doc__, rounds=7)
    parser.add_argument("--steps", type=int, default=20, help="per loop and round")
    args = parser.parse_args()
    num_bytes = NUM_TOKENS * args.steps * 10 // 9  # a tenth is for the evaluation
    flags = ["--epochs", "1", "--eval-every", str(args.steps), "--num-bytes", str(num_bytes)]
    rows = []
    for precision in ("no", "bf16"):
        ways = {way: partial(way, flags, precision) for way in (loop, bare)}
        rates = in_turn(ways, args.rounds, warm_up=1)
        ratios = [a / b for a, b in zip(rates[loop], rates[bare], strict=True)]
        rows.append((precision, *map(spread, rates.values()), statistics.median(ratios)))
    table(f"precision, {torch.get_num_threads()} threads | loop | bare | loop / bare", rows)


if __name__ == "__main__":
    startup.run(main)  # with the settings of a run, which the bare loop gets as well
