"""rehearse names what a script of anyone breaks, and says nothing of what is right."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, refused
from torch import nn

from trainkit.errors import ADVICE
from trainkit.repairs.private_names import hooked
from trainkit.tools import rehearse

slow = pytest.mark.slow
ROWS = {
    page: re.findall(r"^\| ([^|]+) \|", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    for page in ("loop.md", "resume.md")
}

# The examples in their quick form, as in test_worlds.py.
SMALL = "--batch-size 18 --eval-batch-size 27"
TABLE = f"--data {{table}}/t.csv {SMALL} --learning-rate 0.02 --features a,b,c --target"
PHOTOS = f"examples/pictures.py --dataset {{photos}}/data {SMALL} --size 32 --resize 36"
EXAMPLES = {
    "deep": "train_mnist.py --dataset {tiny} --model deep --batch-size 36",
    "tabm": f"examples/table.py {TABLE} y",
    "classes": f"examples/table.py {TABLE} kind",
    "text": f"examples/text.py {SMALL} --num-lines 109",
    "gan": f"examples/gan.py {SMALL} --dataset {{tiny}}",
    "two_towers": f"examples/two_towers.py {SMALL} --dataset {{tiny}}",
    "pictures": f"{PHOTOS} --base {{photos}}/base --mix cutmix --balance",
    "frozen": f"{PHOTOS} --base {{photos}}/base --freeze",
    "gpt": "examples/gpt.py --num-bytes 16000 --batch-size 24 --layers 1 --width 32 --ema 0.9",
}

# A loop as people have it, with one thing that breaks a promise.
SCRIPT = """
import copy, sys, time
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
        middle = {"dropout": nn.Dropout(0.5), "batchnorm": norm, "registered": norm}
        self.middle = middle.get(kind, nn.Tanh())
        self.kind = kind
        self.register_buffer("centre", torch.zeros(8))
    def forward(self, x):
        h = self.body(x)
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
    return InMemory(x[:61]), InMemory(x[61:])

def main(argv=None):
    config = parse(Config, argv)
    kind = config.kind
    with Run(config, "mine") as run:
        accelerator = run.accelerator
        if kind == "hang" and accelerator.num_processes == 2:
            time.sleep(600)
        train_set, eval_set = run.load(load_data)
        loaders = make_loaders(accelerator, train_set, eval_set, config)
        model = Net(kind)
        optimizer = make_optimizer(accelerator, model.parameters(), config)
        scheduler = make_scheduler(optimizer, config, run.steps_per_epoch)
        if kind == "unfreeze":
            groups = [{"params": model.body.parameters(), "lr": 1e-3},
                      {"params": model.head.parameters(), "lr": 1e-2}]
            optimizer = torch.optim.AdamW(groups)
            factors = [lambda step: float(step >= 10), lambda step: 1.0]
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
        teacher, bare = copy.deepcopy(model).requires_grad_(False), model
        if kind == "registered":
            accelerator.register_for_checkpointing(teacher)
        average = torch.optim.swa_utils.AveragedModel(model)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
            model, optimizer, *loaders, scheduler)
        run.begin(model, {})
        for epoch in run.epochs():
            for x, _ in run.steps(train_loader):
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
                    losses = (model(x) - target) ** 2
                    accelerator.backward(run.step_mean(losses))
                    optimizer.step(); scheduler.step(); optimizer.zero_grad()
                run.add(loss=losses)
                if kind == "teacher" and accelerator.sync_gradients:
                    for old, new in zip(teacher.parameters(), bare.parameters()):
                        old.mul_(0.5).add_(new.detach(), alpha=0.5)
                if kind == "registered" and accelerator.sync_gradients:
                    for old, new in zip(teacher.buffers(), bare.buffers()):
                        old.copy_(new)
                if kind == "average" and epoch >= 2:
                    average.update_parameters(bare)
                if run.end_step(): run.save()
            if kind == "filled": train_set.x = train_set.x + 1
            if kind == "evaluation": raise ValueError("one class")
            def losses_of(batch): return {"loss": (model(batch[0]) - batch[0].sum(1)) ** 2}
            metrics = run.evaluate(eval_loader, losses_of)
            if kind == "plateau":
                plateau.step(metrics["eval_loss"])
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
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/mine.py").write_text(SCRIPT)

    def call(kind: str, only: str, *options: str, flags: str = "") -> tuple[int, str]:
        words = ["--only", only, *options, "deep/mine.py", *flags.split()]
        if kind:
            words += ["--kind", kind]
        code = rehearse.main(words)
        assert [path.name for path in tmp_path.rglob("*")] == ["deep", "mine.py"]
        return code, capsys.readouterr().out

    return call


@pytest.mark.skipif(sys.platform != "linux", reason="starts each process anew")
class TestOnLinux:
    def test_a_right_script_keeps_all_promises(self, rehearsed):
        code, output = rehearsed("", "", flags="--schedule linear")
        names = "same again|resumed after step (6|12|18)|2 loader workers|--accumulate 2"
        worlds = re.findall(f"^(?:the )?(?:{names}|2 processes|sharded over 2) ", output, re.M)
        assert code == 0 and len(worlds) == 8, output
        assert output.count("equal ") == 8 and "see docs/" not in output, output
        assert "mine.py: 5 epochs of 4 steps (of 8)" in output

    @slow
    @pytest.mark.parametrize(
        "kind, only, sentence, row",
        [
            ("own", "again", r"first differs in step 1: train_loss", rehearse.ORDER_OF_CHANCE),
            ("teacher", "step 6", r"step 7: .*`teacher` is not what it was", rehearse.REGISTERED),
            ("average", "step 18", r"at the end `average` is not what", rehearse.REGISTERED),
            ("plateau", "step 12", r"at the end `plateau` is not what", rehearse.REGISTERED),
            ("counter", "workers", r"first differs in step ", rehearse.ORDER_OF_CHANCE),
            ("filled", "workers", r"first differs in step ", rehearse.CHANGED_SET),
            ("filled", "step 6", r"first differs in step 7", rehearse.CHANGED_SET),
            ("numpy", "accumulate", r"the loop draws from numpy", rehearse.ON_DEVICE),
            ("buffer", "2 processes", r"the buffer `centre` changes", rehearse.BUFFERS),
            ("share", "2 processes", r"step 4: eval_spread ", rehearse.OWN_MEAN),
        ],
    )
    def test_what_breaks_a_promise_is_named(self, rehearsed, kind, only, sentence, row):
        code, output = rehearsed(kind, only)
        assert code == 1 and re.search(sentence, output), output
        assert re.search(f"see docs/(loop|resume).md: {re.escape(row)}", output), output

    def test_a_teacher_that_is_in_no_checkpoint_is_named(self, rehearsed):
        code, output = rehearsed("teacher", "step 6")
        assert code == 1 and "`teacher` is not what it was" in output, output
        assert f"see docs/resume.md: {rehearse.REGISTERED}" in output

    @slow
    def test_a_part_that_is_unfrozen_by_its_learning_rate_keeps_all_promises(self, rehearsed):
        code, output = rehearsed("unfreeze", "")
        assert code == 0 and output.count("equal ") == 8, output

    @slow
    def test_what_begins_late_is_not_missed_by_an_early_resume(self, rehearsed):
        code, output = rehearsed("average", "step 6")
        assert code == 0 and "equal bytes" in output, output

    @pytest.mark.parametrize(
        "kind, name", [pytest.param("dropout", "dropout", marks=slow), ("batchnorm", "BatchNorm")]
    )
    def test_what_the_docs_say_differs_is_no_failure(self, rehearsed, kind, name):
        code, output = rehearsed(kind, "2 processes")
        assert code == 0 and re.search(f"equal to .*; {name} is held still", output), output

    @slow
    def test_what_is_registered_of_batchnorm_is_tried_where_it_is_not_held_still(self, rehearsed):
        code, output = rehearsed("registered", "2 processes")
        assert code == 1 and re.search("2 processes +equal to .* held still", output), output
        assert re.search(r"not held +fails: .*differs between processes in middle\.run", output)
        assert f"see docs/loop.md: {rehearse.BATCH_NORM}" in output

    @slow
    def test_a_refusal_is_its_own_sentence(self, rehearsed):
        code, output = rehearsed("gather", "accumulate")
        assert code == 0 and re.search(
            "refused: .*compares the samples of a whole batch", output
        ), output
        assert rehearse.SAMPLES_COMPARED in output

    @slow
    def test_a_world_that_hangs_is_ended(self, rehearsed):
        code, output = rehearsed("hang", "2 processes", "--limit", "60")
        place = SCRIPT.splitlines().index("            time.sleep(600)") + 1
        assert code == 1 and "fails: it did not end within 60 s, and was ended" in output, output
        assert f"was in line {place} of mine.py" in output

    def test_a_script_without_flags_or_main_is_rehearsed(self, tmp_path, monkeypatch, capsys):
        """And with several runs, one after the other, in folders that they name themselves."""
        body = SCRIPT.partition("def main(argv=None):\n    config = parse(Config, argv)\n")
        loop = body[2].partition("\nif __name__")[0]
        text = body[0] + "word, = sys.argv[1:]\nif __name__ == '__main__':\n  for n in (1, 2):\n"
        text += "    config = Config(run_dir=Path(f'runs/{n}'), epochs=n)\n" + loop
        (tmp_path / "bare.py").write_text(text)
        monkeypatch.chdir(tmp_path)
        assert rehearse.main(["--only", "step 12", "bare.py", "word"]) == 0
        assert capsys.readouterr().out.count("equal bytes") == 1
        assert [path.name for path in tmp_path.iterdir()] == ["bare.py"]

    @slow  # as those below; test_shards.py resumes this script to equal bytes
    def test_scripts_of_the_project_keep_the_promises(self, capsys):
        flags = "train_regression.py --num-samples 75 --schedule constant --warmup 0 --decay 0.3"
        code = rehearse.main(["--only", "resumed", *flags.split()])
        assert code == 0, capsys.readouterr().out

    def test_an_error_in_an_evaluation_is_said_to_be_one(self, rehearsed):
        with refused(
            r"ValueError: one class \(mine.py, line \d+\), in the evaluation after step 4"
        ):
            rehearsed("evaluation", "again")

    @slow
    @pytest.mark.parametrize("name", [*EXAMPLES])
    def test_examples_keep_the_promises(self, name, tiny_mnist, request, capsys):
        flags = EXAMPLES[name]
        for fixture in {*re.findall(r"{(\w+)}", flags)} - {"tiny"}:
            flags = flags.replace(f"{{{fixture}}}", str(request.getfixturevalue(fixture)))
        code = rehearse.main(flags.replace("{tiny}", str(tiny_mnist)).split())
        output = capsys.readouterr().out
        assert code == 0 and output.count("equal ") >= 6, output


@pytest.mark.parametrize(
    "typed, words",
    [("--epochs 2.5", "invalid int value: '2.5'"), ("--limit 5m", "invalid float value: '5m'")],
)
def test_a_flag_of_a_wrong_type_is_told_as_those_of_a_run_are(typed, words, capsys):
    with pytest.raises(SystemExit):
        rehearse.main([*typed.split(), "mine.py"])
    assert words in capsys.readouterr().err


def test_the_rows_that_are_named_are_in_the_docs():
    named = [value for name, value in vars(rehearse).items() if name.isupper()]
    for row in {row for row in named if isinstance(row, str)}:
        page = "resume.md" if row in rehearse.RESUMED else "loop.md"
        assert any(found.startswith(row) for found in ROWS[page]), (page, row)


def outcome(folder: Path, rows: list[dict]) -> rehearse.Outcome:
    import torch
    from safetensors.torch import save_file

    (folder / "run").mkdir(parents=True)
    (folder / "run/run.json").touch()
    (folder / "run/metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    save_file({"weight": torch.ones(2)}, folder / "run/model.safetensors")
    (folder / "facts.json").write_text('{"buffers": [], "draws": [], "hooked": []}')
    return rehearse.Outcome(rehearse.World(folder.name, num_processes=2), folder)


@pytest.mark.parametrize(
    "world, facts, column, sentence, row",
    [
        ({"resumed_after": 1}, {}, "train_loss", "resume `net` is not", rehearse.REGISTERED),
        ({"resumed_after": 1}, {"held": 0}, "train_loss", "step 2: train", rehearse.OWN_STATE),
        ({"resumed_after": 1}, {}, "learning_rate", "step 2: learn", rehearse.OWN_SCHEDULE),
        ({"resumed_after": 1}, {"changes": 1}, "train_loss", "step 2", rehearse.CHANGED_SET),
        ({"settings": {"num_workers": 2}}, {"changes": 1}, "train_loss", "", rehearse.CHANGED_SET),
        ({"settings": {"accumulate": 2}}, {"buffers": ["c"]}, "train_loss", "`c` changes", "Batch"),
        (
            {"num_processes": 2},
            {"draws": ["numpy"]},
            "train_loss",
            "from numpy",
            rehearse.ON_DEVICE,
        ),
        (
            {"num_processes": 2},
            {"hooked": ["w"]},
            "train_loss",
            "; w has a hook",
            rehearse.GRADIENTS,
        ),
        ({"num_processes": 2}, {"draws": ["numpy"]}, "eval_f1", "run.evaluate", rehearse.OWN_MEAN),
    ],
)
def test_a_difference_has_its_row(tmp_path, world, facts, column, sentence, row):
    one, other = (
        outcome(tmp_path / name, [{"step": 1, column: 1.0}, {"step": 2, column: value}])
        for name, value in (("a", 2.0), ("b", 3.0))
    )
    facts = {"buffers": [], "draws": [], "hooked": [], "held": 1, "changes": 0} | facts
    (one.folder / "facts.json").write_text(json.dumps(facts))
    if facts["changes"]:
        note = "note: the samples of the training set have changed since run.begin(...): a resume"
        (one.folder / "stdout-0").write_text(note)
    elif facts["held"]:
        for folder, name, value in (one.folder, "held-1", "1"), (other.folder, "held-resumed", "2"):
            (folder / f"{name}.json").write_text(json.dumps({"net": {"": value}}))
    other.world = rehearse.World("b", **world)
    verdict = rehearse.Comparison(one, rehearse.Rounding(one, one)).judge(other)
    assert not verdict.is_kept and sentence in verdict.text and verdict.row.startswith(row)


@pytest.mark.parametrize("resumed_after, told", [(0, ["split"]), (1, ["holds"])])
def test_a_difference_comes_with_the_lines_that_the_run_has_for_it(tmp_path, resumed_after, told):
    one = outcome(tmp_path / "a", [])
    one.world = rehearse.World("b", resumed_after=resumed_after)
    lines = ["epoch", "note: so the numbers depend on how a batch is split", "note: another"]
    (one.folder / "stdout-0").write_text("\n".join([*lines, "note: which no checkpoint holds"]))
    assert [line.split()[-1] for line in one.notes] == told


def test_what_is_given_gradients_is_found():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU())
    assert hooked([model]) == []
    model[0].weight.register_hook(lambda gradient: 2 * gradient)
    model[1].bias.register_post_accumulate_grad_hook(lambda weight: None)
    model[2].register_full_backward_hook(lambda layer, inputs, outputs: None)
    model[2].register_forward_hook(lambda layer, inputs, output: None)
    assert hooked([model]) == ["0.weight", "1.bias", "2"]


def test_a_world_that_is_not_held_still_is_there_for_what_is_registered_and_needs_only_end(
    tmp_path,
):
    first = outcome(tmp_path / "a", [{"step": 1, "train_loss": 2.0}])
    facts = {"buffers": [], "draws": [], "by_process": ["BatchNorm"]}
    worlds = {}
    for moves in (False, True):
        noted = json.dumps(facts | {"moves_registered_averages": moves})
        (first.folder / "facts.json").write_text(noted)
        worlds[moves] = rehearse.worlds_of(first, has_card=False)[0]
    (added,) = [world for world in worlds[True] if world not in worlds[False]]
    assert added.num_processes == 2 and not added.still
    other = outcome(tmp_path / "b", [{"step": 1, "train_loss": 3.0}])
    other.world = added
    comparison = rehearse.Comparison(first, rehearse.Rounding(first, first))
    assert comparison.judge(other).is_kept
    other.problem = "the registered Net differs between processes, as with BatchNorm"
    assert comparison.judge(other) == (f"fails: {other.problem}", False, rehearse.BATCH_NORM)


def test_a_process_that_hangs_is_found_in_the_script(tmp_path):
    script = tmp_path / "mine.py"
    (tmp_path / "stacks-1").write_text(
        f'  File "x.py", line 3 in a\n  File "{script}", line 7 in b'
    )
    sentence, is_refusal = rehearse.why_not(tmp_path, [0, None], str(script), 20)
    assert sentence.endswith("within 20 s, and was ended: process 1 was in line 7 of mine.py")
    assert not is_refusal


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
    Path(path).write_text(f"RuntimeError: {error}")
"""


@pytest.mark.parametrize(
    "error, is_refusal, row",
    [
        ("error: run.gather(...) compares the samples of a batch", True, rehearse.SAMPLES_COMPARED),
        ("mixed", False, rehearse.TEACHER),
        (f"error: {ADVICE['got mixed torch.Tensor and DTensor']}", False, rehearse.TEACHER),
    ],
)
def test_what_ends_a_world_has_its_row(tmp_path, fork_main, error, is_refusal, row):
    if error == "mixed":  # what torch says of a sharded weight beside a whole one
        assert fork_main(MIXED, given={"path": str(tmp_path / "said")}).codes == [0]
        error = (tmp_path / "said").read_text()
    ended = outcome(tmp_path / "b", [])
    trace = f'Traceback (most recent call last)\n  File "{tmp_path}/mine.py", line 7\n'
    (ended.folder / "stderr-0").write_text(error if is_refusal else trace + error)
    codes = [2 if is_refusal else 1]
    ended.problem, ended.is_refusal = rehearse.why_not(
        ended.folder, codes, str(tmp_path / "mine.py"), 9
    )
    verdict = rehearse.Comparison(ended, rehearse.Rounding(ended, ended)).judge(ended)
    assert (verdict.is_kept, verdict.row) == (is_refusal, row)


@pytest.mark.parametrize(
    "one, other, is_kept",
    [
        ({"train_loss": [1.0, -1e-8]}, {"train_loss": [1.0, 2e-8]}, True),
        ({"train_loss": [1.0, 0.5]}, {"train_loss": [1.0, 0.5001]}, False),
        ({"eval_accuracy": [0.5, 0.7], "eval_samples": [5000, 5000]},
         {"eval_accuracy": [0.5, 0.7002], "eval_samples": [5000, 5000]}, True),
        ({"eval_accuracy": [0.5, 0.7], "eval_samples": [5000, 5000]},
         {"eval_accuracy": [0.5, 0.7004], "eval_samples": [5000, 5000]}, False),
        ({"step": [1, 2]}, {"step": [1, 3]}, False),
    ],
)  # fmt: skip
def test_small_values_count_by_their_column_and_one_sample_may_flip(tmp_path, one, other, is_kept):
    def rows(columns):
        return [{"step": n + 1, **{k: v[n] for k, v in columns.items()}} for n in range(2)]

    first, second = outcome(tmp_path / "a", rows(one)), outcome(tmp_path / "b", rows(other))
    rounding = rehearse.Rounding(first, first)
    assert rehearse.Comparison(first, rounding).judge(second).is_kept == is_kept


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("is not a file", "nothing.py"),
        ("is not a file", "."),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(text, sentence):
    with refused(text):
        rehearse.main([sentence])


def test_a_name_that_no_world_has_is_refused(tmp_path):
    facts = {"by_process": []}
    first = SimpleNamespace(problem="", folder=tmp_path, noted=lambda name: facts)
    stage = SimpleNamespace(run=lambda world: first, has_card=lambda: False)
    with refused("--only zzz: no world has this in its name: .*, 2 loader workers"):
        rehearse.rehearse(stage, "zzz")
