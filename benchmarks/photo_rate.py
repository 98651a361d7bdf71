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
    make_input, ratios = pictures.make_input, []
    held: dict[str, Any] = {}

    def timed_input(*given: Any) -> Any:
        held.setdefault("start", time.process_time())
        held.setdefault("steps", 0)
        held["steps"] += len(given[0][0]) == 32
        held.setdefault("given", given)
        return make_input(*given)

    def compare(run: Any, model: Any, loader: Any, held_out: Any, about: dict) -> tuple:
        loop, given = time.process_time() - held["start"], held["given"]
        bare = backbones.load_network(None, None, False)[0].to(memory_format=torch.channels_last)
        bare.reset_classifier(len(about["classes"]))
        backbones.train_but_norms(bare)
        optimizer = torch.optim.AdamW(bare.parameters(), 1e-5, fused=True)
        start = time.process_time()
        for _ in range(held["steps"]):
            images, targets = make_input(*given)
            F.cross_entropy(bare(pictures.normalise(images, about)), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        ratios.append((time.process_time() - start) / loop)
        held.clear()
        return ({"eval_loss": 0.0, "eval_accuracy": 0.0, "eval_samples": len(held_out)},)

    pictures.make_input, pictures.validate = timed_input, compare
    backbones.write_results = lambda *_: None  # there are no predictions
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        lay_pictures(args.folder, Path(folder, "data"), args.pictures)
        flags = f"--dataset {folder}/data --size {args.size} --epochs {args.rounds + 1} --drop-last"
        flags += f" --no-pictures --run-dir {folder}/run"
        pictures.main(flags.split())
    rates = ratios[1:]
    print(f"the loop has {as_text(statistics.median(rates))} of the bare rate: {rates}")


if __name__ == "__main__":
    main()
