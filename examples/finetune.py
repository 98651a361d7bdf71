"""Finetune a Hugging Face model to answer prompts, in full or by LoRA, into RUN_DIR/pretrained.

python examples/docstrings.py    makes what the next two need: a tiny model, prompts and answers
python examples/finetune.py --learning-rate 2e-3
python examples/finetune.py --base runs/finetune/pretrained --lora 8 --run-dir runs/lora
python examples/finetune.py --base HuggingFaceTB/SmolLM2-135M-Instruct --data pairs.parquet
"""

import shlex
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # trainkit/ lies beside examples/
from trainkit import Run, by_length, make_loaders, make_optimizer, make_scheduler, startup

import torch
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.nn.utils.rnn import pad_sequence

from trainkit.config import MayChange, ReadOnlyIf, Schedule, parse
from trainkit.errors import as_usage_error
from trainkit.language import conversations, pretrained, token_losses
from trainkit.language.packing import pack_sets, row_size, share_rows
from trainkit.language.templates import first_day


@dataclass
class Config(pretrained.LanguageConfig):
    # Add rows for tokens that the base does not have.
    resize_embeddings: Annotated[bool, ReadOnlyIf("lora", (None,))] = False
    system: str | None = None  # system turn of the conversations that have none
    prompt: MayChange[tuple[str, ...]] = ()  # answered at each evaluation, instead of a sample's
    pack: bool = False  # fill rows of --max-tokens: a row, not a sample, then counts as one
    checkpointing: MayChange[bool] = False  # less memory, more time, the same numbers
    run_dir: Path = Path("runs/finetune")
    epochs: int = 3
    batch_size: int = 16
    eval_batch_size: int = 32
    learning_rate: float = 2e-5
    schedule: Schedule = "cosine"
    warmup: float = 0.05
    clip_norm: float = 1.0


class Batch(NamedTuple):
    """Rows of tokens, (rows, longest). What is left in a row is padded with 0."""

    tokens: torch.Tensor
    learned: torch.Tensor  # which are
    places: torch.Tensor  # of those that are predicted and learned, in learned[:, 1:].flatten()
    positions: torch.Tensor | None = None  # in its sample, if samples share rows


def load_data(config: Config) -> tuple:
    """Return samples (tokens, which are learned) to train and evaluate on, and ChatSets' others."""
    tokenizer, limit = conversations.read_tokenizer(config.base)
    with as_usage_error(f"--data {config.data} cannot be used with --base {config.base}"):
        more = config.system, config.prompt, first_day(config), config.eval_data
        sets = conversations.make_chat_sets(tokenizer, config.data, config.max_tokens, limit, *more)
    if config.pack:
        sets = pack_sets(sets, config.max_tokens)
    return *sets, tokenizer


def collate(samples: list, size: int = 0) -> Batch:
    """Make a batch of samples, which share rows of up to `size` tokens, or of rows."""
    rows = share_rows(samples, size) if size else samples
    padded = (pad_sequence(parts, batch_first=True) for parts in zip(*rows, strict=True))
    tokens, learned, *positions = padded
    return Batch(tokens, learned, token_losses.places_of(learned), *positions)


def make_model(config: Config) -> torch.nn.Module:
    model = pretrained.load_base(config)
    if config.resize_embeddings:
        pretrained.resize_embeddings(model, config.base, is_frozen=bool(config.lora))
    token_losses.allow_parts(model)
    if config.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if config.lora:
        model = pretrained.add_adapter(model, config.lora)
    return model.train()  # from_pretrained returns it in evaluation mode


def compute_losses(model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """Return the loss of each token that is learned, and a mask that counts all of them."""
    # Padding needs no mask: it is on the right, and a token in a causal model only sees its left.
    inputs = {"input_ids": batch.tokens[:, :-1], "use_cache": False}
    if batch.positions is not None:
        inputs["position_ids"] = batch.positions[:, :-1]
    targets = batch.tokens[:, 1:].flatten()[batch.places]
    losses = token_losses.token_losses(model, targets, batch.places, **inputs)
    return {"loss": losses, "mask": torch.ones_like(losses, dtype=torch.bool)}


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Train, evaluate, answer a prompt and write the folders; return the last metrics."""
    config = parse(Config, argv)
    with Run(config, "finetune") as run:
        accelerator = run.accelerator
        train_set, eval_set, end, plan, prompts, tokenizer = run.load(load_data)
        model, both = make_model(config), (train_set, eval_set)
        pretrained.check_vocabulary(model, tokenizer, (row[0] for rows in both for row in rows))
        size, padded = row_size(accelerator, model, config.max_tokens, config.pack)
        order = by_length([len(tokens) for tokens, *_ in train_set], config.batch_size, config.seed)
        train_loader, eval_loader = make_loaders(
            accelerator, train_set, eval_set, config, partial(collate, size=size), order=order
        )
        pretrained.stop_at(model, end)
        weights = (w for w in model.parameters() if w.requires_grad)  # a list would keep them whole
        optimizer = make_optimizer(accelerator, weights, config)
        scheduler = make_scheduler(optimizer, config, run.steps_per_epoch)
        model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
            model, optimizer, train_loader, eval_loader, scheduler
        )
        # Rounding depends on the rows, so a resume must have the same ones.
        metadata = {"script": Path(__file__).stem, "lora": config.lora, "shared rows": size}
        plan |= padded
        # What --lora freezes is not saved: it lies in --base.
        run.begin(model, metadata, plan, save_frozen=not config.lora)
        register_fsdp_forward_method(run.models[0], "generate")  # for weights that are sharded
        for _ in run.epochs():
            for batch in run.steps(train_loader, count=lambda x: x.learned[:, 1:].sum()):
                with accelerator.accumulate(model):
                    values = compute_losses(model, batch)
                    accelerator.backward(run.step_mean(values["loss"], values["mask"]))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                run.add(**values)
                if run.end_step():
                    run.save()
            for name, tokens in prompts.items():
                run.print(f"{name}: {conversations.answer(run.models[0], tokenizer, tokens)}")
            run.end_epoch(run.evaluate(eval_loader, lambda batch: compute_losses(model, batch)))
        dtype = None if config.save_float32 else pretrained.dtype_of(config.base)
        pretrained.write_pretrained(run, tokenizer, config.base, config.merge, dtype)
        return run.finish(f"python -m trainkit.tools.ask {shlex.quote(str(config.run_dir))}")


if __name__ == "__main__":
    startup.run(main)
