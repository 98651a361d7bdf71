"""The numbers that a loop carries from step to step, and no checkpoint holds, are named."""

import re
from itertools import cycle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trainkit.checks.variables import Variables

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


class Cooling(nn.Module):
    """A layer whose temperature falls with each batch; its number is in no state_dict."""

    def __init__(self):
        super().__init__()
        self.weight, self.tau = nn.Parameter(torch.ones(1)), 1.0

    def forward(self, x):
        self.tau *= 0.9
        return self.weight * x / self.tau


def test_a_number_that_a_layer_keeps_is_named(accelerator):
    model = accelerator.prepare(nn.Sequential(Cooling()))
    watched = Variables(accelerator, [])
    watched.start()
    model(torch.ones(1))
    assert "changed `0.tau of the Sequential`, which" in watched.notes()[0]


def test_a_script_without_a_source_is_not_judged(accelerator):
    code = "n = 0\nfor _ in range(2):\n    watched.start()\n    n += 1\n    notes = watched.notes()"
    names = {"watched": Variables(accelerator, [])}
    exec(compile(code, "nowhere.py", "exec"), names)
    assert names["notes"] == []
