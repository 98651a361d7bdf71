"""What one GPU gives: the scripts beside bare PyTorch loops on it, and beside peers.

    python -m benchmarks.gpu --out gpu.md
    python -m benchmarks.gpu --rows gpt pictures --limit 120
    python -m benchmarks.gpu --rows pictures --profile (and where the time of a step of ours goes)
    python -m benchmarks.gpu --pytorch CLONE           (of pytorch/examples, for `process`)
    python -m benchmarks.gpu --tiny                    the same on a CPU, with models of no use

Each row is measured in a process of its own and is printed, and appended to --out, as soon as it is
there; the most valuable come first, and those for which --limit leaves no time are named. Ours and
bare take turns. A bare loop has the same model, loss, optimizer and precision, compiles the same as
1gpu_bf16_compile.yaml does, and its data are on the card: no loader, no checks, no log. Rates are
from one optimizer step to another, with the card awaited at both ends. `host` is the time of the
main thread on a core in a step. Launches are operations that would launch a kernel, counted by a
dispatch mode, views left out. TRL's trainers (pip install trl) train the same model on the same
data for an epoch, with batches of as many rows, in bf16 and without gradient checkpointing; the
peak memory is that up to the last step.
"""

import argparse
import contextlib
import copy
import gc
import importlib
import importlib.util
import inspect
import io
import multiprocessing
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

from trainkit import startup

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState
from accelerate.utils import compile_regions
from PIL import Image
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.serialization import config as serialization

import train_mnist
from benchmarks._launches import Launches
from benchmarks._runs import MNIST, Parser, as_text, in_process, in_turn, one_run, spread
from benchmarks.checkpoint_cost import make_checkpoints
from benchmarks.finetune import LONGEST, make_base, make_chats, peer
from benchmarks.preference import make_pairs as dpo_pairs
from benchmarks.preference import peer as dpo_peer
from examples import finetune as tuning
from examples import gpt, pictures, preference
from trainkit.config import parse
from trainkit.pictures import backbones
from trainkit.run.profile import Profile

HEAD = "row | ours | bare or peer | ours / theirs | asked | more"
WARM_UP = 3  # optimizer steps


class Size(NamedTuple):
    """How large the measurements are: of a card, or tiny ones."""

    rounds: int = 3
    steps: int = 60
    layers: int = 12
    width: int = 768
    vocabulary: int = 50_304
    tokens: int = 1024
    sequences: int = 8
    pixels: int = 224
    photos: int = 32  # in a batch
    parameters: float = 1e9
    backend: str = "inductor"
    profiled: int = 0  # steps of ours in one run more

    @property
    def is_tiny(self) -> bool:
        return self.layers == 1


TINY = Size(1, 5, 1, 32, 64, 16, 2, 32, 4, 1e4, "eager")


class Rate(NamedTuple):
    """Of a loop: steps a second, host microseconds a step, bytes at most, seconds to a step."""

    steps: float
    host: float
    memory: int
    first: float
    num_steps: int


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(train: Callable[[], tuple[float, float, int]]) -> Rate:
    """Run a loop; take its time from the third optimizer step to its last."""
    marks: list[tuple[float, float]] = []
    gc.collect()  # what a trainer leaves refers to itself, its weights too
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def mark(*_: Any) -> None:
        if len(marks) in (0, WARM_UP - 1):
            wait()  # for what the first steps left on the card
        marks.append((time.perf_counter(), time.thread_time()))

    hook = register_optimizer_step_post_hook(mark)
    started_at = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            stop, core_stop, memory = train()
        finally:
            hook.remove()
    start, core = marks[WARM_UP - 1]
    num = len(marks) - WARM_UP
    host = 1e6 * (core_stop - core) / num
    return Rate(num / (stop - start), host, memory, marks[0][0] - started_at, len(marks))


def ended() -> tuple[float, float, int]:
    """Wait for the card; return the time, that of this thread on a core, and the memory so far."""
    wait()
    return time.perf_counter(), time.thread_time(), peak_memory(device())


def ours(script: ModuleType, *flags: object, dynamo: str = "no", precision: str = "bf16") -> Any:
    """Run a script; return when its last step was over on the card.

    The checkpoint of the epoch is saved after that, and the evaluation follows.
    """
    over = []
    steps = script.Run._steps_to_evaluation

    def timed(self: Any, *args: Any) -> Any:
        yield from steps(self, *args)
        over.append(ended())

    env = {"ACCELERATE_DYNAMO_BACKEND": dynamo, "ACCELERATE_DYNAMO_MODE": mode_of(dynamo)}
    env["ACCELERATE_DYNAMO_USE_DYNAMIC"] = "False"
    env["ACCELERATE_DYNAMO_USE_FULLGRAPH"] = "True"
    env["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "True"
    patched = mock.patch.object(script.Run, "_steps_to_evaluation", timed)
    with mock.patch.dict(os.environ, env), patched:
        in_process(script, *flags, "--epochs", 1, precision=precision)
    return over[-1]


def peak_memory(device: torch.device) -> int:
    """The most bytes of tensors on this device so far; on the CPU, of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def where_time_goes(train: Callable[..., Any], num_steps: int) -> str:
    """Run ours once more with --profile; return its first line and its sums."""
    said = []

    def described(*args: Any) -> str:
        said.append(describe(*args))
        return said[-1]

    describe = Profile.describe
    patched = mock.patch.object(Profile, "describe", described)
    with patched, contextlib.redirect_stdout(io.StringIO()):
        train("--profile", num_steps)
    lines = [line for text in said for line in text.splitlines()]
    lines = [line for line in lines if line.startswith(("profile", "Self "))]
    return "; " + ", ".join(" ".join(line.split()) for line in lines or ["no profile"])


def loop(step: Callable[[int], None], num_steps: int) -> tuple[float, float, int]:
    """Run the steps of a bare loop; return when they were over on the card."""
    for number in range(num_steps):
        step(number)
    return ended()


def autocast() -> torch.autocast:
    return torch.autocast(device().type, torch.bfloat16)


def drawn(seed: int, epoch: int, indices: torch.Tensor, num: int) -> torch.Tensor:
    """What a bare loop has in place of keyed_uniform(...)."""
    return torch.rand(len(indices), num, device=indices.device)


def compiled(part: Any, dynamo: str) -> Any:
    """A model, or a function of tensors, compiled as `ours` is."""
    if dynamo == "no":
        return part
    how = {"backend": dynamo, "mode": mode_of(dynamo), "dynamic": False, "fullgraph": True}
    if isinstance(part, torch.nn.Module):
        return compile_regions(part, **how)
    return torch.compile(part, **how)


def mode_of(dynamo: str) -> str:
    """CUDA graphs on a card."""
    on_card = torch.cuda.is_available() and dynamo == "inductor"
    return "reduce-overhead" if on_card else "default"


def start_step(dynamo: str) -> None:
    """Let CUDA graphs use the memory of the last step again, as `ours` does."""
    if mode_of(dynamo) == "reduce-overhead":
        torch.compiler.cudagraph_mark_step_begin()


def compare(
    name: str, ways: dict[str, Callable[[], Any]], size: Size, num: int, unit: str, asked: str
) -> tuple:
    """Return a row about two loops. num: of units in a step."""
    rates = in_turn({way: partial(measure, call) for way, call in ways.items()}, size.rounds)
    mine, theirs = rates.values()
    ratio = statistics.median(a.steps / b.steps for a, b in zip(mine, theirs, strict=True))
    hosts, memories = (
        [statistics.median(r[k] for r in way) for way in (mine, theirs)] for k in (1, 2)
    )
    more = (
        f"host {hosts[0]:.0f} and {hosts[1]:.0f} us a step; peak memory {memories[0] / 2**20:,.0f} "
        f"and {memories[1] / 2**20:,.0f} MiB; to the first step {mine[0].first:.1f} and "
        f"{theirs[0].first:.1f} s"
    )
    if "compiled" not in name:
        launches = [f"{Launches(way).each_step:.0f}" for way in ways.values()]
        more = f"{' and '.join(launches)} launches a step; {more}"
    if size.profiled:
        more += where_time_goes(ways["ours"], size.profiled)
    texts = (f"{spread([num * r.steps for r in way])} {unit}/s" for way in (mine, theirs))
    return name, *texts, f"{ratio:.2f}", asked, more


def digits(size: Size, shared: Path) -> list[str]:
    """The flags of few digits, in --tiny: else all are decoded where there is no cache of them."""
    if not size.is_tiny:
        return []
    folder = shared / "digits"
    folder.mkdir(exist_ok=True)
    for path in Path(train_mnist.__file__).parent.glob("data/mnist/*.parquet"):
        pyarrow.parquet.write_table(pyarrow.parquet.read_table(path)[:4500], folder / path.name)
    return ["--dataset", str(folder), "--log-every", "9"]  # as often as with all of them


def compact(size: Size, shared: Path, dynamo: str = "no") -> tuple:
    """A step of train_mnist.py."""
    num_steps = 5 * size.steps  # they are short
    config = parse(train_mnist.Config, [])
    config.max_shift, config.max_turn = 1.0, 5.0
    model = train_mnist.Compact(10).to(device(), memory_format=torch.channels_last)
    model = compiled(model, dynamo)
    move_pixels = compiled(inspect.unwrap(train_mnist.move_pixels), dynamo)

    def bare() -> tuple[float, float, int]:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0, fused=True)
        rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, num_steps + 1)
        pictures = torch.randint(0, 256, (num_steps, 128, 1, 28, 28), dtype=torch.uint8)
        labels, pictures = (
            torch.randint(0, 10, (num_steps, 128)).to(device()),
            pictures.to(device()),
        )
        indices = torch.arange(num_steps * 128, device=device()).view(-1, 128)

        def step(n: int) -> None:
            start_step(dynamo)
            with (
                mock.patch.object(train_mnist, "keyed_uniform", drawn),
                mock.patch.object(train_mnist, "move_pixels", move_pixels),
            ):
                images = train_mnist.augment(pictures[n], indices[n], 0, config)
            with autocast():
                logits = model(train_mnist.normalise(images))
            F.cross_entropy(logits.float(), labels[n], label_smoothing=0.1).backward()
            optimizer.step()
            rates.step()
            optimizer.zero_grad()

        return loop(step, num_steps)

    flags = ["--stop-after-steps", num_steps, "--validation-split", 1000, *digits(size, shared)]
    ways = {"ours": partial(ours, train_mnist, *flags, dynamo=dynamo), "bare": bare}
    name = "compact, batch 128, bf16" + (", compiled" if dynamo != "no" else "")
    asked = "0.9 of bare; host 1.15" if dynamo == "no" else "0.9; 4 times eager"
    return compare(name, ways, size, 128, "pictures", asked)


def gpt_124m(size: Size, dynamo: str = "no") -> tuple:
    """A step of examples/gpt.py, of the sizes of the smallest GPT-2."""
    words = f"--layers {size.layers} --width {size.width} --vocabulary {size.vocabulary}".split()
    model = gpt.GPT(parse(gpt.Config, words), size.vocabulary, size.tokens)
    num_weights = sum(weight.numel() for weight in model.parameters())
    num = size.sequences * size.tokens
    text = np.random.default_rng(0).integers(
        0, size.vocabulary, (size.sequences * size.steps, size.tokens + 1), np.int32
    )

    def bare() -> tuple[float, float, int]:
        net = compiled(model.to(device()), dynamo)
        optimizer = torch.optim.AdamW(net.parameters(), 1e-3, fused=True)
        tokens = torch.from_numpy(text).to(device()).long().view(size.steps, size.sequences, -1)

        def step(n: int) -> None:
            start_step(dynamo)
            with autocast():
                logits = net(tokens[n, :, :-1])
            F.cross_entropy(logits.float().flatten(0, 1), tokens[n, :, 1:].flatten()).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        last = loop(step, size.steps)
        model.to("cpu")
        model.zero_grad()
        return last

    with tempfile.TemporaryDirectory() as folder:
        files = [f"{folder}/{name}.parquet" for name in ("train", "test")]
        for file, rows in zip(files, (text, text[: size.sequences]), strict=True):
            column = pyarrow.FixedSizeListArray.from_arrays(rows.flatten(), rows.shape[1])
            pyarrow.parquet.write_table(pyarrow.table({"tokens": column}), file)
        flags = [*words, "--data", files[0], "--eval-data", files[1]]
        flags += ["--batch-size", size.sequences]
        ways = {"ours": partial(ours, gpt, *flags, dynamo=dynamo), "bare": bare}
        name = f"gpt, {num_weights / 1e6:.0f}M, {size.tokens} tokens, bf16"
        name += ", compiled" if dynamo != "no" else ""
        *row, more = compare(name, ways, size, num, "tokens", "0.97; memory 1.02")
    reached = 6 * num_weights * float(row[1].split()[0].replace(",", "")) / 1e12
    peak = teraflops(64 if size.is_tiny else 8192)
    return *row, f"{more}; {reached:.3g} of {peak:.3g} TFLOP/s of a product"


def teraflops(width: int) -> float:
    """Of a product of two bf16 matrices."""
    a = torch.randn(width, width, device=device(), dtype=torch.bfloat16)
    seconds = []
    for _ in range(8):
        wait()
        start = time.perf_counter()
        a @ a
        wait()
        seconds.append(time.perf_counter() - start)
    return 2 * width**3 / min(seconds) / 1e12


def whole_process(size: Size, clone: Path | None, shared: Path) -> tuple:
    """Seconds of train_mnist.py @examples/recipes/fast, beside mnist/main.py of a clone.

    Both read pictures that are decoded: of ours it is the second start.
    """
    few = ["--stop-after-steps", size.steps] if size.is_tiny else []
    few += digits(size, shared)
    start = partial(one_run, MNIST, "@examples/recipes/fast", "--no-pictures", *few)
    first = start()
    mine = first if size.is_tiny else start()
    parts = [
        f"{what} after {next(at for at, line in mine.lines if line.startswith(begins)):.1f} s"
        for what, begins in (("plan", "device"), ("metrics", "epoch"), ("end", "done"))
    ]
    parts += [f"training {mine.train_seconds:.2f} s", f"the first start {first.seconds:.1f} s"]
    accuracy = mine.metrics[-1]["eval_accuracy"]
    theirs, ratio = "no --pytorch CLONE", "-"
    if clone:
        with tempfile.TemporaryDirectory() as folder:
            files = subprocess.check_output(["git", "-C", clone, "archive", "HEAD", "mnist"])
            subprocess.run(["tar", "x", "-C", folder], input=files, check=True)
            from benchmarks.peers import lay_data

            lay_data(Path(folder), None)
            start = time.perf_counter()
            words = [sys.executable, "main.py", "--epochs", "4"]
            subprocess.run(words, cwd=Path(folder, "mnist"), check=True, capture_output=True)
            seconds = time.perf_counter() - start
        theirs, ratio = f"{seconds:.1f} s, 4 epochs", f"{seconds / mine.seconds:.1f} times"
    cells = f"{mine.seconds:.1f} s, {100 * accuracy:.2f} %", theirs, ratio, "20 times"
    return "whole process to 99.0 %", *cells, ", ".join(parts)


def beside_trl(
    name: str,
    size: Size,
    mine: tuple[Callable[[], Any], int],
    theirs: Callable[[], int],
    unit: str,
    asked: str,
) -> tuple:
    """Return a row about a script and a trainer of TRL, each for an epoch.

    mine: trains, and how many units are in the epoch. theirs: trains, and returns that number.
    """
    nums = {"ours": mine[1]}
    rates: dict[str, list[Rate]] = {"ours": [], "trl": []}
    missing = "" if importlib.util.find_spec("trl") else "no trl"

    def trained() -> tuple[float, float, int]:
        AcceleratorState._reset_state(reset_partial_state=True)  # of ours
        torch.backends.cuda.enable_cudnn_sdp(True)  # as by default
        nums["trl"] = theirs()
        return ended()

    for _ in range(min(size.rounds, 2)):  # loading and saving take longer than the steps
        with (
            mock.patch.object(tuning, "answer", lambda *_: ""),
            mock.patch.object(preference, "answer", lambda *_: ""),
            mock.patch.object(tuning, "write_pretrained"),
            mock.patch.object(preference, "write_pretrained"),
        ):
            rates["ours"].append(measure(mine[0]))
        if not missing:
            try:
                rates["trl"].append(measure(trained))
            except Exception as problem:  # ours is a figure without it
                traceback.print_exc()
                missing = f"trl failed: {type(problem).__name__}"
    speeds, memory, more = {}, {}, []
    for way, num in nums.items():
        speeds[way] = [num / rate.num_steps * rate.steps for rate in rates[way]]
        memory[way] = statistics.median(rate.memory for rate in rates[way])
        steps, first = rates[way][-1].num_steps, rates[way][-1].first
        more.append(
            f"{way}: {num:,} {unit} in {steps} steps, peak memory {memory[way] / 2**20:,.0f} MiB, "
            f"{first:.1f} s to the first step"
        )
    texts = [f"{spread(each)} {unit}/s" for each in speeds.values()]
    if size.profiled:
        with (
            mock.patch.object(tuning, "write_pretrained"),
            mock.patch.object(preference, "write_pretrained"),
        ):
            more[0] += where_time_goes(mine[0], size.profiled)
    if missing:
        return name, texts[0], missing, "-", asked, more[0]
    ratio = statistics.median(a / b for a, b in zip(*speeds.values(), strict=True))
    more.append(f"memory {memory['ours'] / memory['trl']:.2f} of TRL's")
    return name, *texts, f"{ratio:.2f}", asked, "; ".join(more)


def chat_base(size: Size, shared: Path) -> tuple[str, list[str]]:
    """Make a small chat model of 109 million parameters in a folder, unless an earlier row has.

    Return its folder, which also has pairs to compare, and the flags that name it.
    """
    folder, words = f"{shared}/chat", "--layers 12 --width 576 --vocabulary 49152"
    if size.is_tiny:
        words = "--layers 1 --width 64"
    if not Path(folder).exists():
        made = tempfile.mkdtemp(dir=shared)
        make_base(made, *words.split())
        os.rename(made, folder)  # only now: a row may be stopped at any time
    return folder, f"--base {folder}/base --epochs 1".split()


def finetune(size: Size, shared: Path, how: str = "whole") -> tuple:
    """Packed fine-tuning of the small chat model, whole or LoRA, beside TRL's SFTTrainer."""
    name, asked = f"finetune --pack, {how}, bf16", "1.5; memory 0.7"
    more = {"whole": [], "LoRA": ["--lora", "8"], "4 bits": ["--lora", "8", "--load-4bit"]}[how]
    if how == "4 bits":
        asked = "memory 0.8"
        if not importlib.util.find_spec("bitsandbytes"):
            return name, "no bitsandbytes", "-", "-", asked, "-"
    num, longest = (50, LONGEST // 8) if size.is_tiny else (768, LONGEST)
    folder, base = chat_base(size, shared)
    flags = [*base, *make_chats(folder, num, longest), *more]
    mine = [*flags, "--pack", "--batch-size", "2"]
    rows = tuning.load_data(parse(tuning.Config, mine))[0]
    num_learned = sum(int(learned[1:].sum()) for _, learned, *_ in rows)
    theirs = partial(peer, "sft", flags, pack=True, bf16=True)
    train = partial(ours, tuning, *mine)
    return beside_trl(name, size, (train, num_learned), theirs, "learned tokens", asked)


def dpo(size: Size, shared: Path) -> tuple:
    """examples/preference.py with all weights, beside TRL's DPOTrainer."""
    folder, base = chat_base(size, shared)
    flags = [*base, *dpo_pairs(folder, 90 if size.is_tiny else 720)]
    pairs = preference.load_data(parse(preference.Config, flags))[0]
    train = partial(ours, preference, *flags)
    theirs = partial(dpo_peer, flags)
    return beside_trl("DPO, whole, bf16", size, (train, len(pairs)), theirs, "pairs", "1.2")


def photo_steps(size: Size) -> tuple:
    """A step of examples/pictures.py, in the layout that so few pictures get, and its first step.

    Of ours the row says when the first step was over, data and all; of the bare loop, whose data
    are on the card, how long each part of it took with new shapes, and how fast both layouts are.
    """
    num, batch = size.steps * size.photos, size.photos
    names = {torch.channels_last: "channels last", torch.contiguous_format: "contiguous"}
    marks: list[tuple[str, float]] | None = None  # the end of each part of a first step

    def note(part: str) -> None:
        if marks is not None:
            wait()
            marks.append((part, time.perf_counter()))

    def parts_of(train: Callable[[], Any]) -> str:
        nonlocal marks
        marks = []
        train()
        ends, marks = marks, None
        pairs = pairwise(ends)
        parts = [f"{part} {end - start:.2f} s" for (_, start), (part, end) in pairs]
        return ", ".join(parts)

    with tempfile.TemporaryDirectory() as folder:
        generator = np.random.default_rng(0)
        for number in range(num + 32):
            path = Path(folder, "set", "test" if number < 32 else "train", f"{number % 2}")
            path.mkdir(parents=True, exist_ok=True)
            side = size.pixels + 32
            values = generator.integers(0, 256, (side // 8, side // 8, 3), np.uint8)
            Image.fromarray(values).resize((side, side)).save(path / f"{number}.jpg")
        flags = ["--dataset", f"{folder}/set", "--size", str(size.pixels)]
        flags += ["--batch-size", str(size.photos)]
        layout = backbones.choose_layout(device(), num)  # that of ours

        @cache  # not before ours: that it imports timm is a part of its first step
        def network() -> torch.nn.Module:
            loaded = backbones.load_weights(None, None, False)[0]
            loaded.reset_classifier(2)
            return loaded

        def bare(
            layout: torch.memory_format = layout, steps: int = size.steps
        ) -> tuple[float, float, int]:
            model = copy.deepcopy(network()).to(device(), memory_format=layout)
            pictures.train_but_norms(model)
            optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
            config = parse(pictures.Config, flags)
            images = torch.randint(0, 256, (batch, 3, size.pixels, size.pixels), dtype=torch.uint8)
            images, indices = images.to(device()), torch.arange(batch, device=device())
            targets = F.one_hot(indices % 2, 2).float()
            metadata = {"mean": [0.5] * 3, "std": [0.5] * 3, "size": size.pixels}
            note("start")

            def step(_: int) -> None:
                with mock.patch.object(pictures, "keyed_uniform", drawn):
                    seen = pictures.augment(images, indices, 0, config)
                note("augmentation")
                with autocast():
                    logits = model(pictures.standardise(seen, metadata, layout))
                note("forward")
                F.cross_entropy(logits.float(), targets, label_smoothing=0.1).backward()
                note("backward")
                optimizer.step()
                note("optimizer")
                optimizer.zero_grad()

            return loop(step, steps)

        with (
            mock.patch.object(pictures, "write_timm_folder"),
            mock.patch.object(
                pictures, "measure", lambda *_: ({"eval_loss": 0.0, "eval_accuracy": 0.0},)
            ),
        ):
            # The first process of a network builds the plans of its convolutions: so this is first.
            row = compare(
                f"pictures, {size.pixels} pixels, whole, bf16, {names[layout]}",
                {"ours": partial(ours, pictures, *flags), "bare": bare},
                size, batch, "pictures", "0.95; 5 s to the first step",
            )  # fmt: skip
        # New shapes, so that nothing is kept from above: what does the first step wait for?
        firsts = {}
        batch = 3 * size.photos // 4
        for each, name in names.items():
            firsts[name] = parts_of(partial(bare, each, 1))
            rate = batch * measure(partial(bare, each)).steps
            firsts[name] += f", then {rate:,.0f} pictures/s"
        batch = size.photos // 2
        with torch.backends.cudnn.flags(enabled=False):
            firsts["without cuDNN"] = parts_of(partial(bare, steps=1))
    first = "; ".join(f"{name}: {parts}" for name, parts in firsts.items())
    return *row[:-1], f"{row[-1]}; first step of new shapes, {first}"


def save(size: Size) -> tuple:
    """How long the training stands still for a save, beside the copy from the card.

    The files are written into memory, where there is room for them: a disk writes them later.
    """
    width = round((size.parameters / 8) ** 0.5)
    memory = Path("/dev/shm")
    # Weights and two moments, in float32. Containers often have 64 MiB there.
    has_room = memory.is_dir() and shutil.disk_usage(memory).free > 1.1 * 12 * size.parameters
    with tempfile.TemporaryDirectory(dir=memory if has_room else None) as folder:
        checkpoints, progress, model, optimizer, _ = make_checkpoints(Path(folder), width, 8)
        tensors = [*model.parameters()]
        tensors += [v for state in optimizer.state.values() for v in state.values() if v.ndim]
        wait()
        start = time.perf_counter()
        copies = [tensor.to("cpu", copy=True) for tensor in tensors]
        copied = time.perf_counter()
        del copies

        def seconds(step: int) -> float:
            progress.step = step
            begun = time.perf_counter()
            checkpoints.save(progress)
            blocked = time.perf_counter() - begun
            checkpoints.commits.wait()
            return blocked

        mine, theirs = seconds(1), copied - start
        with serialization.patch({"save.use_pinned_memory_for_d2h": True}):
            pinned = seconds(2)
        checkpoints.commits.close()
    place = "memory" if has_room else "a folder on a disk"
    return (
        f"save of {as_text(8 * width**2)} parameters",
        f"{as_text(mine)} s",
        f"{as_text(theirs)} s",
        f"{mine / theirs:.2f}",
        "1.2",
        f"less is better; into {place}; {as_text(pinned)} s with pinned memory",
    )


def measure_row(
    name: str, size: Size, clone: Path | None, out: Path | None, head: str, shared: Path
) -> None:
    """Measure a row; print it, and append it to the file. A failure is a row too."""
    rows: dict[str, Callable[[], tuple]] = {
        "compact": partial(compact, size, shared),
        "compiled": partial(compact, size, shared, size.backend),
        "process": partial(whole_process, size, clone, shared),
        "gpt": partial(gpt_124m, size),
        "gpt_compiled": partial(gpt_124m, size, size.backend),
        "pictures": partial(photo_steps, size),
        "save": partial(save, size),
        "finetune": partial(finetune, size, shared),
        "lora": partial(finetune, size, shared, "LoRA"),
        "dpo": partial(dpo, size, shared),
        "four_bits": partial(finetune, size, shared, "4 bits"),
    }
    try:
        cells = rows[name]()
    except Exception as problem:  # the rows that follow must be measured
        traceback.print_exc()
        cells = (name, "failed", type(problem).__name__, *str(problem).strip().splitlines()[:1])
    write(f"{head}| {' | '.join(cells)} |", out)


def write(line: str, out: Path | None) -> None:
    print(line, flush=True)
    if out:
        with open(out, "a") as file:
            file.write(line + "\n")


ROWS = "compact compiled process gpt gpt_compiled pictures save finetune lora dpo four_bits".split()  # noqa: SIM905
OF_SEVERAL_ROWS = ["timm", "transformers.models.llama.modeling_llama", "peft", "torch._inductor"]


def is_installed(module: str) -> bool:
    return importlib.util.find_spec(module.partition(".")[0]) is not None


def main() -> None:
    parser = Parser(__doc__, rounds=3)
    parser.add_argument("--tiny", action="store_true", help="on a CPU: only whether it runs")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--limit", type=float, default=240, help="seconds for all rows")
    parser.add_argument("--out", type=Path, help="file to which each row is appended")
    parser.add_argument("--profile", action="store_true", help="of ours, in one run more")
    parser.add_argument("--pytorch", type=Path, metavar="CLONE")
    args = parser.parse_args()
    size = TINY if args.tiny else Size(rounds=args.rounds)
    if args.profile:
        size = size._replace(profiled=15)
    with tempfile.TemporaryDirectory() as shared:
        measure_rows(args, size, Path(shared))


def measure_rows(args: argparse.Namespace, size: Size, shared: Path) -> None:
    """Measure each row in a process, as long as there is time. shared: a folder of all rows."""
    start = time.monotonic()
    if size.is_tiny and args.rows == ROWS:
        # Once instead of in each process: 54 s of CPU for 60. Beside a card it is not done: an
        # import that asks for the card would keep it from the processes that are forked.
        for module in filter(is_installed, OF_SEVERAL_ROWS):
            importlib.import_module(module)
    head = f"| {HEAD} |\n|{' --- |' * (HEAD.count('|') + 1)}\n"
    for name in args.rows:
        left = args.limit - (time.monotonic() - start)
        if left < 5:
            write(f"| {name} | not measured: --limit {args.limit:g} was over |", args.out)
            continue
        # Forked before anything asks for a card, which a forked process could then not use.
        values = name, size, args.pytorch, args.out, head, shared
        process = multiprocessing.get_context("fork").Process(target=measure_row, args=values)
        process.start()
        process.join(left)
        if process.is_alive() or process.exitcode:
            process.kill()
            why = f"stopped after {left:.0f} s" if process.exitcode is None else "its process died"
            write(f"{head}| {name} | not measured: {why} |", args.out)
        head = ""


if __name__ == "__main__":
    startup.run(main)  # with the settings of a run, for the other loops as well
