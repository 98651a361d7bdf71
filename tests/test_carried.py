"""The numbers that a loop carries from step to step, and no checkpoint holds, are named."""

import re
from functools import partial
from itertools import cycle
from types import SimpleNamespace

import pytest
from conftest import ROOT

from trainkit.run.variables import Variables

# One loop over epochs and one over steps, as in every script. `watched.notes()` is a checkpoint.
LOOP = """
import time
import torch

class Trainer:
    def __init__(self):
        self.tau, self.last, self.step = 1.0, 0.0, 0

    def move(self):
        self.last = 2 * self.tau
        self.tau = max(0.5, self.tau * 0.9)

    def see(self):
        self.seen["n"] += 1

def use(*values):
    pass

def count():
    global num_seen
    num_seen += 1

num_seen = 0

def main(watched, said):
    trainer = Trainer()
    BEFORE
    for epoch in range(3):
        START
        for number, batch in enumerate(watched.start() or range(3)):
            BODY
            said.append(watched.notes())
        AFTER
"""
# What stands before the loops, at the start of an epoch, in a step, at the end of an epoch, and the
# names that are said.
CASES = {
    "a temperature": ("tau = 1.0", "", "tau *= 0.9", "", "tau"),
    "one that is computed": ("tau = 1.0", "", "tau = max(0.5, tau * 0.9)", "", "tau"),
    "a counter": ("step = 0", "", "step += 1", "", "step"),
    "a counter in an else": (
        "step = 0",
        "",
        "if batch:\n    use()\nelse:\n    step += 1",
        "",
        "step",
    ),
    "one that a condition sets": (
        "late = False",
        "",
        "use(late)\nif batch == 1:\n    late = True",
        "",
        "late",
    ),
    "a word": ("phase = 'a'", "", "use(phase)\nif batch == 1: phase = 'b'", "", "phase"),
    "the best": (
        "best = 0",
        "",
        "",
        "result = epoch + 1\nif result > best:\n    best = result",
        "best",
    ),
    "a rate that each epoch cuts": ("rate = 1.0", "", "use(rate)", "rate /= 2", "rate"),
    "two at once": ("low, high = 0, 9", "", "low, high = low + 1, high - 1", "", "high low"),
    "a sum of an epoch": ("total = 0", "total = 0", "total += batch + 1", "use(total)", "total"),
    "a tensor with one number": (
        "mean = torch.zeros(())",
        "",
        "mean = 0.9 * mean + 1",
        "",
        "mean",
    ),
    "one in a with": ("n = 0", "", "with torch.no_grad():\n    n = n + 1", "", "n"),
    "one in a try": ("n = 0", "", "try:\n    n += 1\nfinally:\n    use()", "", "n"),
    "one of a walrus": ("n = 0", "", "if (n := n + 1) > 9: use()", "", "n"),
    "one that a lambda reads": ("n = 0", "", "use(lambda: n)\nn = batch + 1", "", "n"),
    "an attribute": ("", "", "trainer.step += 1", "", "trainer.step"),
    "what a method keeps": ("", "", "trainer.move()", "", "trainer.tau"),
    "a global name": ("", "", "count()", "", "num_seen"),
    "an entry of a dict": ("state = {'n': 0}", "", "state['n'] += 1", "", "state"),
    "an entry of a list": ("n = [0, 0]", "", "n[1] = n[1] + 1", "", "n"),
    "an entry of an attribute": (
        "trainer.seen = {'n': 0}",
        "",
        "trainer.see()",
        "",
        "trainer.seen",
    ),
    "entries of each epoch": ("n = {'x': 0}", "n = {'x': 0}", "n['x'] += 1", "", "n"),
    "an entry that is set before": ("n = {'x': 0}", "", "n['x'] = batch\nuse(n['x'])", "", ""),
    "an entry of a batch": ("", "", "sample = {'x': batch}\nsample['x'] += 1", "", ""),
    "an attribute of what is new": (
        "new = Trainer()",
        "",
        "new = Trainer()\nnew.step += 1",
        "",
        "",
    ),
    "an iterator": ("it = iter(range(99))", "", "use(next(it))", "", "it"),
    "one that begins again": (
        "it = iter(range(2))",
        "",
        "try:\n    use(next(it))\nexcept StopIteration:\n    it = iter(range(2))",
        "",
        "it",
    ),
    "one of each epoch": ("it = iter([])", "it = iter(range(9))", "use(next(it, 0))", "", "it"),
    "one that is made for each step": ("", "", "it = iter([1])\nuse(next(it))", "", ""),
    "a rate of the epoch": ("", "rate = 1 / (1 + epoch)", "use(rate)", "", ""),
    "what is set before it is read": ("x = 0", "", "x = batch\nuse(x)", "", ""),
    "what both ways set": ("x = 0", "", "if batch: x = 1\nelse: x = 2\nuse(x)", "", ""),
    "what the other way leaves": (
        "x = 0",
        "",
        "if batch: x = batch\nelse: continue\nuse(x)",
        "",
        "",
    ),
    "what one way leaves as it was": ("x = 0", "", "if batch: x = batch\nuse(x)", "", "x"),
    "what is shown at the end": ("x = 0", "", "x = batch", "use(x, number, batch)", ""),
    "the time": (
        "start = time.time()",
        "",
        "use(time.time() - start)\nstart = time.time()",
        "",
        "",
    ),
    "the time, by another name": (
        "start = time.time()",
        "",
        "now = time.time()\nuse(now - start)\nstart = now",
        "",
        "",
    ),
    "a sum of times": ("spent = 0.0", "", "spent += time.time() - epoch", "", ""),
    "a list that is made anew of itself": ("n = [0, 0]", "", "n = n[1:] + [batch + 1]", "", "n"),
    "one in a try with a star": (
        "n = 0",
        "",
        "try:\n    n += 1\nexcept* ValueError:\n    use()",
        "",
        "n",
    ),
    "what each case sets": (
        "x = 0",
        "",
        "match batch:\n    case 0: x = 5\n    case _: x = batch\nuse(x)",
        "",
        "",
    ),
    "what some cases set": ("x = 0", "", "match batch:\n    case 1: x = 5\nuse(x)", "", "x"),
    "an attribute of what each step makes": (
        "new = Trainer()",
        "",
        "new = Trainer()\nnew.move()",
        "",
        "",
    ),
    "a long text": ("log = 'a' * 9999", "", "log = log + 'b'", "", "log"),
    "a list that a comprehension makes of itself": (
        "x = [torch.ones(3)]",
        "",
        "x = [x * 0.9 for x in x]",
        "",
        "x",
    ),
    "a list of a comprehension": ("x = 0", "", "use([x for x in range(3)])\nx = batch", "", ""),
    "what only begins": ("first = None", "", "first = batch", "use(first)", ""),
    "a batch as large as one before": ("x = torch.ones(4)", "", "x = torch.rand(4)", "", ""),
    "what is only set": ("", "", "trainer.last = batch + 1", "", ""),
}


def indented(text: str, depth: int) -> str:
    return "\n".join(" " * depth + line for line in text.splitlines()).strip() or "pass"


def run(path, accelerator, *parts: str) -> list[str]:
    """What a loop with these parts is told, at each of its checkpoints."""
    text, depths = LOOP, (4, 8, 12, 8)
    for name, part, depth in zip(("BEFORE", "START", "BODY", "AFTER"), parts, depths, strict=True):
        text = text.replace(name, indented(part, depth))
    path.write_text(text)
    scope = {"__name__": "mine"}
    exec(compile(text, path, "exec"), scope)
    said: list[list[str]] = []
    scope["main"](Variables(accelerator, []), said)
    return [line for notes in said for line in notes]


@pytest.mark.parametrize("name", CASES)
def test_a_number_that_the_loop_carries_is_named(tmp_path, accelerator, name):
    *parts, names = CASES[name]
    said = run(tmp_path / "mine.py", accelerator, *parts)
    found = re.findall("`(.*?)`", " ".join(line.partition(", which no")[0] for line in said))
    assert sorted(found) == names.split()


# As Run does it, whose functions are none of the script.
STEPS = """
def steps(watched, said):
    watched.start()
    yield from range(3)
    said.append(watched.notes(is_epoch_over=True))


def save(watched, said):
    said.append(watched.notes())
"""


def test_what_begins_anew_in_each_epoch_is_not_lost_at_its_end(tmp_path, accelerator):
    kit = {}
    exec(compile(STEPS, "<frozen kit>", "exec"), kit)
    path, said = tmp_path / "mine.py", []
    path.write_text(
        "def main(watched, said):\n"
        "    step = total = 0\n"
        "    for epoch in range(2):\n"
        "        total = 0\n"
        "        for batch in steps(watched, said):\n"
        "            total += batch\n"
        "            step += 1\n"
    )
    exec(compile(path.read_text(), path, "exec"), kit)
    kit["main"](Variables(accelerator, []), said)
    assert ["changed `step`, which" in note for notes in said for note in notes] == [True]


@pytest.mark.parametrize(
    "loop, name, at_end",
    [
        ("for batch, other in zip(run.steps(watched, said), cycle(others)):", "cycle(others)", 0),
        ("for n, (other, batch) in enumerate(zip(others, run.steps(watched, said))):", "others", 0),
        ("for batch in run.steps(watched, said):\n            next(endless)", "endless", 1),
    ],
)
def test_what_is_drawn_beside_the_batches_is_named_where_it_is_lost(
    tmp_path, accelerator, loop, name, at_end
):
    for checkpoint, is_named in (("watched.notes()", True), ("[]", bool(at_end))):
        path, said = tmp_path / f"mine_{is_named}_{len(checkpoint)}.py", []
        path.write_text(
            "def main(run, watched, said, others, cycle):\n"
            "    endless = cycle(others)\n"
            "    for epoch in range(2):\n"
            f"        {loop}\n"
            f"            said.append({checkpoint})\n"
        )
        kit = {}
        exec(compile(STEPS, "<frozen kit>", "exec"), kit)
        exec(compile(path.read_text(), f"{path}", "exec"), kit)
        run = SimpleNamespace(steps=kit["steps"])
        kit["main"](run, Variables(accelerator, []), said, range(9), cycle)
        notes = [note for notes in said for note in notes]
        assert [f"draws from `{name}`, and" in note for note in notes] == [True] * is_named


METER = """
import torch

class Meter:
    def __init__(self):
        self.reset()

    def reset(self):
        self.num = 0

    def add(self):
        self.num += 1

"""
# What a script does, and what it is told at its saves and at the ends of its epochs.
SCRIPTS = {
    "a sum of an epoch over a generator of its own": (
        "def batches(run):\n"
        "    for batch in run.steps():\n"
        "        yield batch\n"
        "def main(run):\n"
        "    total = 0\n"
        "    for epoch in range(2):\n"
        "        total = 0\n"
        "        for batch in batches(run):\n"
        "            total += batch\n",
        "",
        "",
    ),
    "a meter of each epoch": (
        "def main(run):\n"
        "    for epoch in range(2):\n"
        "        meter = Meter()\n"
        "        for batch in run.steps():\n"
        "            meter.add()\n"
        "            SAVE\n",
        "meter.num",
        "",
    ),
    "a meter of a function that trains an epoch": (
        "def train(run):\n"
        "    meter = Meter()\n"
        "    for batch in run.steps():\n"
        "        meter.add()\n"
        "        SAVE\n"
        "def main(run):\n"
        "    for epoch in range(2):\n"
        "        train(run)\n",
        "meter.num",
        "",
    ),
    "a meter that each epoch resets": (
        "def main(run):\n"
        "    meter = Meter()\n"
        "    for epoch in range(2):\n"
        "        meter.reset()\n"
        "        for batch in run.steps():\n"
        "            meter.add()\n"
        "            SAVE\n",
        "meter.num",
        "",
    ),
    "an attribute that a method begins with": (
        "class Trainer:\n"
        "    def train(self, run):\n"
        "        self.total = 0\n"
        "        for batch in run.steps():\n"
        "            self.add()\n"
        "            SAVE\n"
        "    def add(self):\n"
        "        self.total += 1\n"
        "def main(run):\n"
        "    trainer = Trainer()\n"
        "    for epoch in range(2):\n"
        "        trainer.train(run)\n",
        "self.total trainer.total",
        "",
    ),
    "a number that is put into run.state": (
        "def main(run):\n"
        "    run.state = {'tau': 1.0}\n"
        "    tau = run.state['tau']\n"
        "    for epoch in range(2):\n"
        "        for batch in run.steps():\n"
        "            tau *= 0.9\n"
        "            run.state['tau'] = float(tau)\n"
        "            SAVE\n",
        "",
        "",
    ),
    "an attribute that a method puts into run.state": (
        "class Trainer:\n"
        "    def __init__(self, run):\n"
        "        self.run, self.tau = run, 1.0\n"
        "    def step(self):\n"
        "        self.tau *= 0.9\n"
        "        self.run.state['tau'] = self.tau\n"
        "def main(run):\n"
        "    run.state = {}\n"
        "    trainer = Trainer(run)\n"
        "    for epoch in range(2):\n"
        "        for batch in run.steps():\n"
        "            trainer.step()\n"
        "            SAVE\n",
        "",
        "",
    ),
    "a tensor that each epoch makes zero": (
        "def main(run):\n"
        "    total = torch.zeros(())\n"
        "    for epoch in range(2):\n"
        "        total.zero_()\n"
        "        for batch in run.steps():\n"
        "            total += 1\n"
        "            SAVE\n",
        "total",
        "",
    ),
    "run.state by another name": (
        "def main(run):\n"
        "    run.state = {'n': 0}\n"
        "    state = run.state\n"
        "    for epoch in range(2):\n"
        "        for batch in run.steps():\n"
        "            state['n'] += 1\n"
        "            SAVE\n",
        "",
        "",
    ),
    "a number that a function is given and returns": (
        "def train(run, step):\n"
        "    for batch in run.steps():\n"
        "        step += 1\n"
        "        SAVE\n"
        "    return step\n"
        "def main(run):\n"
        "    step = 0\n"
        "    for epoch in range(2):\n"
        "        step = train(run, step)\n",
        "step",
        "step",
    ),
    "a rate that a function is given": (
        "def train(run, rate):\n"
        "    for batch in run.steps():\n"
        "        SAVE\n"
        "def main(run):\n"
        "    rate = 1.0\n"
        "    for epoch in range(2):\n"
        "        train(run, rate)\n"
        "        rate /= 2\n",
        "rate",
        "rate",
    ),
    "a sum of a function that trains an epoch": (
        "def train(run):\n"
        "    total = 0\n"
        "    for batch in run.steps():\n"
        "        total += 1\n"
        "def main(run):\n"
        "    for epoch in range(2):\n"
        "        train(run)\n",
        "",
        "",
    ),
    "a meter of the run": (
        "def train(run, meter):\n"
        "    for batch in run.steps():\n"
        "        meter.add()\n"
        "        SAVE\n"
        "def main(run):\n"
        "    meter = Meter()\n"
        "    for epoch in range(2):\n"
        "        train(run, meter)\n",
        "meter.num",
        "meter.num",
    ),
    "tensors of each epoch that change in place": (
        "def main(run):\n"
        "    for epoch in range(2):\n"
        "        slow = [torch.ones(3)]\n"
        "        for batch in run.steps():\n"
        "            slow[0].mul_(0.5)\n"
        "            SAVE\n",
        "slow",
        "",
    ),
    "a generator of each epoch": (
        "def main(run):\n"
        "    for epoch in range(2):\n"
        "        draws = torch.Generator().manual_seed(epoch)\n"
        "        for batch in run.steps():\n"
        "            torch.rand(1, generator=draws)\n"
        "            SAVE\n",
        "draws",
        "",
    ),
    "the batches, drawn by hand": (
        "def main(run):\n"
        "    for epoch in range(2):\n"
        "        batches = iter(run.steps())\n"
        "        while next(batches, None) is not None:\n"
        "            SAVE\n",
        "",
        "",
    ),
    "the same again": (
        "from itertools import repeat\n"
        "def main(run):\n"
        "    for epoch in range(2):\n"
        "        for batch, factor in zip(run.steps(), repeat(3)):\n"
        "            SAVE\n",
        "",
        "",
    ),
    "a function with more branches than Python can follow": (
        "def pick(x):\n"
        "    if x == 0:\n"
        "        y = 0\n" + "".join(f"    elif x == {n}:\n        y = 1\n" for n in range(900)) + ""
        "def main(run):\n"
        "    meter, n = Meter(), 0\n"
        "    for epoch in range(2):\n"
        "        for batch in run.steps():\n"
        "            meter.add()\n"
        "            n += 1\n"
        "            SAVE\n",
        "meter.num n",
        "meter.num n",
    ),
}


def names_told(path, accelerator, text: str) -> list[str]:
    """The names that a script is told."""
    kit, said, watched = {}, [], Variables(accelerator, [])
    exec(compile(STEPS, "<frozen kit>", "exec"), kit)
    path.write_text(text)
    scope = {"__name__": "mine"}
    exec(compile(text, path, "exec"), scope)
    steps, save = (partial(kit[name], watched, said) for name in ("steps", "save"))
    scope["main"](SimpleNamespace(steps=steps, save=save))
    lines = [re.split(", which no|, and no", note)[0] for notes in said for note in notes]
    return re.findall("`(.*?)`", " ".join(lines))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_told_what_it_loses_in_an_epoch_and_at_its_end(tmp_path, accelerator, name):
    text, at_saves, at_ends = SCRIPTS[name]
    for save, names in (("run.save()", at_saves), ("pass", at_ends)):
        path = tmp_path / f"mine_{save[:3]}.py"
        told = names_told(path, accelerator, METER + text.replace("SAVE", save))
        assert sorted(told) == names.split()


def test_a_script_that_has_changed_since_it_began_is_not_judged(tmp_path, accelerator):
    """As one that is edited while it reads its data: its lines are others."""
    text = (
        "def main(run):\n"
        "    n = last = 0\n"
        "    for epoch in range(2):\n"
        "        for batch in run.steps():\n"
        "            last = batch\n"
        "            n += 1\n"
    )
    path = tmp_path / "mine.py"
    edited = text.replace("last = batch", "last += batch")
    assert (
        names_told(
            path,
            accelerator,
            text + f"from pathlib import Path\nPath({str(path)!r}).write_text({edited!r})\n",
        )
        == []
    )


def test_a_run_knows_where_an_epoch_is_over(tmp_path, fork_main):
    """A sum of an epoch is lost by a save in its middle, and not by that at its end."""
    script = (ROOT / "train_regression.py").read_text()
    edits = {
        "        for _ in run.epochs():\n": "            total = 0\n",
        "                run.add(loss=losses)\n": "                total += 1\n",
    }
    for line, more in edits.items():
        assert script.count(line) == 1
        script = script.replace(line, line + more)
    for save_every, num_notes in (("", 0), ("--save-every 3", 1)):
        flags = f"--num-samples 128 --epochs 2 --no-pictures {save_every}"
        printed = fork_main(script, flags, f"--run-dir {tmp_path}/run{num_notes}").finished()
        assert printed.count("note: the loop has changed `total`, which") == num_notes


COOLING = """
from torch import nn
import torch

class Cooling(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.tau = nn.Parameter(torch.ones(1)), 1.0

    def forward(self, x):
        self.tau *= 0.9
        return self.weight * x / self.tau

def main(accelerator, watched):
    model = accelerator.prepare(nn.Sequential(Cooling()))
    watched.start()
    model(torch.ones(1))
    return watched.notes()
"""


def test_a_number_that_a_layer_keeps_is_named(tmp_path, accelerator):
    path, scope = tmp_path / "mine.py", {"__name__": "mine"}
    path.write_text(COOLING)
    exec(compile(COOLING, path, "exec"), scope)
    (note,) = scope["main"](accelerator, Variables(accelerator, []))
    assert "changed `0.tau of the Sequential`, which" in note


def test_a_script_without_a_source_is_not_judged(accelerator):
    code = "n = 0\nfor _ in range(2):\n    watched.start()\n    n += 1\n    notes = watched.notes()"
    names = {"watched": Variables(accelerator, [])}
    exec(compile(code, "nowhere.py", "exec"), names)
    assert names["notes"] == []
