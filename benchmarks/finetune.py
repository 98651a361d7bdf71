"""Tokens per second of examples/finetune.py, beside a bare PyTorch loop and beside peers.

    OMP_NUM_THREADS=1 python -m benchmarks.finetune
    OMP_NUM_THREADS=1 python -m benchmarks.finetune --lora 8

    loop      examples/finetune.py: it also logs, counts, checks and follows its schedule
    bare      the same model, batches, loss and clipping, and nothing else: the limit
    trainer   the same under Transformers' Trainer
    sft       the same under TRL's SFTTrainer (pip install trl), which also measures accuracy

All train a Llama of 7.3 million parameters on 16 samples of 128 tokens a step, and take turns in
one process; peers also learn the prompts, at the same cost. The CPU time from one optimizer step to
the next is measured, as in tokens.py.
"""

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from trainkit import startup

import torch
from datasets import Dataset
from torch.utils.data import DataLoader

from benchmarks._runs import in_process, table
from benchmarks.tokens import compare
from examples import docstrings, finetune
from trainkit.config import parse

BATCH, LENGTH = 16, 128
PAIR = {"prompt": "def question(of_what): " * 9, "answer": "What it does with it. " * 99}  # cut


def bare(flags: list[str]) -> None:
    args = parse(finetune.Config, flags)
    model, (samples, *_) = finetune.make_model(args), finetune.load_data(args)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for batch in DataLoader(samples, BATCH, shuffle=True, collate_fn=finetune.collate):
        values = finetune.compute_losses(model, batch)
        values["loss"][values["mask"]].mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_norm)
        optimizer.step()
        optimizer.zero_grad()


def peer(trainer: Any, options: Any, flags: list[str]) -> None:
    args = parse(finetune.Config, flags)
    model, (samples, *_) = finetune.make_model(args), finetune.load_data(args)
    rows = [{"input_ids": row, "labels": row} for row, _ in samples]
    how = options(
        tempfile.gettempdir(),
        per_device_train_batch_size=BATCH,
        num_train_epochs=1,
        use_cpu=True,
        bf16=False,  # unlike SFTTrainer's default
        gradient_checkpointing=False,
        save_strategy="no",
    )
    trainer(model, how, train_dataset=Dataset.from_list(rows)).train()


def main() -> None:
    import transformers
    import trl

    ways = {
        "loop": lambda flags: in_process(finetune, *flags),
        "bare": bare,
        "trainer": partial(peer, transformers.Trainer, transformers.TrainingArguments),
        "sft": partial(peer, trl.SFTTrainer, trl.SFTConfig),
    }
    with tempfile.TemporaryDirectory() as folder:
        docstrings.main(["--folder", folder, "--layers", "8", "--width", "256"])
        data = Path(folder, "pairs.jsonl")
        data.write_text(f"{json.dumps(PAIR)}\n" * 143)  # 8 steps, and a tenth to evaluate on
        flags = f"--base {folder}/base --data {data} --max-tokens {LENGTH} --epochs 1".split()
        calls = {name: partial(way, flags + sys.argv[1:]) for name, way in ways.items()}
        rates = compare(calls, 5, BATCH * LENGTH)
    table(f"{' | '.join(ways)} | loop / bare", [rates])


if __name__ == "__main__":
    startup.run(main)  # with the settings of a run, for the others as well
