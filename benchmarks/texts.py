"""Accuracy and CPU time of examples/text.py --base, beside a loop of transformers and Accelerate.

    OMP_NUM_THREADS=1 python -m benchmarks.texts FILE BASE [--eval-data FILE]

    text      examples/text.py: it also logs, checks, saves checkpoints and follows its schedule
    peer      the model that AutoModelForSequenceClassification makes of BASE, AdamW, a rate that
              rises for a tenth of the steps and falls in a straight line, batches in random order

Both have the texts, the split, the epochs, the batch size, the rate of the encoder and --max-tokens
in common, and take turns in one process.
"""

import contextlib
import io
import tempfile
import time

from trainkit import startup

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    get_linear_schedule_with_warmup,
)

from benchmarks._runs import Parser
from examples import text
from trainkit.config import parse
from trainkit.texts import texts


def peer(flags: list[str]) -> float:
    """Train as the example of Accelerate does; return the accuracy."""
    config = parse(text.Config, flags)
    sets, accelerator = texts.read_sets(config), Accelerator(cpu=True)
    tokenizer = AutoTokenizer.from_pretrained(config.base)

    def collate(samples: list) -> dict[str, torch.Tensor]:
        lines, labels = zip(*samples, strict=True)
        options = {"truncation": True, "max_length": config.max_tokens or 128}
        batch = tokenizer([*lines], padding="longest", return_tensors="pt", **options)
        return batch | {"labels": torch.tensor(labels)}

    torch.manual_seed(config.seed)
    train = DataLoader(sets.train, config.batch_size, shuffle=True, collate_fn=collate)
    held_out = DataLoader(sets.held_out, 2 * config.batch_size, collate_fn=collate)
    model = AutoModelForSequenceClassification.from_pretrained(
        config.base, num_labels=len(sets.classes)
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate)
    steps = len(train) * config.epochs
    schedule = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    model, optimizer, train, held_out, schedule = accelerator.prepare(
        model, optimizer, train, held_out, schedule
    )
    right = 0
    for _ in range(config.epochs):
        for batch in train:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        model.eval()
        right = 0
        for batch in held_out:
            with torch.no_grad():
                answers = model(**batch).logits.argmax(1)
            right += int(accelerator.gather_for_metrics(answers == batch["labels"]).sum())
        model.train()
    return right / len(sets.held_out)


def main() -> None:
    """Print a row for each run."""
    parser = Parser(__doc__, 1)
    parser.add_argument("data")
    parser.add_argument("base")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--eval-data")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--eval-data", args.eval_data] if args.eval_data else []
        flags += ["--data", args.data, "--base", args.base, "--epochs", str(args.epochs)]
        flags += ["--run-dir", f"{folder}/run", "--no-pictures"]
        for number in range(args.rounds):
            for way in ("text", "peer"):
                AcceleratorState._reset_state(reset_partial_state=True)
                GradientState._reset_state()
                seeded, start = [*flags, "--seed", str(number)], time.process_time()
                with contextlib.redirect_stdout(io.StringIO()):
                    ran = text.main(seeded)["eval_accuracy"] if way == "text" else peer(seeded)
                seconds = time.process_time() - start
                print(f"{way}  accuracy {ran:.2%}  CPU {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    startup.run(main)
