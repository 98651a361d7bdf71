"""Compare the loop of examples/pictures.py with the bare network on one batch that stays in memory.

    OMP_NUM_THREADS=1 python -m benchmarks.photo_rate FOLDER --pictures 200 --size 160 --rounds 3

Both augment, and take a step of the same optimizer; the loop also reads its pictures, counts and
logs. In each epoch the loop is timed first, from its first batch to its evaluation, then the bare
network for as many steps. Times are CPU time of the process.
"""

import contextlib
import io
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks._runs import Parser, as_text
from benchmarks.photos import lay_pictures
from examples import pictures
from trainkit.pictures import backbones


def main() -> None:
    parser = Parser(__doc__, rounds=3)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pictures", type=int, default=200)
    parser.add_argument("--size", type=int, default=160)
    args = parser.parse_args()
    augment, load_data, ratios = pictures.augment, pictures.load_data, []
    epoch: dict[str, Any] = {}
    metadata: dict[str, Any] = {}

    def load_and_keep(config: Any) -> tuple:
        data = load_data(config)
        metadata.update(data[3])
        return data

    def timed_augment(*batch: Any) -> Any:
        epoch.setdefault("start", time.process_time())
        epoch.setdefault("steps", 0)
        epoch["steps"] += len(batch[0]) == 32
        epoch.setdefault("batch", batch)
        return augment(*batch)

    def compare(*_: Any) -> tuple:
        loop = time.process_time() - epoch["start"]
        bare = backbones.load_weights(None, None, False)[0].to(memory_format=torch.channels_last)
        bare.reset_classifier(len(metadata["classes"]))
        pictures.train_but_norms(bare)
        optimizer = torch.optim.AdamW(bare.parameters(), 1e-5, fused=True)
        start = time.process_time()
        for _ in range(epoch["steps"]):
            images, indices = augment(*epoch["batch"]), epoch["batch"][1]
            labels = indices % len(metadata["classes"])
            F.cross_entropy(bare(pictures.standardise(images, metadata)), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        ratios.append((time.process_time() - start) / loop)
        epoch.clear()
        return ({"eval_loss": 0.0, "eval_accuracy": 0.0},)

    pictures.load_data, pictures.augment = load_and_keep, timed_augment
    pictures.measure = compare
    pictures.write_timm_folder = lambda *_: None  # there are no predictions
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        lay_pictures(args.folder, Path(folder, "data"), args.pictures)
        flags = f"--dataset {folder}/data --size {args.size} --epochs {args.rounds + 1} --drop-last"
        flags += f" --no-pictures --run-dir {folder}/run"
        pictures.main(flags.split())
    rates = ratios[1:]
    print(f"the loop has {as_text(statistics.median(rates))} of the bare rate: {rates}")


if __name__ == "__main__":
    main()
