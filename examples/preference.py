"""Teach a language model which of two answers is preferred (DPO), in full or by LoRA.

python examples/docstrings.py    makes what the next needs: a tiny model and pairs of answers
python examples/preference.py --learning-rate 1e-4
python examples/preference.py --base HuggingFaceTB/SmolLM2-135M-Instruct --data x.parquet --lora 8

A row has `prompt`, `chosen` and `rejected`, or chosen and rejected are conversations that begin
alike. The loss is that of Direct Preference Optimization, Rafailov et al. 2023, arXiv 2305.18290.
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # trainkit/ lies beside examples/
from trainkit import Run, make_loaders, make_optimizer, make_scheduler, startup

import torch
from torch.nn.functional import logsigmoid
from torch.nn.utils.rnn import pad_sequence

from trainkit.config import Count, MayChange, Positive, Rule, Schedule, TrainingConfig, parse
from trainkit.errors import as_usage_error
from trainkit.language import preferences, pretrained, token_losses
from trainkit.language.conversations import read_tokenizer
from trainkit.language.templates import first_day
from trainkit.orders import by_length

Smoothing = Annotated[float, Rule(lambda value: 0 <= value < 0.5, "at least 0 and below 0.5")]


@dataclass
class Config(TrainingConfig):
    base: MayChange[str] = "runs/docstrings/base"  # a folder, or a model of the Hub
    data: MayChange[str] = "runs/docstrings/preferred.jsonl"  # JSON, Parquet, a folder or a Hub id
    beta: Positive = 0.1  # how much a change of the log-probability of an answer counts
    label_smoothing: Smoothing = 0.0  # the share of pairs that are taken to be the wrong way round
    lora: Count | None = None  # rank: freeze the model and train matrices beside it
    merge: MayChange[bool] = False  # also write the model with what --lora trained, as one
    save_float32: MayChange[bool] = False  # write pretrained/ as trained, not in the base's type
    max_tokens: Count = 512  # of prompt and answer: what is over is cut
    run_dir: Path = Path("runs/preference")
    epochs: int = 1
    batch_size: int = 16
    eval_batch_size: int = 16
    learning_rate: float = 1e-6
    schedule: Schedule = "cosine"
    warmup: float = 0.1
    clip_norm: float = 1.0


def load_data(config: Config) -> tuple:
    """Return pairs of tokens to train and evaluate on, and what else the run needs of them."""
    tokenizer, limit = read_tokenizer(config.base)
    with as_usage_error(f"--data {config.data} cannot be used with --base {config.base}"):
        more = config.max_tokens, limit, first_day(config)
        pairs = preferences.make_pairs(tokenizer, config.data, *more)
    return *pairs, tokenizer


def collate(pairs: list) -> tuple[torch.Tensor, ...]:
    """Return tokens and which are learned, (n, 2 for chosen and rejected, longest), and others."""
    rows = ([row for pair in pairs for row in pair[first:4:2]] for first in (0, 1))
    tokens, learned = (pad_sequence(x, batch_first=True).unflatten(0, (-1, 2)) for x in rows)
    return tokens, learned, *map(torch.stack, zip(*(pair[4:] for pair in pairs), strict=True))


def make_model(config: Config) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    # Dropout would pass for a change of the model.
    settings = pretrained.without_dropout(AutoConfig.from_pretrained(config.base))
    dtype = "auto" if config.lora else torch.float32  # what is trained is float32
    model = AutoModelForCausalLM.from_pretrained(config.base, config=settings, dtype=dtype)
    model.config = AutoConfig.from_pretrained(config.base)  # to be written; its layers have theirs
    token_losses.allow_parts(model)
    return model


def log_probabilities(model: torch.nn.Module, *rows: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of what is learned in each conversation, (n, 2)."""
    tokens, learned = (part.flatten(0, 1) for part in rows)
    counted = learned[:, 1:]
    # Padding needs no mask: it is on the right, and a token in a causal model only sees its left.
    inputs = {"input_ids": tokens[:, :-1], "logits_to_keep": counted, "use_cache": False}
    losses = token_losses.token_losses(model, tokens[:, 1:][counted], **inputs)
    of_tokens = losses.new_zeros(counted.shape).masked_scatter(counted, -losses)
    return of_tokens.sum(1).view(-1, 2)


def compute_values(model: torch.nn.Module, batch: tuple, config: Config) -> dict:
    """Return the loss of each pair, by how much chosen is ahead, and whether it is."""
    tokens, learned, reference = batch
    rewards = config.beta * (log_probabilities(model, tokens, learned) - reference)
    margin, wrong = rewards[:, 0] - rewards[:, 1], config.label_smoothing
    loss = -(1 - wrong) * logsigmoid(margin) - wrong * logsigmoid(-margin)
    return {"loss": loss, "margin": margin, "accuracy": (margin > 0).float()}


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Train, evaluate and write the folders; return the last metrics."""
    with Run(config := parse(Config, argv), "preference") as run:
        accelerator = run.accelerator
        *sets, end, plan, day, tokenizer = run.load(load_data)
        model, rows = make_model(config), (x for pairs in sets for pair in pairs for x in pair[::2])
        pretrained.check_vocabulary(model, tokenizer, rows)
        compute = partial(log_probabilities, model)
        base = preferences.add_reference(accelerator, model, sets, collate, compute)
        order = by_length(list(map(preferences.longest, sets[0])), config.batch_size, config.seed)
        train_loader, eval_loader = make_loaders(accelerator, *sets, config, collate, order=order)
        model = pretrained.add_adapter(model, config.lora) if config.lora else model
        pretrained.stop_at(model, end)
        weights = (w for w in model.parameters() if w.requires_grad)  # a list would keep them whole
        optimizer = make_optimizer(accelerator, weights, config)
        scheduler = make_scheduler(optimizer, config, run.steps_per_epoch)
        model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
            model, optimizer, train_loader, eval_loader, scheduler
        )
        metadata = {"script": Path(__file__).stem, "lora": config.lora, "reference": base}
        metadata["day"] = day
        # What --lora freezes is not saved: it lies in --base.
        run.begin(model, metadata, plan | token_losses.PLAN, save_frozen=not config.lora)
        for _ in run.epochs():
            for batch in run.steps(train_loader):
                with accelerator.accumulate(model):
                    values = compute_values(model, batch, config)
                    accelerator.backward(run.step_mean(values["loss"]))
                    run.clip_and_check(optimizer)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                run.add(**values)
                if run.end_step():
                    run.save()
            run.end_epoch(run.evaluate(eval_loader, lambda x: compute_values(model, x, config)))
        dtype = None if config.save_float32 else pretrained.dtype_of(config.base)
        pretrained.write_pretrained(run, tokenizer, config.base, config.merge, dtype)
        return run.finish()


if __name__ == "__main__":
    startup.run(main)
