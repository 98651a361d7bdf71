"""The loss of examples/preference.py and the time of its step, beside TRL's DPOTrainer.

    OMP_NUM_THREADS=1 python -m benchmarks.preference      (pip install trl)

Both get the same 16 pairs, the same Llama with random weights, which changed weights are compared
to, and the numbers of the base computed beforehand. The time is the CPU time of one loss and its
gradient, the median of turns that follow each other in one process.
"""

import json
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from datasets import Dataset

from examples import docstrings, preference
from trainkit.config import parse

NUM_PAIRS, NUM_TURNS = 16, 15


def make_pairs(folder: str, num: int | None = None) -> list[str]:
    """Divide up to `num` pairs of examples/docstrings.py into two files; return their flags.

    Without pairs of equal answers and with --eval-data, so that both train on all of the first.
    """
    lines = Path(folder, "preferred.jsonl").read_text().splitlines(keepends=True)[:num]
    rows = [(line, json.loads(line)) for line in lines]
    kept = [line for line, row in rows if row["chosen"] != row["rejected"]]
    num_evaluated = len(kept) // 10
    Path(folder, "evaluated.jsonl").write_text("".join(kept[:num_evaluated]))
    Path(folder, "trained.jsonl").write_text("".join(kept[num_evaluated:]))
    return f"--data {folder}/trained.jsonl --eval-data {folder}/evaluated.jsonl".split()


def conversations(config: preference.Config) -> list[dict[str, list]]:
    """Return the pairs of --data, which examples/preference.py trains on, as TRL reads them."""
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    return [
        {name: [{"role": role, "content": row[name]}] for name, role in roles.items()}
        for row in map(json.loads, Path(config.data).read_text().splitlines())
    ]


def peer(flags: list[str]) -> int:
    """Train all weights for an epoch in bf16 with DPOTrainer; return the number of pairs."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    config = parse(preference.Config, flags)
    how = DPOConfig(
        tempfile.mkdtemp(),
        beta=config.beta,
        learning_rate=config.learning_rate,
        max_length=config.max_tokens,
        per_device_train_batch_size=config.batch_size,
        num_train_epochs=1,
        precompute_ref_log_probs=True,
        use_cpu=not torch.cuda.is_available(),
        bf16=True,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
    )
    trainer = DPOTrainer(
        AutoModelForCausalLM.from_pretrained(config.base, dtype=torch.float32),
        args=how,
        train_dataset=Dataset.from_list(conversations(config)),
        processing_class=AutoTokenizer.from_pretrained(config.base),
    )
    trainer.train()
    return len(trainer.train_dataset)


def main() -> None:
    from transformers import AutoModelForCausalLM
    from trl import DPOConfig, DPOTrainer

    with tempfile.TemporaryDirectory() as folder:
        docstrings.main(["--folder", folder])
        flags = ["--base", f"{folder}/base", *make_pairs(folder)]
        config = parse(preference.Config, flags)
        pairs, _, tokenizer, *_ = preference.load_data(config)
        rows = conversations(config)[:NUM_PAIRS]
        base, model = preference.make_model(config).eval(), preference.make_model(config)
        torch.manual_seed(0)
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.02 * torch.randn_like(weight)
            batch = preference.collate_pairs(pairs[:NUM_PAIRS])
            batch = batch._replace(reference=preference.log_probabilities(base, batch))
        options = {"report_to": [], "use_cpu": True, "precompute_ref_log_probs": True}
        options |= {"per_device_train_batch_size": NUM_PAIRS, "gradient_checkpointing": False}
        args = DPOConfig(folder, beta=config.beta, bf16=False, max_length=512, **options)
        theirs = AutoModelForCausalLM.from_pretrained(config.base, dtype=torch.float32)
        theirs.load_state_dict(model.state_dict())
        trainer = DPOTrainer(
            theirs, base, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
        )
        inputs = trainer.data_collator([trainer.train_dataset[n] for n in range(NUM_PAIRS)])
        theirs.train()
        ways = {
            "trl": lambda: trainer.compute_loss(theirs, inputs),
            "preference": lambda: preference.compute_values(model, batch, config)["loss"].mean(),
        }
        losses, seconds = {}, {name: [] for name in ways}
        for _ in range(NUM_TURNS):
            for name, way in ways.items():
                start = time.process_time()
                loss = way()
                loss.backward()
                seconds[name].append(time.process_time() - start)
                losses[name] = loss.item()
    for name, loss in losses.items():
        print(f"{name:12} loss {loss:.7f}, {1000 * median(seconds[name]):.1f} ms")
    print(f"apart by {abs(losses['trl'] - losses['preference']):.1e}")


if __name__ == "__main__":
    main()
