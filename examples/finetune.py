"""Finetune a Hugging Face model to answer prompts, in full or by LoRA, into RUN_DIR/pretrained.

python examples/docstrings.py    makes what the next two need: a tiny model, prompts and answers
python examples/finetune.py --learning-rate 2e-3
python examples/finetune.py --base runs/finetune/pretrained --lora 8 --run-dir runs/lora
python examples/finetune.py --base HuggingFaceTB/SmolLM2-135M-Instruct --data pairs.parquet
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # trainkit/ lies beside examples/
from trainkit import (  # pip install .
    Run,
    by_length,
    make_loaders,
    make_optimizer,
    make_scheduler,
    startup,
)

import torch
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.nn.utils.rnn import pad_sequence

from trainkit.config import MayChange, ReadOnlyIf, Schedule, parse
from trainkit.language import (
    LanguageConfig,
    add_adapter,
    answer,
    fit_to_data,
    load_base,
    load_chats,
    places_of,
    token_losses,
    write_pretrained,
)


@dataclass
class Config(LanguageConfig):
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
    positions: torch.Tensor | None = None  # in its sample, in packed rows


def load_data(config: Config) -> tuple:
    """Return samples (tokens, which are learned) to train and evaluate on, and ChatSets' others."""
    return load_chats(config, config.system, config.prompt, config.pack)


def collate(samples: list) -> Batch:
    """Make a batch of samples, or of packed rows, which have positions as well."""
    padded = (pad_sequence(parts, batch_first=True) for parts in zip(*samples, strict=True))
    tokens, learned, *positions = padded
    return Batch(tokens, learned, places_of(learned), *positions)


def make_model(config: Config) -> torch.nn.Module:
    model = load_base(config, config.resize_embeddings)
    if config.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if config.lora:
        model = add_adapter(model, config.lora)
    return model.train()  # from_pretrained returns it in evaluation mode


def compute_losses(model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """Return the loss of each token that is learned, and a mask that counts all of them."""
    # Padding needs no mask: it is on the right, and a token in a causal model only sees its left.
    inputs = {"input_ids": batch.tokens[:, :-1], "use_cache": False}
    if batch.positions is not None:
        inputs["position_ids"] = batch.positions[:, :-1]
    targets = batch.tokens[:, 1:].flatten()[batch.places]
    losses = token_losses(model, targets, batch.places, **inputs)
    return {"loss": losses, "mask": torch.ones_like(losses, dtype=torch.bool)}


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Train, evaluate, answer a prompt and write the folders; return the last metrics."""
    config = parse(Config, argv)
    with Run(config, "finetune") as run:
        accelerator = run.accelerator
        sets = run.load(load_data)
        model = make_model(config)
        fit_to_data(accelerator, model, sets)
        lengths = [len(tokens) for tokens, *_ in sets.train_set]
        order = by_length(lengths, config.batch_size, config.seed)
        train_loader, eval_loader = make_loaders(
            accelerator, sets.train_set, sets.eval_set, config, collate, order=order
        )
        weights = (w for w in model.parameters() if w.requires_grad)  # a list would keep them whole
        optimizer = make_optimizer(accelerator, weights, config)
        scheduler = make_scheduler(optimizer, config, run.steps_per_epoch)
        model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
            model, optimizer, train_loader, eval_loader, scheduler
        )
        metadata = {"script": Path(__file__).stem, "lora": config.lora}
        # What --lora freezes is not saved: it lies in --base.
        run.begin(model, metadata, sets.plan, save_frozen=not config.lora)
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
            for name, tokens in sets.prompts.items():
                run.print(f"{name}: {answer(run.models[0], sets.tokenizer, tokens)}")
            run.end_epoch(run.evaluate(eval_loader, lambda batch: compute_losses(model, batch)))
        write_pretrained(run, sets.tokenizer, config.base, config.merge, config.save_float32)
        return run.finish()


if __name__ == "__main__":
    startup.run(main)
