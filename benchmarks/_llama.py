"""The script of benchmarks/billion.py: train a new Llama on bytes, and say the memory it takes.

Each process prints the highest resident memory (VmHWM) of a phase at its end, and resets it.
"""

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit import Run, make_loaders, make_optimizer, make_scheduler, startup

import torch
from accelerate import Accelerator
from torch import nn

from examples.windows import Windows, standard_library
from trainkit.checkpoints import sharded as shards
from trainkit.config import Count, TrainingConfig, parse
from trainkit.language import write_pretrained
from trainkit.repairs.private_names import mesh_groups

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


def count_sent(accelerator: Accelerator) -> Counter[str]:
    """Return a counter of the bytes that this process sends in rings, by the axis of the mesh."""
    sent: Counter[str] = Counter()
    distributed = torch.distributed
    axes = {group.group_name: axis for axis, group in mesh_groups(accelerator).items()}

    def wrap(passes: int, *names: str) -> None:
        name = next(name for name in names if hasattr(distributed, name))  # torch 2.14 renamed two
        call = getattr(distributed, name)

        def counting(*args: Any, group: Any = None, **how: Any) -> Any:
            num = distributed.get_world_size(group)
            values = [*args, *how.values()]
            largest = max(x.nbytes for x in values if isinstance(x, torch.Tensor))
            axis = axes.get(getattr(group, "group_name", ""), "dp_shard")
            sent[axis] += passes * largest * (num - 1) // num
            return call(*args, group=group, **how)

        setattr(distributed, name, counting)

    wrap(1, "all_gather_single", "all_gather_into_tensor")
    wrap(1, "reduce_scatter_single", "reduce_scatter_tensor")
    wrap(2, "all_reduce")
    return sent


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
        sent = count_sent(accelerator)
        note("resumes" if run.progress.step else "begins", rank)
        for _ in run.epochs():
            for batch in run.steps(train_loader):
                sent.clear()
                losses = compute_losses(model, batch)
                accelerator.backward(run.step_mean(losses["loss"]))
                if rank == 0:
                    sys.stdout.write("".join(f"sent {axis} {sent[axis]}\n" for axis in sent))
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

        run.results.write_weights()
        note("writes the weights", rank)
        write_pretrained(run, ByT5Tokenizer(), "none", save_float32=True)
        note("writes pretrained/", rank)
        run.finish()
    sys.stdout.flush()


if __name__ == "__main__":
    startup.run(main)
