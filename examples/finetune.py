"""A Hugging Face model learns to answer prompts, whole or by LoRA: RUN_DIR/pretrained has it.

python examples/docstrings.py    makes what the next two need: a tiny model, prompts and answers
python examples/finetune.py --learning-rate 2e-3
python examples/finetune.py --base runs/finetune/pretrained --lora 8 --run-dir runs/lora
python examples/finetune.py --base HuggingFaceTB/SmolLM2-135M-Instruct --data pairs.parquet
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # trainkit/ lies beside examples/
from trainkit import Run, arguments, make_loaders, make_optimizer, make_scheduler, startup

import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.nn.utils.rnn import pad_sequence

from trainkit.errors import as_usage_error
from trainkit.tools.pretrained import write_pretrained


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = arguments.Parser(__doc__)
    add = parser.add_argument_group("problem").add_argument
    add("--base", default="runs/docstrings/base", help="a folder, or a model of the Hub")
    add("--data", default="runs/docstrings/pairs.jsonl", help="or Parquet: prompt, answer")
    add("--lora", type=int, metavar="RANK", help="freeze the model and train matrices beside it")
    add("--max-tokens", type=int, default=512, help="of prompt and answer: what is over is cut")
    add("--checkpointing", action="store_true", help="less memory, more time, the same numbers")
    arguments.add_training_arguments(parser)
    arguments.add_run_arguments(parser, "runs/finetune", ["base", "data", "checkpointing"])
    parser.set_defaults(epochs=3, batch_size=16, eval_batch_size=32, learning_rate=2e-5)
    parser.set_defaults(schedule="cosine", warmup=0.05, clip_norm=1.0)
    return parser.parse_args(argv)


def encode(tokenizer: Any, prompt: str, answer: str) -> tuple[list[int], int]:
    """The tokens of both, and where those of the answer begin."""
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        ask = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=False)
        both = tokenizer.apply_chat_template(chat, return_dict=False)
    else:
        ask = tokenizer(prompt).input_ids
        both = ask + tokenizer(answer + tokenizer.eos_token, add_special_tokens=False).input_ids
    # Some templates end a prompt in one way before an answer and in another without.
    return both, next(n for n in range(len(ask), -1, -1) if ask[:n] == both[:n])


def load_data(args: argparse.Namespace) -> tuple[list, list, Any]:
    """Samples are tokens, and where the answer begins; a tenth is held out. And the tokenizer."""
    with as_usage_error("this example needs `pip install transformers`"):
        from transformers import AutoTokenizer
    with as_usage_error(f"--base {args.base} or --data {args.data} cannot be read"):
        tokenizer = AutoTokenizer.from_pretrained(args.base)
        if args.data.endswith(".parquet"):
            rows = pq.read_table(args.data, columns=["prompt", "answer"]).to_pylist()
        else:
            rows = [json.loads(line) for line in Path(args.data).read_bytes().splitlines()]
        pairs = [encode(tokenizer, row["prompt"], row["answer"]) for row in rows]
    samples = [(torch.tensor(tokens[: args.max_tokens]), first) for tokens, first in pairs]
    return [pair for n, pair in enumerate(samples) if n % 10], samples[::10], tokenizer


def collate(samples: list) -> tuple[torch.Tensor, ...]:
    """Tokens (n, longest), and from where to where they count, (n, 1) each."""
    spans = torch.tensor([(start, len(row)) for row, start in samples])
    return pad_sequence([row for row, _ in samples], batch_first=True), spans[:, :1], spans[:, 1:]


def make_model(args: argparse.Namespace) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    dtype = "auto" if args.lora else torch.float32  # what is trained is float32
    # Memory-mapped: the processes of a machine share the weights that none of them changes.
    model = AutoModelForCausalLM.from_pretrained(args.base, dtype=dtype)
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if args.lora:
        with as_usage_error("--lora needs `pip install peft`"):
            from peft import LoraConfig, get_peft_model
        options = {"r": args.lora, "lora_alpha": 2 * args.lora, "target_modules": "all-linear"}
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
    return model.train()  # from_pretrained returns it in evaluation mode


def judge(model: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    """The loss of each token after the first, and which are the answer's."""
    tokens, first, end = batch
    # These models refuse zero rows, which a process may get: then one is made up.
    inputs = tokens if len(tokens) else tokens.new_zeros(1, tokens.shape[1])
    # Padding needs no mask: it is on the right, where no token of a causal model looks.
    logits = model(input_ids=inputs[:, :-1], use_cache=False).logits[: len(tokens)]
    targets, place = tokens[:, 1:], torch.arange(1, tokens.shape[1], device=tokens.device)
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return {"loss": losses.view_as(targets), "where": (first <= place) & (place < end)}


def answer(model: Any, tokenizer: Any, tokens: torch.Tensor, first: int) -> str:
    """The most likely answer to the prompt of a sample. Every process must call this."""
    prompt = tokens[None, :first].to(model.device)
    options = {"max_new_tokens": 50, "do_sample": False, "pad_token_id": tokenizer.eos_token_id}
    model.eval()
    found = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **options)
    model.train()
    return tokenizer.decode(found[0, first:], skip_special_tokens=True)


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Train, evaluate, answer a prompt, write the folders; return the last metrics."""
    args = parse_args(argv)
    with Run(args, "finetune") as run:
        accelerator = run.accelerator
        train_set, eval_set, tokenizer = run.load(load_data)
        train_loader, eval_loader = make_loaders(accelerator, train_set, eval_set, args, collate)
        model = make_model(args)
        weights = (w for w in model.parameters() if w.requires_grad)  # a list would keep them whole
        optimizer = make_optimizer(accelerator, weights, args)
        scheduler = make_scheduler(optimizer, args, run.steps_per_epoch)
        model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
            model, optimizer, train_loader, eval_loader, scheduler
        )
        run.only_trained = bool(args.lora)  # the base lies in --base
        run.begin(model, {"script": Path(__file__).stem, "lora": args.lora})
        register_fsdp_forward_method(run.models[0], "generate")  # for weights that are sharded
        for _ in run.epochs():
            for batch in run.steps(train_loader):
                with accelerator.accumulate(model):
                    values = judge(model, batch)
                    accelerator.backward(run.step_mean(values["loss"], values["where"]))
                    run.clip_and_check(optimizer)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                run.add(**values)
            run.print(f"answer: {answer(run.models[0], tokenizer, *eval_set[0])}")
            run.end_epoch(run.evaluate(eval_loader, lambda batch: judge(model, batch)))
        metrics = run.finish()
    write_pretrained(run, tokenizer, args.base)
    return metrics


if __name__ == "__main__":
    startup.run(main)
