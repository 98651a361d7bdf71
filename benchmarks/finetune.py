"""Tokens per second of examples/finetune.py, beside a bare PyTorch loop and beside peers.

    OMP_NUM_THREADS=1 python -m benchmarks.finetune
    OMP_NUM_THREADS=1 python -m benchmarks.finetune --lora 8
    OMP_NUM_THREADS=1 python -m benchmarks.finetune chats
    OMP_NUM_THREADS=1 python -m benchmarks.finetune memory

    loop      examples/finetune.py: it also logs, counts, checks and follows its schedule
    pack      the same with --pack
    bare      the same model, loss and clipping on batches in random order, with all logits
    trainer   the same under Transformers' Trainer
    sft       the same under TRL's SFTTrainer (pip install trl), which also measures accuracy
    sft pack  the same with its packing

All train a Llama of 7.3 million parameters, and take turns in one process. First come 16 samples of
128 tokens a step: the CPU time from one optimizer step to the next, as in tokens.py. `chats` has
256 samples of lengths as chats have them, of which an answer is the last two thirds, and counts the
tokens that are not padding in all of the CPU time from the first forward pass to the last optimizer
step; packed rows have 1,024 tokens, two a step. `memory --samples 36` starts a process for each
way, in which a small model has a vocabulary of 128,000 and batches 8 samples of at most 256 tokens.
"""

import contextlib
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from trainkit import startup

import torch
from datasets import Dataset
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from benchmarks._runs import Parser, execute, in_process, in_turn, spread, table
from benchmarks.tokens import compare
from examples import docstrings, finetune
from trainkit.config import parse

BATCH, LENGTH, LONGEST = 16, 128, 1024
PAIR = {"prompt": "def question(of_what): " * 9, "answer": "What it does with it. " * 99}  # cut


def bare(flags: list[str]) -> None:
    args = parse(finetune.Config, flags)
    model, (samples, *_) = finetune.make_model(args), finetune.load_data(args)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    loader = DataLoader(samples, args.batch_size, shuffle=True, collate_fn=finetune.collate)
    for tokens, learned, *_ in loader:
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        targets = tokens[:, 1:].where(learned[:, 1:], -100)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_norm)
        optimizer.step()
        optimizer.zero_grad()


def peer(trainer: str, flags: list[str], pack: bool = False, bf16: bool = False) -> int:
    """Train as a peer does; return how many tokens were learned."""
    import transformers
    import trl

    args = parse(finetune.Config, flags)
    more: dict[str, Any] = {"max_length": args.max_tokens, "packing": pack}
    kind, options = transformers.Trainer, transformers.TrainingArguments
    if trainer == "sft":
        kind, options = trl.SFTTrainer, trl.SFTConfig
    how = options(
        tempfile.mkdtemp(),
        per_device_train_batch_size=2 if pack else args.batch_size,
        num_train_epochs=1,
        use_cpu=not torch.cuda.is_available(),
        bf16=bf16,  # SFTTrainer's default is True
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        **more if trainer == "sft" else {},
    )
    samples = finetune.load_data(args)[0]
    rows = [{"input_ids": row, "labels": row.where(on, -100)} for row, on in samples]
    given: dict[str, Any] = {"train_dataset": Dataset.from_list(rows)}
    if trainer != "sft":
        given["data_collator"] = collate_labels
    if args.load_4bit:
        model, given["peft_config"] = four_bits(args, bf16)
    else:
        model = finetune.make_model(args)
    made = kind(model, how, **given)
    num_learned = sum(label != -100 for row in made.train_dataset["labels"] for label in row)
    made.train()
    return num_learned


def four_bits(args: finetune.Config, bf16: bool) -> tuple[Any, Any]:
    """The base and the adapters of --load-4bit --lora, as the documentation of TRL makes them."""
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    dtype = torch.bfloat16 if bf16 else torch.float32
    kind = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    quantised = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=dtype, **kind)
    model = AutoModelForCausalLM.from_pretrained(
        args.base, dtype=dtype, quantization_config=quantised
    )
    size = {"r": args.lora, "lora_alpha": 2 * args.lora, "target_modules": "all-linear"}
    return model, LoraConfig(task_type="CAUSAL_LM", **size)


def collate_labels(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    tokens = pad([torch.tensor(row["input_ids"]) for row in rows])
    labels = pad([torch.tensor(row["labels"]) for row in rows], padding_value=-100)
    return {"input_ids": tokens, "labels": labels}


def packed(flags: list[str]) -> None:
    in_process(finetune, *flags, "--pack", "--batch-size", "2")


WAYS: dict[str, Callable[[list[str]], Any]] = {
    "loop": lambda flags: in_process(finetune, *flags),
    "pack": packed,
    "bare": bare,
    "trainer": partial(peer, "trainer"),
    "sft": partial(peer, "sft"),
    "sft pack": partial(peer, "sft", pack=True),
}


def make_base(folder: str, *sizes: str) -> list[str]:
    docstrings.main(["--folder", folder, *sizes])
    config = Path(folder, "base", "config.json")
    known = json.loads(config.read_text())
    config.write_text(json.dumps(known | {"max_position_embeddings": LONGEST}))
    return f"--base {folder}/base --epochs 1".split()


def make_chats(folder: str, num: int, longest: int) -> list[str]:
    """Write pairs with lengths as chats have them: median 100, mean 162, at most `longest`."""
    lengths = torch.randn(num, generator=torch.Generator().manual_seed(0)).add(4.6).exp()
    parts = [(n // 3, n - n // 3 - 5) for n in lengths.clamp(8, longest).long().tolist()]
    rows = [{"prompt": " x" * a, "answer": " y" * b} for a, b in parts]
    Path(folder, "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return f"--data {folder}/pairs.jsonl --max-tokens {longest} --batch-size {BATCH}".split()


def same_lengths(flags: list[str], rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        more = make_base(folder, "--layers", "8", "--width", "256")
        data = Path(folder, "pairs.jsonl")
        data.write_text(f"{json.dumps(PAIR)}\n" * 143)  # 8 steps, and a tenth to evaluate on
        flags = [*more, "--data", str(data), "--max-tokens", str(LENGTH), *flags]
        names = ("loop", "bare", "trainer", "sft")
        rates = compare(
            {name: partial(WAYS[name], flags) for name in names}, rounds, BATCH * LENGTH
        )
    table(f"{' | '.join(names)} | loop / bare", [rates])


def rate(way: Callable[[list[str]], Any], flags: list[str]) -> float:
    """Return tokens that are no padding, a second of CPU time up to the last optimizer step."""
    starts: list[float] = []
    stamps: list[float] = []

    def start(*_: Any) -> None:
        starts.extend([time.process_time()] * (not starts))

    hooks = (
        register_module_forward_pre_hook(start),
        register_optimizer_step_post_hook(lambda *_: stamps.append(time.process_time())),
    )
    with contextlib.redirect_stdout(io.StringIO()):
        way(flags)
    for hook in hooks:
        hook.remove()
    samples, *_ = finetune.load_data(parse(finetune.Config, flags))
    return sum(len(tokens) for tokens, _ in samples) / (stamps[-1] - starts[0])


def ratios(what: str, found: dict[str, list]) -> None:
    """Print the values of each way, and their median over those of the first and the last way."""
    first, *_, last = medians = [statistics.median(each) for each in found.values()]
    head = f"way | {what} | / {next(iter(found))} | / {next(reversed(found))}"
    values = zip(found.items(), medians, strict=True)
    table(head, ([way, spread(each), n / first, n / last] for (way, each), n in values))


def chats(rounds: int, num: int) -> None:
    names = ("bare", "loop", "pack", "sft pack")
    with tempfile.TemporaryDirectory() as folder:
        flags = make_base(folder, "--layers", "8", "--width", "256")
        flags += make_chats(folder, num * 10 // 9, LONGEST)
        rates = in_turn({name: partial(rate, WAYS[name], flags) for name in names}, rounds)
    ratios("tokens a second", rates)


def memory(rounds: int, num: int) -> None:
    names = ("bare", "loop", "trainer", "sft")
    with tempfile.TemporaryDirectory() as folder:
        flags = make_base(folder, "--layers", "2", "--width", "64", "--vocabulary", "128000")
        flags += [*make_chats(folder, num * 10 // 9, 256), "--batch-size", "8"]
        found = in_turn({name: partial(peak, name, flags) for name in names}, rounds)
    ratios("highest, MiB", found)


def peak(name: str, flags: list[str]) -> float:
    code = f"from benchmarks import finetune as f; f.one_way({name!r}, {flags!r})"
    return next(int(line[5:]) for _, line in execute("-c", code).lines if line.startswith("PEAK "))


def one_way(name: str, flags: list[str]) -> None:
    """Print the highest resident memory up to the last optimizer step, in MiB."""
    found: list[str] = []
    register_optimizer_step_post_hook(
        lambda *_: found.append(Path("/proc/self/status").read_text().partition("VmHWM:")[2])
    )
    if name in ("loop", "bare"):  # as the command does and did; the others would keep more with it
        startup.keep_memory()
    WAYS[name](flags)
    print(f"\nPEAK {int(found[-1].split()[0]) // 1024}", flush=True)


def main() -> None:
    parser = Parser(__doc__, rounds=5)
    parser.add_argument("what", nargs="?", default="same", choices=["same", "chats", "memory"])
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--lora", help="of same")
    args = parser.parse_args()
    if args.what == "same":
        same_lengths(["--lora", args.lora] if args.lora else [], args.rounds)
    elif args.what == "chats":
        chats(args.rounds, args.samples)
    else:
        memory(args.rounds, args.samples)


if __name__ == "__main__":
    startup.run(main)  # with the settings of a run, for the others as well
