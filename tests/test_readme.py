"""The READMEs say the same, and what they tell people to type exists.

What is run for real, and where: CONTRIBUTING.md's test command by .ci/run, which takes it there;
the default run by test_train_mnist.py (slow) and, on fewer pictures, by nearly every test file; the
YAML of two processes by test_train_mnist.py, test_regression.py and others; --save-every with
--resume auto by test_faults.py; predict.py by test_predict.py; trainkit.tools.plots by
test_plots.py; the doctor by test_doctor.py; notebook_launcher by test_notebook.py. What needs GPUs
or minutes is parsed here with the parser that would read it.
"""

import argparse
import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import test_regression
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from conftest import ROOT

READMES = [ROOT / "README.md", *sorted(ROOT.glob("docs/README.*.md"))]
PAGES = [
    *READMES,
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "RECORDS.md",
    *(
        ROOT / "docs" / f"{name}.md"
        for name in ["coming_from", "scaling", "results", "tested", "yamls"]
    ),
]
OTHER_LANGUAGES = [path for path in READMES if path.name != "README.md"]
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def numbers(text: str) -> list[str]:
    return [match.rstrip(",") for match in NUMBER.findall(text)]


def code_spans(text: str) -> list[str]:
    """Inline code outside of fenced blocks, each on one line."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", FENCE.sub("", text))]


def targets(text: str) -> list[str]:
    """What links and pictures point to."""
    found = re.findall(r'\]\(([^)#\s]+)[^)]*\)|<img src="([^"]+)"', text)
    return [link or picture for link, picture in found]


def files(path: Path, text: str) -> list[Path | str]:
    """The targets of a page: the files as paths, the links as they are."""
    found = targets(text)
    return [x if x.startswith("http") else (path.parent / x).resolve() for x in found]


def sections(path: Path) -> list[tuple[int, str]]:
    """Level and text of each section, the language switch left out; # in a block is no heading."""
    text = re.sub(
        r"^(?=.*\]\(\S*README)[^`]*$\n", "", path.read_text(), count=1, flags=re.MULTILINE
    )
    blocks = [match.span() for match in FENCE.finditer(text)]
    heads = [
        head
        for head in re.finditer(r"^(#+) .*\n", text, re.MULTILINE)
        if not any(start < head.start() < end for start, end in blocks)
    ]
    ends = [head.start() for head in heads[1:]] + [len(text)]
    return [(len(head[1]), text[head.start() : end]) for head, end in zip(heads, ends, strict=True)]


def table(text: str) -> list[list[str]]:
    """The cells of all table rows; a | inside of a cell does not occur."""
    return [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]


def pairs(path: Path) -> list[tuple[str, str]]:
    """Each section of the English README with its counterpart."""
    english, other = sections(ROOT / "README.md"), sections(path)
    assert [level for level, _ in english] == [level for level, _ in other]
    return [(a, b) for (_, a), (_, b) in zip(english, other, strict=True)]


@pytest.mark.parametrize("path", OTHER_LANGUAGES, ids=lambda path: path.name)
def test_both_readmes_have_the_same_commands_figures_tables_and_pictures(path: Path) -> None:
    for english, other in pairs(path):
        where = f"{english.splitlines()[0]} / {other.splitlines()[0]}"
        blocks, other_blocks = FENCE.findall(english), FENCE.findall(other)
        assert [kind for kind, _ in blocks] == [kind for kind, _ in other_blocks], where
        for (kind, block), (_, other_block) in zip(blocks, other_blocks, strict=True):
            assert block == other_block or kind != "bash", where
        assert Counter(numbers(english)) == Counter(numbers(other)), where
        assert Counter(code_spans(english)) == Counter(code_spans(other)), where
        assert files(ROOT / "README.md", english) == files(path, other), where
        rows, other_rows = table(english), table(other)
        assert [len(row) for row in rows] == [len(row) for row in other_rows], where
        for row, other_row in zip(rows, other_rows, strict=True):
            for cell, other_cell in zip(row, other_row, strict=True):
                assert numbers(cell) == numbers(other_cell), (cell, other_cell)
                assert code_spans(cell) == code_spans(other_cell), (cell, other_cell)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_link_picture_and_requirements_file_is_there(path: Path) -> None:
    text = path.read_text()
    for target in targets(text):
        assert target.startswith("http") or (path.parent / target).exists(), target
    for name in re.findall(r" -r (\S+\.txt)\b", text):
        assert (ROOT / name).is_file(), name


def commands(path: Path) -> list[tuple[str, ...]]:
    """The words of every command with python or accelerate, in blocks and in inline code."""
    text = path.read_text()
    lines = [
        line for _, block in FENCE.findall(text) for line in block.replace("\\\n", " ").splitlines()
    ]
    found = []
    for line in [*lines, *code_spans(text)]:
        for part in re.split(r"&&|;|\|", line.removeprefix("$ ")):
            if start := re.match(r"\s*(?:[A-Z_]+=\S* )*(?=python |accelerate launch )", part):
                found.append(tuple(shlex.split(part[start.end() :], comments=True)))
    return found


ALL_COMMANDS = sorted({words for path in PAGES for words in commands(path)})


class Read(Exception):
    """Carries what a parser has read, and what it did not know, out of a script."""


@pytest.fixture
def understood(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> Callable:
    """Fail unless the parser of a script or module accepts the words; nothing of it is run."""
    parse_known_args = argparse.ArgumentParser.parse_known_args

    def read_and_leave(
        self: argparse.ArgumentParser, args: list | None = None, namespace: Any = None
    ) -> NoReturn:
        raise Read(*parse_known_args(self, args, namespace))

    def check(module: str, words: list[str], num_processes: int = 1) -> None:
        if module == "pytest":
            known, unknown = pytestconfig._parser.parse_known_and_unknown_args(words)
            assert unknown == []
            assert all((ROOT / name).exists() for name in known.file_or_dir), known.file_or_dir
            marks = [line.split(":")[0] for line in pytestconfig.getini("markers")]
            assert not known.markexpr or known.markexpr in marks, known.markexpr
            return
        assert importlib.util.find_spec(module), f"there is no {module}"
        if module == "trainkit.tools.ray":
            return  # tests/test_ray.py starts it, where there is Ray
        script = importlib.import_module(module)
        source = Path(script.__file__).read_text()
        if "Parser(" not in source:
            assert words == [], f"{module} reads no arguments"
            return
        with monkeypatch.context() as patch, pytest.raises(Read) as left:
            patch.chdir(ROOT)  # @FILE is read from there
            patch.setattr(sys, "argv", [module, *words])
            for name in ("parse_known_args", "parse_known_intermixed_args"):
                patch.setattr(argparse.ArgumentParser, name, read_and_leave)
            script.main()
        _, unknown = left.value.args
        if "parse_known_args" in source:  # it hands the rest on
            check("train_mnist", unknown)
        else:
            assert unknown == []
        if hasattr(script, "check_arguments"):
            with monkeypatch.context() as patch:
                patch.chdir(ROOT)
                script.check_arguments(script.parse_args(words), num_processes)

    return check


@pytest.mark.parametrize(
    "words", [pytest.param(words, id=" ".join(words)[:90]) for words in ALL_COMMANDS]
)
def test_every_command_of_the_pages_would_be_understood(
    words: tuple[str, ...], understood: Callable
) -> None:
    num_processes, words = 1, [word for word in words if word != "..."]
    if words[0] == "accelerate":
        if not any(word == "-m" or word.endswith(".py") for word in words):
            words.append("train_mnist.py")  # the page speaks of the launcher's part alone
        launch = launch_command_parser().parse_args(words[2:])
        if launch.config_file is not None:
            config = load_config_from_file(str(ROOT / launch.config_file))
            num_processes = config.num_processes
        script = launch.training_script
        words = ["accelerate", *(["-m", script] if launch.module else [script])]
        words += launch.training_script_args
    words = words[1:]
    if words[0] == "-m":
        _, module, *flags = words
    else:
        script, *flags = words
        assert (ROOT / script).is_file(), f"there is no {script}"
        module = script.removesuffix(".py").replace("/", ".")
    understood(module, flags, num_processes)


def test_the_yaml_table_lists_every_yaml_with_its_number_of_processes() -> None:
    rows = table((ROOT / "docs" / "yamls.md").read_text())[2:]
    listed = {name: row[1] for row in rows for name in code_spans(row[0])}
    found = {file.stem: file for file in (ROOT / "accelerate_configs").glob("*.yaml")}
    assert listed.keys() == found.keys()
    for name, file in found.items():
        num_processes = load_config_from_file(str(file)).num_processes
        assert str(num_processes) in numbers(listed[name]), name


def test_readme_is_read_in_one_sitting() -> None:
    for path in READMES:
        assert len(path.read_text().splitlines()) <= 200, path


def test_without_a_flag_both_scripts_fit_the_processes_of_every_yaml() -> None:
    for name in ("train_mnist", "train_regression"):
        script = importlib.import_module(name)
        for file in (ROOT / "accelerate_configs").glob("*.yaml"):
            num_processes = load_config_from_file(str(file)).num_processes
            script.check_arguments(script.parse_args([]), num_processes)


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.name)
def test_the_loop_that_is_shown_is_that_of_the_script(path: Path) -> None:
    (shown,) = (text for kind, text in FENCE.findall(path.read_text()) if "run.epochs()" in text)
    script = (ROOT / "train_mnist.py").read_text()
    loop = script[
        script.index("        for epoch in run.epochs():") : script.index(
            "        metrics = run.finish("
        )
    ]
    assert shown.strip() == textwrap.dedent(loop).strip()


def test_the_file_map_is_the_repository() -> None:
    rows = table((ROOT / "CONTRIBUTING.md").read_text())[2:]
    listed = {name for row in rows for name in code_spans(row[0])}
    assert all((ROOT / name).exists() for name in listed), listed
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    for name in tracked.stdout.splitlines():  # none if this is not a git checkout
        if not name.startswith((".", "README", "LICENSE", "trainkit/__init__")):
            assert any(name.startswith(entry) for entry in listed), f"{name} is not in the file map"


# Each row of RECORDS.md's table at a glance by words of its first cell, and where its figures are
# from: a heading and words of lines below it, or the tolerances of the test that holds them.
B = "## Machine B: AMD EPYC (Zen 4) with AVX-512 and bf16"
A = "## Machine A: Intel Xeon with AVX-512 and AMX"
SOURCES = {
    "`python train_mnist.py`, 3 epochs": [
        "# Records", "| default run, 3 epochs |", "of the last epoch on the 10,000 test pictures",
    ],
    "@examples/recipes/fast`, 1 epoch": [B, "| `examples/recipes/fast`, 1 epoch |"],
    "@examples/recipes/best`, 15 epochs": [B, "| `examples/recipes/best`, bfloat16, 15 epochs"],
    "--optimizer sgd --batch-size 256 --epochs 5`": [
        B, "| LeNet, SGD, Fashion-MNIST, 5 epochs |", "5 epochs, no augmentation |",
    ],
    "--batch-size 64 --learning-rate 5e-3`": [B, "| LeNet, AdamW, Fashion"],
    "`python train_regression.py`, 1,000 rows": [
        A, "1,000 rows, 30 epochs:", "| training loss", "| distance of the weights to the truth",
        "| standard error of that distance", "| seconds of training",
    ],
    "the loop over a per-sample PIL pipeline": [
        B, "| compact, float32 |", "| lenet, float32 |", "batch 256, two threads;",
    ],
    "`python -m benchmarks.peers`": [
        "## Peers", "| pytorch: `mnist/main.py`", "| fabric:", "| accelerate:",
        "| ours |", "| fast |",
    ],
    "the `mp.spawn` template": (test_regression.TEMPLATE_TOLERANCE,),
    "the DDP + two schedules template": (test_regression.TEMPLATE_TOLERANCE,),
}  # fmt: skip


def figures(text: str) -> list[str]:
    """The numbers of a text that are not part of a command."""
    return numbers(re.sub(r"`[^`]*`", "", text))


def test_every_measured_figure_is_that_of_its_record() -> None:
    """RECORDS.md at a glance: each figure is a number of the row's own record, rounded."""
    records = (ROOT / "benchmarks" / "RECORDS.md").read_text()
    (text,) = (
        text for _, text in sections(ROOT / "benchmarks" / "RECORDS.md") if "At a glance" in text
    )
    rows = table(text)[2:]  # below the head and its line
    found = {words: row for row in rows for words in SOURCES if words in row[0]}
    assert found.keys() == SOURCES.keys() and len(found) == len(rows)
    for words, row in found.items():
        source = SOURCES[words]
        if isinstance(source, tuple):
            assert [float(figure) for figure in figures(row[-1])] == pytest.approx(source), words
            continue
        below = records[records.index(f"{source[0]}\n") :].splitlines()
        lines = [next(line for line in below if phrase in line) for phrase in source[1:]]
        known = {number for line in lines for number in figures(line)}
        assert figures(row[-1]), words
        for figure in figures(" ".join(row)):
            num_places = len(figure.partition(".")[2])
            rounded = {
                f"{float(number.replace(',', '')):,.{num_places}f}"
                for number in known
                if ("." in number) == (num_places > 0)  # a count is no rounded measurement
            }
            assert figure in rounded, words
