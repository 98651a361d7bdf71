"""rehearse names what a script of anyone breaks, and says nothing of what is right."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, refused

from trainkit.errors import ADVICE, UsageError
from trainkit.store.rehearsals import mark_of_rehearsal
from trainkit.tools.rehearse import __main__ as command
from trainkit.tools.rehearse import causes, pages
from trainkit.tools.rehearse.worlds import Outcome, World, why, why_not

slow = pytest.mark.slow
ROWS = {
    page: re.findall(r"^\| ([^|]+) \|", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    for page in ("loop.md", "resume.md")
}

# The examples in their quick form, as in test_worlds.py.
SMALL = "--batch-size 18 --eval-batch-size 27"
TABLE = f"--data {{table}}/t.csv {SMALL} --learning-rate 0.02 --features a,b,c --target"
PHOTOS = f"examples/pictures.py --dataset {{photos}}/data {SMALL} --size 32"
EXAMPLES = {
    "deep": "train_mnist.py --dataset {tiny} --model deep --batch-size 36",
    "tabm": f"examples/table.py {TABLE} y",
    "classes": f"examples/table.py {TABLE} kind",
    "text": f"examples/text.py {SMALL} --num-lines 109",
    "gan": f"examples/gan.py {SMALL} --dataset {{tiny}}",
    "two_towers": f"examples/two_towers.py {SMALL} --dataset {{tiny}}",
    "pictures": f"{PHOTOS} --base {{photos}}/base --balance",
    "frozen": f"{PHOTOS} --base {{photos}}/base --freeze",
    "gpt": "examples/gpt.py --num-bytes 16000 --batch-size 24 --layers 1 --width 32 --ema 0.9",
}

# A loop as people have it, with one thing that breaks a promise.
SCRIPT = """
import copy, os, sys, time
from dataclasses import dataclass
from pathlib import Path
from trainkit import InMemory, Run, make_loaders, make_optimizer, make_scheduler, startup
import numpy as np
import torch, torch.nn.functional as F
from torch import nn
from trainkit.config import TrainingConfig, parse

OWN = np.random.default_rng()

@dataclass
class Config(TrainingConfig):
    kind: str = ""
    run_dir: Path = Path("runs/mine")
    batch_size: int = 8

class Counting(torch.utils.data.Dataset):
    calls = 0
    def __init__(self, x): self.x = x
    def __len__(self): return len(self.x)
    def __getitem__(self, index):
        self.calls += 1
        return self.x[index] * (1 + self.calls), index

class Filled(Counting):
    def __getitem__(self, index): return self.x[index], index

class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 1)
        norm = nn.BatchNorm1d(8)
        middle = {"dropout": nn.Dropout(0.5), "batchnorm": norm}
        self.middle = middle.get(kind, nn.Tanh())
        self.kind = kind
        if kind == "unused": self.other = nn.Linear(2, 2)
        self.calls = 0
        self.register_buffer("centre", torch.zeros(8))
    def forward(self, x):
        h = self.body(x)
        if self.kind == "calls":
            self.calls += 1
            h = h * (1 + 0.1 * self.calls)
        if self.kind == "buffer":
            if self.training:
                self.centre.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
            h = h - self.centre
        return self.head(self.middle(h))[:, 0]

def load_data(config):
    x = torch.randn(77, 4, generator=torch.Generator().manual_seed(0))
    if config.kind == "counter":
        return Counting(x[:61]), InMemory(x[61:])
    if config.kind == "filled":
        return Filled(x[:61]), InMemory(x[61:])
    if config.kind == "same samples":
        return InMemory(x[:61]), InMemory(x[40:61])
    if config.kind == "divided set":
        num = 60 // int(os.environ.get("WORLD_SIZE", 1))
        return InMemory(x[:num]), InMemory(x[61:])
    if config.kind == "collate":
        return Filled(x[:61]), Filled(x[61:])
    return InMemory(x[:61]), InMemory(x[61:])

def main(argv=None):
    config = parse(Config, argv)
    kind = config.kind
    with Run(config, "mine") as run:
        accelerator = run.accelerator
        train_set, eval_set = run.load(load_data)
        def collate(samples):
            x, index = torch.utils.data.default_collate(samples)
            return x + torch.randn(x.shape), index
        collate = collate if kind == "collate" else None
        loaders = make_loaders(accelerator, train_set, eval_set, config, collate)
        model = Net(kind)
        optimizer = make_optimizer(accelerator, model.parameters(), config)
        scheduler = make_scheduler(optimizer, config, run.steps_per_epoch)
        teacher, bare = copy.deepcopy(model).requires_grad_(False), model
        average = torch.optim.swa_utils.AveragedModel(model)
        model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
            model, optimizer, *loaders, scheduler)
        run.begin(model, {})
        tau, seen, began = 1.0, [], time.time()
        price, hidden, cache, made = 1.0, None, torch.zeros(61), 0.0
        for epoch in run.epochs():
            if kind == "mined": made = float(next(bare.parameters()).abs().sum())
            for n, (x, index) in enumerate(run.steps(train_loader)):
                with accelerator.accumulate(model):
                    target = x.sum(1)
                    if kind == "teacher":
                        target = teacher(x) + 0.1
                    if kind == "own":
                        target = target + float(OWN.normal())
                    if kind == "numpy":
                        target = target + torch.from_numpy(np.random.normal(size=len(x)))
                    if kind == "gather":
                        target = target - run.gather(target)[0].mean()
                    if kind == "counted": target = target * (1 + n % 3)
                    if kind == "hidden" and hidden is not None: target = target * (1 + hidden[0])
                    if kind == "cache": target = target + cache.sum()
                    if kind == "mined": target = target + made
                    output = model(x)
                    losses = (output - target) ** 2
                    if kind == "broadcast": losses = ((output[:, None] - target) ** 2).mean(1)
                    loss = run.step_mean(losses * tau)
                    if kind in ("price", "pads"): loss = loss + price * run.step_mean(output**2)
                    if kind == "price": price += 0.3 * float(output.detach().mean())
                    if kind == "pads": price += 0.3 * float(accelerator.gather(output).mean())
                    if kind == "hidden": hidden = output.detach().mean(), None
                    if kind == "cache": cache[index] = output.detach()
                    if kind == "divided": loss = loss / config.accumulate
                    if kind == "term": loss = loss + output.mean() ** 2
                    if kind == "past":
                        loss.backward()
                    else:
                        accelerator.backward(loss)
                    if kind == "clips": nn.utils.clip_grad_norm_(bare.parameters(), 0.1)
                    optimizer.step(); scheduler.step(); optimizer.zero_grad()
                if kind == "number": tau = 0.97 * tau
                seen.append(float(losses.detach().mean()))
                run.add(loss=losses)
                if kind == "teacher" and accelerator.sync_gradients:
                    for old, new in zip(teacher.parameters(), bare.parameters()):
                        old.mul_(0.5).add_(new.detach(), alpha=0.5)
                if kind == "average" and epoch >= 2:
                    average.update_parameters(bare)
                if run.end_step(): run.save()
            if kind == "filled": train_set.x = train_set.x + 1
            def losses_of(batch):
                output = model(batch[0])
                if kind == "drop": output = F.dropout(output, 0.5)
                if kind == "by batch": output = output - output.mean()
                return {"loss": (output - batch[0].sum(1)) ** 2}
            metrics = run.evaluate(eval_loader, losses_of)
            if kind == "share":
                part = run.predict(eval_loader, lambda batch: model(batch[0]))
                part = part[accelerator.process_index::accelerator.num_processes]
                metrics["eval_spread"] = float(F.relu(part).mean()) + 1
                metrics["eval_spread"] = float(
                    accelerator.gather(torch.tensor([metrics["eval_spread"]])).max())
            run.end_epoch(metrics)
        run.finish()

if __name__ == "__main__":
    startup.run(main)
"""


@pytest.fixture
def rehearsed(tmp_path, monkeypatch, capsys):
    """Rehearse SCRIPT from another folder; return code and output, and see that nothing is left."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/mine.py").write_text(SCRIPT)

    def call(kind: str, only: str, *options: str, flags: str = "") -> tuple[int, str]:
        words = ["--only", only, *options, "deep/mine.py", *flags.split()]
        code = command.main([*words, "--kind", kind] if kind else words)
        left = [path for path in tmp_path.rglob("*") if "cache" not in path.parts]
        assert [path.name for path in left] == ["deep", "mine.py"]
        assert mark_of_rehearsal(tmp_path / "deep/mine.py").exists() == (code == 0 and not only)
        return code, capsys.readouterr().out

    return call


@pytest.mark.skipif(sys.platform != "linux", reason="starts each process anew")
class TestOnLinux:
    def test_a_right_script_keeps_all_promises(self, rehearsed):
        code, output = rehearsed("batchnorm", "", flags="--schedule linear")
        names = "same again|resumed after step (6|12|18)|2 loader workers|--accumulate 2"
        worlds = re.findall(f"^(?:the )?(?:{names}|2 processes|sharded over 2) ", output, re.M)
        assert code == 0 and len(worlds) == 8, output
        assert output.count("equal ") == 8 and "see docs/" not in output, output
        assert len(re.findall("`seen`.* differs at the end, which changes no", output)) == 3, output
        assert "mine.py: 5 epochs of 4 steps (of 8)" in output
        assert output.count("note: ") == output.count("note: `BatchNorm` is held still") == 1

    @pytest.mark.parametrize(
        "kind, only, sentence, row",
        [
            ("drop", "2 processes", r"step 4: eval_loss .*random.*nn.Dropout", pages.ON_DEVICE),
            *(
                pytest.param(*row, marks=slow)
                for row in (
                    ("divided", "accumulate", r"is divided by --accumulate, .*: leave", ""),
                    ("teacher", "step 6", r"`teacher` is not .*: register", pages.REGISTERED),
                    ("own", "again", r"first differs in step 1: train_loss", pages.ORDER_OF_CHANCE),
                    ("average", "step 18", r"at the end `average` differs", pages.REGISTERED),
                    ("number", "step 6", r"`tau` is not what.*: keep it in run.s", pages.OWN_STATE),
                    ("number", "accum", r"`tau` changes with each micro-batch", pages.FOLLOWS),
                    ("calls", "step 6", r"`bare.calls` is not what it was.*run.s", pages.OWN_STATE),
                    ("calls", "accum", r"`bare.calls` changes with each micro", pages.FOLLOWS),
                    ("counted", "step 6", r"`n` counts the batches", pages.STEP_IN_EPOCH),
                    ("counted", "accum", r"`n` counts the batches", pages.STEP_IN_EPOCH),
                    ("hidden", "step 6", r"`hidden` is not what it was", pages.OWN_STATE),
                    ("hidden", "2 processes", r"`hidden` follows the share", pages.FOLLOWS),
                    ("cache", "2 processes", r"`cache` follows the share", pages.FOLLOWS),
                    ("price", "2 processes", r"`price` follows the share of", pages.FOLLOWS),
                    ("pads", "2 processes", r"accelerator.gather.* in line \d+", pages.FOLLOWS),
                    ("mined", "step 6", r"`made` is not .*`if run.starts_epoch:", pages.AT_START),
                    ("by batch", "accum", r"--eval-batch-size 8 changes", pages.OWN_MEAN),
                    ("divided set", "2 proc", r"30 and 16 samples to train", pages.NO_INDEX),
                    ("counter", "workers", r"`\[0\]` of a sample is", pages.ORDER_OF_CHANCE),
                    ("collate", "accumul", r"`\[0\]` .* others of its", pages.DRAWN_FOR_BATCH),
                    ("filled", "workers", r"samples are no longer", pages.CHANGED_SET),
                    ("numpy", "accumulate", r"the loop draws from `numpy`", pages.ON_DEVICE),
                    ("buffer", "2 processes", r"the buffer `centre` changes", pages.FOLLOWS),
                    ("share", "2 processes", r"step 4: eval_spread ", pages.OWN_MEAN),
                    ("term", "accumulate", r"a term that .* did not make", pages.SEVERAL),
                    ("past", "accumulate", r"past accelerator.backward", ""),
                    ("clips", "accumulate", r"before the last micro-batch", pages.GRADIENTS),
                    ("broadcast", "2 processes", r"\(n, n\) in line \d+ of mine.py: give", ""),
                    (
                        "unused",
                        "2 processes",
                        r"note: `other.weight`, .* got no gradient",
                        pages.NO_GRADIENT,
                    ),
                )
            ),
        ],
    )
    def test_what_breaks_a_promise_is_named_with_its_cure(
        self, rehearsed, kind, only, sentence, row
    ):
        code, output = rehearsed(kind, only)
        assert code == 1 and re.search(sentence, output), output
        named = re.findall(r"see docs/(?:loop|resume).md: (.*)", output)
        assert named == ([row] if row else []), output

    @slow
    def test_samples_of_both_sets_are_a_note(self, rehearsed):
        code, output = rehearsed("same samples", "again")
        assert code == 0 and "% of the evaluation set is in the training set too" in output, output

    @slow
    def test_what_begins_late_is_not_missed_by_an_early_resume(self, rehearsed):
        code, output = rehearsed("average", "step 6")
        assert code == 0 and "equal bytes" in output, output

    @slow
    def test_dropout_in_training_is_no_failure(self, rehearsed):
        code, output = rehearsed("dropout", "2 processes")
        assert code == 0 and "note: `dropout` is held still" in output, output

    @slow
    def test_a_refusal_is_its_own_sentence(self, rehearsed):
        code, output = rehearsed("gather", "accumulate")
        words = "refused: .*compares the samples of a whole batch"
        assert code == 0 and re.search(words, output), output
        assert pages.SAMPLES_COMPARED in output

    @slow
    def test_a_script_without_flags_or_main_is_rehearsed(self, tmp_path, monkeypatch, capsys):
        body = SCRIPT.partition("def main(argv=None):\n    config = parse(Config, argv)\n")
        loop = body[2].partition("\nif __name__")[0]
        text = body[0] + "word, = sys.argv[1:]\nif __name__ == '__main__':\n    config = Config()\n"
        text += loop
        (tmp_path / "bare.py").write_text(text)
        monkeypatch.chdir(tmp_path)
        assert command.main(["--only", "step 12", "bare.py", "word"]) == 0
        assert capsys.readouterr().out.count("equal bytes") == 1
        assert [path.name for path in tmp_path.iterdir()] == ["bare.py"]

    @slow  # as those below; test_shards.py resumes this script to equal bytes
    def test_scripts_of_the_project_keep_the_promises(self, capsys):
        flags = "train_regression.py --num-samples 75 --schedule constant --warmup 0 --decay 0.3"
        code = command.main(["--only", "resumed", *flags.split()])
        assert code == 0, capsys.readouterr().out

    @slow
    @pytest.mark.parametrize("name", [*EXAMPLES])
    def test_examples_keep_the_promises(self, name, tiny_mnist, request, capsys):
        flags = EXAMPLES[name]
        for fixture in {*re.findall(r"{(\w+)}", flags)} - {"tiny"}:
            flags = flags.replace(f"{{{fixture}}}", str(request.getfixturevalue(fixture)))
        code = command.main(flags.replace("{tiny}", str(tiny_mnist)).split())
        output = capsys.readouterr().out
        assert code == 0 and output.count("equal ") >= 6, output


def test_the_rows_that_are_named_are_in_the_docs():
    for name, row in vars(pages).items():
        is_sentence = isinstance(row, str) and re.search(r"\{}|\{:|: |, not ", row)
        if name.isupper() and isinstance(row, str) and not is_sentence:
            page = "resume.md" if row in pages.RESUMED else "loop.md"
            assert any(found.startswith(row) for found in ROWS[page]), (page, row)


def outcome(folder: Path, rows: list[dict], **world: object) -> Outcome:
    import torch
    from safetensors.torch import save_file

    (folder / "run").mkdir(parents=True)
    (folder / "run/run.json").touch()
    (folder / "run/metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    save_file({"weight": torch.ones(2)}, folder / "run/model.safetensors")
    return Outcome(World(folder.name, **world), folder)


def judged(first: Outcome, other: Outcome) -> causes.Verdict:
    return causes.judge(first, first, other)


def share(factor: float = 1.0, rest: float = 0.0, is_one_number: bool = False) -> dict:
    """What is noted of a micro-batch."""
    noted = {"factors": [factor], "rests": [rest], "size": 1.0}
    return {"1": [noted | {"is_one_number": is_one_number}]}


RESUME = {"resumed_after": 1, "is_exact": True}
HALVES, TWO = {"settings": {"accumulate": 2}}, {"num_processes": 2}


@pytest.mark.parametrize(
    "world, facts, column, sentence, row",
    [
        (RESUME, {}, "train_loss", "resume `net` is not", pages.REGISTERED),
        (RESUME, {"held": 0}, "train_loss", "step 2: train", pages.OWN_STATE),
        (RESUME, {}, "learning_rate", "step 2: learn", pages.OWN_SCHEDULE),
        (RESUME, {"changed": True}, "train_loss", "no longer", pages.CHANGED_SET),
        (RESUME, {"drawn": ["[0]"]}, "train_loss", "again", pages.ORDER_OF_CHANCE),
        (HALVES, {"by_batch": ["[0]"]}, "train_loss", "", pages.DRAWN_FOR_BATCH),
        (HALVES, {"buffers": ["c"]}, "train_loss", "`c` changes", pages.FOLLOWS),
        (HALVES, {"losses": share(0.5)}, "train_loss", "divided by --accumulate", ""),
        (TWO, {"losses": share(0.5)}, "train_loss", "by 1 and here by 0.5", pages.SEVERAL),
        (TWO, {"losses": share(1, 0.1)}, "train_loss", "a term that", pages.SEVERAL),
        (TWO, {"losses": share(1, 0, True)}, "train_loss", "one number", pages.SAMPLES_COMPARED),
        (TWO, {"passes_backward_by": True}, "train_loss", "past accelerator.backward", ""),
        (TWO, {"draws": ["numpy"]}, "train_loss", "from `numpy`", pages.ON_DEVICE),
        (HALVES, {"changes_early": True}, "eval_f1", "as clipping", pages.GRADIENTS),
        (TWO, {"draws": ["numpy"]}, "eval_f1", "run.evaluate", pages.OWN_MEAN),
        (TWO, {"draws_in_evaluation": True}, "eval_f1", "nn.Dropout", pages.ON_DEVICE),
        (TWO, {"broadcast": "line 3"}, "train_loss", "(n, n) in line 3", ""),
        (TWO, {}, "train_loss", "step 2", pages.SAMPLES_COMPARED),
    ],
)
def test_a_difference_has_its_cause_and_row(tmp_path, world, facts, column, sentence, row):
    one, other = (
        outcome(tmp_path / name, [{"step": 1, column: 1.0}, {"step": 2, column: value}], **extra)
        for name, value, extra in (("a", 2.0, {}), ("b", 3.0, world))
    )
    facts = {"held": 1} | facts
    is_one = facts.get("losses", {"1": [{"is_one_number": False}]})["1"][0]["is_one_number"]
    (other.folder / "facts.json").write_text(json.dumps(facts))
    facts_of_first = facts | {"losses": share(is_one_number=is_one)} if "losses" in facts else facts
    (one.folder / "facts.json").write_text(json.dumps(facts_of_first))
    if facts["held"]:
        for folder, name, value in (one.folder, "held-1", "1"), (other.folder, "held-resumed", "2"):
            held = {"net": {"kind": "state", "parts": {"": value}}}
            (folder / f"{name}.json").write_text(json.dumps(held))
    verdict = judged(one, other)
    assert not verdict.is_kept and sentence in verdict.text and verdict.row == row


@pytest.mark.parametrize(
    "world, column, start, whole, other, sentence, row",
    [
        (RESUME, "loss", {}, {"n": 2}, {"n": 0}, "`n` counts the batches", pages.STEP_IN_EPOCH),
        (HALVES, "loss", {}, {"n": 2}, {"n": 4}, "`n` counts the batches", pages.STEP_IN_EPOCH),
        (RESUME, "loss", {"a": 1}, {"a": 2}, {"a": 9}, "`if run.starts_epoch:`", pages.AT_START),
        (RESUME, "loss", {"a": 1}, {"a": 2}, {"a": 1}, "keep it in run.state", pages.OWN_STATE),
        (TWO, "loss", {"a": 1}, {"a": 2.0}, {"a": 3.0}, "`a` follows the share", pages.FOLLOWS),
        (TWO, "loss", {"a": 1}, {"a": 2.0}, {"a": 2.00001}, "", pages.SAMPLES_COMPARED),
        (TWO, "loss", {"log": 1}, {"log": 2.0}, {"log": 3.0}, "", pages.SAMPLES_COMPARED),
        (HALVES, "loss", {"m.n": 1}, {"m.n": 2}, {"m.n": 3}, "`m.n` changes", pages.FOLLOWS),
        (HALVES, "eval_a", {}, {}, {}, "--eval-batch-size 4 changes", pages.OWN_MEAN),
    ],
)
def test_what_is_carried_is_named(tmp_path, world, column, start, whole, other, sentence, row):
    first, second = (
        outcome(tmp_path / name, [{"step": 1, column: 1.0}, {"step": 2, column: value}], **extra)
        for name, value, extra in (("a", 2.0, {}), ("b", 3.0, world))
    )
    facts = {"read": ["n", "a"], "num_samples": [8, 8]}
    counts = {"n": 0, "a": 2}

    def note(each: Outcome, name: str, values: dict) -> None:
        held = {key: {"kind": "number", "parts": {"": value}} for key, value in values.items()}
        (each.folder / f"{name}.json").write_text(json.dumps(held))

    for each, values in ((first, whole), (second, other)):
        is_resumed = each is second and world is RESUME
        (each.folder / "facts.json").write_text(json.dumps(facts | {"eval_batch_size": 4}))
        note(each, "held-resumed", values if is_resumed and start else start)
        note(each, "held-1", values)
        for step in (1, 2, 3):
            note(each, f"carried-{step}", counts | {"n": step} if world is RESUME else values)
    note(second, "carried-2", other | {"n": 0})
    if "n" in whole:
        for step in (1, 2, 3):
            note(first, f"carried-{step}", {"n": step})
    verdict = judged(first, second)
    assert sentence in verdict.text and verdict.row == row and not verdict.is_kept


def test_a_world_with_other_samples_is_told_so_first(tmp_path):
    first, other = outcome(tmp_path / "a", []), outcome(tmp_path / "b", [], **TWO)
    for each, num in ((first, 60), (other, 30)):
        (each.folder / "facts.json").write_text(json.dumps({"num_samples": [num, 20]}))
    text, is_kept, row = judged(first, other)
    assert "30 and 20 samples to train and evaluate on, and the first run 60 and 20" in text
    assert not is_kept and row == pages.NO_INDEX


def test_a_refusal_to_resume_what_was_saved_is_a_failure(tmp_path):
    first, other = outcome(tmp_path / "a", []), outcome(tmp_path / "b", [], **RESUME)
    other.problem, other.is_refusal = "it cannot be loaded", True
    assert judged(first, other)[:2] == (f"cannot resume what it has saved: {other.problem}", False)
    other.world = World("b", **TWO)
    assert judged(first, other).is_kept


MIXED = """
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ones = DTensor.from_local(torch.ones(2), dist.init_device_mesh("cpu", (1,)), [Shard(0)])
try:
    torch.ones(2).add_(ones)
except RuntimeError as error:
    Path(path).write_text(str(error))
"""


@pytest.mark.parametrize(
    "error, is_refusal, row",
    [
        ("run.gather(...) compares the samples of a batch", True, pages.SAMPLES_COMPARED),
        pytest.param("mixed", False, pages.TEACHER, marks=slow),
        ("run.state['x'] is 1: ..., as run.mean(values) returns it", False, pages.FOLLOWS),
        (ADVICE["got mixed torch.Tensor and DTensor"], False, pages.TEACHER),
    ],
)
def test_what_ends_a_world_has_its_row(tmp_path, fork_main, error, is_refusal, row):
    if error == "mixed":  # what torch says of a sharded weight beside a whole one
        assert fork_main(MIXED, given={"path": str(tmp_path / "said")}).codes == [0]
        error = (tmp_path / "said").read_text()
    ended = outcome(tmp_path / "b", [])
    raised = (UsageError if is_refusal else RuntimeError)(error)
    with pytest.raises(type(raised)) as caught:
        raise raised
    said = json.dumps(why(caught.value, Path(__file__)))
    (ended.folder / "ended-0.json").write_text(said)
    ended.problem, ended.is_refusal = why_not(ended, [raised.exit_code if is_refusal else 1], 9)
    verdict = judged(ended, ended)
    assert (verdict.is_kept, verdict.row) == (is_refusal, row)


@pytest.mark.parametrize(
    "one, other, is_kept",
    [
        ([1.0, -1e-8], [1.0, 2e-8], True),  # beside the largest value of the column
        ([1.0, 0.5], [1.0, 0.50002], False),
        ([1.0, 0.5, 0.5, 0.5], [1.0, 0.5, 0.5, 0.50002], True),  # training amplifies rounding
        ([1.0, 0.5, 0.5, 0.5], [1.0, 0.5, 0.5, 0.50020], False),
    ],
)
def test_a_value_may_differ_by_a_rounding_of_its_column(tmp_path, one, other, is_kept):
    first, second = (
        outcome(tmp_path / name, [{"step": n + 1, "loss": v} for n, v in enumerate(values)], **TWO)
        for name, values in (("a", one), ("b", other))
    )
    assert judged(first, second).is_kept == is_kept


def test_what_cannot_be_rehearsed_is_refused():
    with refused("nothing.py is not a file"):
        command.main(["nothing.py"])


def test_a_name_that_no_world_has_is_refused(tmp_path):
    first = SimpleNamespace(problem="", folder=tmp_path, noted=lambda name: {})
    stage = SimpleNamespace(run=lambda world: first)
    with refused("--only zzz: no world has this in its name: .*, 2 loader workers"):
        command.rehearse(stage, "zzz")
