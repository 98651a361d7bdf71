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
from torch.nn.functional import logsigmoid

from trainkit.config import MayChange, NonNegative, Positive, Rule, Schedule, parse
from trainkit.language import (
    LanguageConfig,
    PairBatch,
    add_adapter,
    add_reference,
    answer,
    collate_pairs,
    fit_to_data,
    load_base,
    load_pairs,
    sample_prompts,
    token_losses,
    warn_of_unlikely,
    write_pretrained,
)

Smoothing = Annotated[float, Rule(lambda value: 0 <= value < 0.5, "at least 0 and below 0.5")]


@dataclass
class Config(LanguageConfig):
    data: MayChange[str] = "runs/docstrings/preferred.jsonl"  # JSON, Parquet, a folder or a Hub id
    beta: Positive = 0.1  # how much a change of the log-probability of an answer counts
    label_smoothing: Smoothing = 0.0  # the share of pairs that are taken to be the wrong way round
    sft_weight: NonNegative[float] = 0.0  # of the loss per token of chosen, which keeps it likely
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
    return load_pairs(config)


def make_model(config: Config) -> torch.nn.Module:
    """Return the base without dropout, which would pass for a change of the model."""
    return load_base(config, dropout=False)


def log_probabilities(model: torch.nn.Module, batch: PairBatch) -> torch.Tensor:
    """Return the log-probability of what is learned in each conversation, (n, 2)."""
    tokens = batch.tokens.flatten(0, 1)
    # Padding needs no mask: it is on the right, and a token in a causal model only sees its left.
    inputs = {"input_ids": tokens[:, :-1], "use_cache": False}
    targets = tokens[:, 1:].flatten()[batch.places]
    losses = token_losses(model, targets, batch.places, **inputs)
    of_tokens = losses.new_zeros(tokens[:, 1:].numel()).index_copy(0, batch.places, -losses)
    return of_tokens.view(len(tokens), -1).sum(1).view(-1, 2)


def compute_values(model: torch.nn.Module, batch: PairBatch, config: Config) -> dict:
    """Return the loss of each pair, by how much chosen is ahead, and whether it is.

    Of both answers the log-probability and the reward can fall: the loss sees the margin alone.
    """
    logps = log_probabilities(model, batch)
    rewards = config.beta * (logps - batch.reference)
    margin = rewards[:, 0] - rewards[:, 1]
    wrong = config.label_smoothing
    loss = -(1 - wrong) * logsigmoid(margin) - wrong * logsigmoid(-margin)
    if config.sft_weight:  # Pang et al. 2024, arXiv 2404.19733
        loss = loss - config.sft_weight * logps[:, 0] / batch.learned[:, 0, 1:].sum(1)
    values = {"loss": loss, "margin": margin, "accuracy": (margin > 0).float()}
    for number, side in enumerate(("chosen", "rejected")):
        values |= {f"{side}_logp": logps[:, number], f"{side}_reward": rewards[:, number]}
    return values


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Train, evaluate and write the folders; return the last metrics."""
    config = parse(Config, argv)
    with Run(config, "preference") as run:
        accelerator = run.accelerator
        pairs = run.load(load_data)
        model = make_model(config)
        fit_to_data(accelerator, model, pairs)
        sets = pairs.train_set, pairs.eval_set
        compute = partial(log_probabilities, model)
        base = add_reference(accelerator, model, sets, collate_pairs, compute)
        order = by_length([pair.length for pair in sets[0]], config.batch_size, config.seed)
        train_loader, eval_loader = make_loaders(
            accelerator, *sets, config, collate_pairs, order=order
        )
        model = add_adapter(model, config.lora) if config.lora else model
        weights = (w for w in model.parameters() if w.requires_grad)  # a list would keep them whole
        optimizer = make_optimizer(accelerator, weights, config)
        scheduler = make_scheduler(optimizer, config, run.steps_per_epoch)
        model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
            model, optimizer, train_loader, eval_loader, scheduler
        )
        metadata = {"script": Path(__file__).stem, "lora": config.lora, "reference": base}
        # What --lora freezes is not saved: it lies in --base.
        run.begin(model, metadata, pairs.plan, save_frozen=not config.lora)
        prompts = sample_prompts(pairs)
        register_fsdp_forward_method(run.models[0], "generate")  # for weights that are sharded
        for _ in run.epochs():
            for batch in run.steps(train_loader):
                with accelerator.accumulate(model):
                    values = compute_values(model, batch, config)
                    accelerator.backward(run.step_mean(values["loss"]))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                run.add(**values)
                if run.end_step():
                    run.save()
            metrics = run.evaluate(eval_loader, lambda x: compute_values(model, x, config))
            for name, tokens in prompts.items():
                run.print(f"{name}: {answer(run.models[0], pairs.tokenizer, tokens)}")
            if warning := warn_of_unlikely(metrics, config.beta, pairs.eval_set):
                run.print(warning)
            run.end_epoch(metrics)
        write_pretrained(run, pairs.tokenizer, config.base, config.merge, config.save_float32)
        return run.finish()


if __name__ == "__main__":
    startup.run(main)
