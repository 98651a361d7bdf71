"""Accuracy and CPU time of examples/text.py beside others, on the same texts and the same split.

    OMP_NUM_THREADS=1 python -m benchmarks.texts FILE...
    OMP_NUM_THREADS=1 python -m benchmarks.texts FILE --base BASE [--eval-data FILE]

Without BASE the others are TF-IDF and logistic regression of scikit-learn: of words, as by default,
of n-grams of 1 to 4 letters (char_wb, sublinear), and of both with pairs of words. With BASE:

    text      examples/text.py: it also logs, checks, saves checkpoints and follows its schedule
    peer      the model that AutoModelForSequenceClassification makes of BASE, AdamW, a rate that
              rises for a tenth of the steps and falls in a straight line, batches in random order

Both have the texts, the split, the epochs, the batch size, the rate of the encoder and --max-tokens
in common. All take turns in one process.
"""

import contextlib
import io
import tempfile
import time
from functools import partial
from itertools import product
from pathlib import Path

from trainkit import startup

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import DataLoader

from benchmarks._runs import Parser
from examples import text
from trainkit.config import parse
from trainkit.texts import texts


def peer(flags: list[str]) -> float:
    """Train as the example of Accelerate does; return the accuracy."""
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        get_linear_schedule_with_warmup,
    )

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


def tfidf(kind: str, flags: list[str]) -> float:
    """Fit TF-IDF and logistic regression; return the accuracy."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline, make_union

    letters = TfidfVectorizer(analyzer="char_wb", ngram_range=(1, 4), sublinear_tf=True)
    pairs = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    kinds = {"words": TfidfVectorizer(), "letters": letters, "both": make_union(pairs, letters)}
    sets = texts.read_sets(parse(text.Config, flags))
    model = make_pipeline(kinds[kind], LogisticRegression(max_iter=1000))
    model.fit(*zip(*sets.train, strict=True))
    return model.score(*zip(*sets.held_out, strict=True))


def ours(flags: list[str]) -> float:
    """Train examples/text.py; return the accuracy."""
    with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as folder:
        return text.main([*flags, "--run-dir", f"{folder}/run", "--no-pictures"])["eval_accuracy"]


def main() -> None:
    """Print a row for each run; without BASE then the means over the files."""
    parser = Parser(__doc__, 1)
    parser.add_argument("data", nargs="+")
    parser.add_argument("--base")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--eval-data")
    args = parser.parse_args()
    ways = {"text": ours} | {n: partial(tfidf, n) for n in ("words", "letters", "both")}
    more = ["--eval-data", args.eval_data] if args.eval_data else []
    if args.base:
        ways = {"text": ours, "peer": peer}
        more += ["--base", args.base, "--epochs", str(args.epochs)]
    rows: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for file, number in product(args.data, range(args.rounds)):
        for way, run in ways.items():
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
            start = time.process_time()
            accuracy = run(["--data", file, *more, "--seed", str(number)])
            rows[way].append((accuracy, time.process_time() - start))
        shown = (f"{way} {100 * row[-1][0]:.1f} % {row[-1][1]:.1f} s" for way, row in rows.items())
        print(Path(file).stem, *shown, sep="  ", flush=True)
    means = (f"{n} {100 * sum(a for a, _ in r) / len(r):.1f} %" for n, r in rows.items())
    print("mean", *means, sep="  ", flush=True)


if __name__ == "__main__":
    startup.run(main)
