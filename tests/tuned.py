"""What is tuned: the rows, the base, and a run on them."""

import pytest
import torch
from plain import plain_losses
from sharded import SHARDED, train

from trainkit.numbers.loaders import EpochBatches
from trainkit.numbers.orders import by_length

transformers, peft = map(pytest.importorskip, ("transformers", "peft"))
open_model = transformers.AutoModelForCausalLM.from_pretrained
open_tokenizer = transformers.AutoTokenizer.from_pretrained
MODULES = ["peft", "transformers.models.llama.modeling_llama", "transformers.generation"]
# 270 pairs: 11 steps of 24 and one of 6, which leaves some processes without a sample.
FLAGS = "--batch-size 24 --epochs 2 --stop-after-steps 14 --log-every 1 --learning-rate 3e-3"
FLAGS += " --schedule constant --warmup 0 --clip-norm inf --no-pictures"
LORA = ["--lora", "4"]
FOUR_BITS = [*LORA, "--load-4bit"]


def make_base(nursery, folder):
    """Make rows, and a model, in float64 as well."""
    for where, double in (folder / "double", True), (folder, False):
        words = "examples/docstrings.py", "--folder", where, "--width", 32, "--layers", 1
        made = nursery.run(*words, double=double, modules=MODULES)
        assert made.codes == [0], made.output


def make_flags(made, flags: str, name: str, num: int) -> list[str]:
    """The flags of runs on so many of the rows of this name, in a folder of make_base."""
    lines = (made / f"{name}.jsonl").read_text().splitlines()[:num]
    file = made / f"{name}-{num}.jsonl"
    file.write_text("\n".join(lines))
    return [*flags.split(), "--data", str(file), "--base", f"{made}/base"]


def start_run(nursery, flags, run_dir, lora, way, *args, **plan):
    """`way` is SHARDED, or a number of processes without sharding."""
    kind, world = (way, 2) if way == SHARDED else (None, way)
    plan = {"timeout": 120, "modules": MODULES, "kind": kind, "world": world, **plan}
    plan["env"] = {"HF_DATASETS_CACHE": f"{run_dir}-cache"} | plan.get("env", {})
    return train(nursery, run_dir, *flags, *lora, *args, **plan)


def losses_by_length(args, model, lengths, loss_of):
    order = by_length(lengths, args.batch_size, seed=0)
    batches = EpochBatches(len(lengths), args.batch_size, order=order)
    adam = torch.optim.AdamW(model.parameters(), args.learning_rate, weight_decay=0.0)
    return plain_losses(batches, adam, range(args.epochs), loss_of)


def open_end(folder, base, lora=True):
    """The model of a folder pretrained/, which is an adapter for the base or the whole model."""
    model = open_model(base if lora else folder)
    tokenizer = open_tokenizer(folder)
    assert tokenizer.eos_token == "<end>"
    return peft.PeftModel.from_pretrained(model, folder) if lora else model
