"""The script of benchmarks/billion.py: train a new Llama on bytes, and say the memory it takes.

Each process prints the highest resident memory (VmHWM) of a phase at its end, and resets it.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from trainkit import Run, make_loaders, make_optimizer, make_scheduler, shards, startup

import torch
from torch import nn

from examples.windows import Windows, standard_library
from trainkit.config import Count, TrainingConfig, parse
from trainkit.language.pretrained import write_pretrained

LENGTH = 64  # tokens of a sample


@dataclass
class Config(TrainingConfig):
    width: Count = 1536
    layers: Count = 40
    run_dir: Path = Path("runs/billion")
    epochs: int = 1
    batch_size: int = 2


def load_data(config: Config) -> tuple:
    """Return the training set and the evaluation set."""
    path = standard_library(config.run_dir.parent)
    return tuple(Windows(path, LENGTH + 1, range(0, 20 * LENGTH, LENGTH), out) for out in (0, 1))


def make_model(config: Config) -> nn.Module:
    """A Llama for bytes, with the tokens of ByT5 and the layers of TinyLlama 1.1B."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = config.width // 64
    shape = LlamaConfig(
        vocab_size=384,
        hidden_size=config.width,
        intermediate_size=config.width * 11 // 4,
        num_hidden_layers=config.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 8 if heads % 8 == 0 else heads,
    )
    return LlamaForCausalLM(shape)


def compute_losses(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the loss of each token after the first."""
    tokens = batch[0].long()
    logits = model(tokens[:, :-1], use_cache=False).logits
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    return {"loss": losses}


def note(phase: str, rank: int) -> None:
    """Print the highest resident memory since the last call, in bytes."""
    status = Path("/proc/self/status").read_text()
    kib = {line.split()[0]: line.split()[1] for line in status.splitlines() if line[-3:] == " kB"}
    numbers = " ".join(str(1024 * int(kib[name])) for name in ("VmHWM:", "RssAnon:", "RssFile:"))
    Path("/proc/self/clear_refs").write_text("5")
    sys.stdout.write(f"memory {rank} {phase} {numbers}\n")  # print writes the end on its own
    sys.stdout.flush()


def main(argv: list[str] | None = None) -> None:
    with Run(config := parse(Config, argv), "billion") as run:
        accelerator, rank = run.accelerator, run.accelerator.process_index
        note("imports", rank)
        sets = run.load(load_data)
        train_loader, eval_loader = make_loaders(accelerator, *sets, config)
        model = shards.make(accelerator, lambda: make_model(config))
        optimizer = make_optimizer(accelerator, model.parameters(), config)
        scheduler = make_scheduler(optimizer, config, run.steps_per_epoch)
        model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
            model, optimizer, train_loader, eval_loader, scheduler
        )
        run.begin(model, {"script": "billion"})
        note("resumes" if run.progress.step else "begins", rank)
        for _ in run.epochs():
            for batch in run.steps(train_loader):
                losses = compute_losses(model, batch)
                accelerator.backward(run.step_mean(losses["loss"]))
                run.clip_and_check(optimizer)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                run.add(**losses)
                if run.end_step():
                    note("steps", rank)
                    run.save()
                    run.checkpoints.commits.wait()
                    note("saves", rank)
            metrics = run.evaluate(eval_loader, lambda batch: compute_losses(model, batch))
            note("steps", rank)
            run.end_epoch(metrics)
            note("saves", rank)
        from transformers import ByT5Tokenizer

        run.results.write_weights(run.ema)
        note("writes the weights", rank)
        write_pretrained(run, ByT5Tokenizer(), "none")
        note("writes pretrained/", rank)
        run.finish()
    sys.stdout.flush()


if __name__ == "__main__":
    startup.run(main)
