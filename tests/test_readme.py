"""The READMEs say the same, and what they tell people to type exists.

What is run for real, and where: README's test command by .ci/run, which takes it there; the default
run by test_train_mnist.py (slow) and, on fewer pictures, by nearly every test file; the YAML of two
processes by test_preemption.py and others (slow); --save-every with --resume auto by
test_faults.py; predict.py by test_predict.py; trainkit.tools.plots by test_plots.py; the doctor by
test_doctor.py; notebook_launcher by test_notebook.py. What needs GPUs or minutes is parsed here
with the parser that would read it.
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
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from conftest import ROOT, without_numbers
from PIL import Image

from trainkit.config import TrainingConfig, parse

README, CHINESE = ROOT / "README.md", ROOT / "docs" / "README.zh-CN.md"
RECORDS = ROOT / "benchmarks" / "RECORDS.md"
PAGES = [README, *sorted(ROOT.glob("docs/*.md")), ROOT / "CONTRIBUTING.md", RECORDS]
YAMLS = {file.stem: file for file in (ROOT / "accelerate_configs").glob("*.yaml")}
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def numbers(text: str) -> list[str]:
    return [match.rstrip(",") for match in NUMBER.findall(text)]


def code_spans(text: str) -> list[str]:
    """Inline code outside of fenced blocks, each on one line."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", FENCE.sub("", text))]


def targets(text: str) -> list[str]:
    """What links and pictures point to."""
    return re.findall(r'(?:\]\(|<img src=")([^)"#\s]+)', text)


def table(text: str) -> list[list[str]]:
    """The cells of all table rows; a | inside of a cell does not occur."""
    return [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]


def num_processes_of(config: str) -> int:
    return load_config_from_file(str(ROOT / config)).num_processes


def parts(text: str) -> dict[str, Any]:
    """What is the same in every language."""
    blocks = FENCE.findall(text)
    return {
        "headings and rows": re.findall(r"^#+|^\|", FENCE.sub("", text), re.MULTILINE),
        "blocks": [(kind, block if kind in ("bash", "python") else "") for kind, block in blocks],
        "numbers": Counter(numbers(text)),
        "code": Counter(code_spans(text)),
        "files": [Path(target).name for target in targets(text)[1:]],  # first the other language
    }


def test_both_readmes_have_the_same_commands_figures_and_links_and_are_short():
    english, chinese = README.read_text(), CHINESE.read_text()
    assert parts(english) == parts(chinese)
    assert max(english.count("\n"), chinese.count("\n")) <= 200


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_link_picture_and_requirements_file_is_there(path):
    text = path.read_text()
    for target in targets(text):
        assert target.startswith("http") or (path.parent / target).exists(), target
    for name in re.findall(r" -r (\S+\.txt)\b", text):
        assert (ROOT / name).is_file(), name


def test_every_page_that_a_script_a_recipe_or_a_message_names_is_there():
    kinds = (".py", ".yaml", ".sbatch", ".ipynb", "")  # a recipe has no ending
    folders = ("trainkit", "examples", "benchmarks", "accelerate_configs", "docs")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    texts = [path for path in [*ROOT.glob("*.py"), *paths] if path.suffix in kinds]
    named = {
        (path, name)
        for path in texts
        if path.is_file()
        for name in re.findall(r"\bdocs/[\w.-]+\.md\b", path.read_text())
    }
    assert len(named) > 10
    for path, name in named:
        assert (ROOT / name).is_file(), (path, name)


def anchors(path: Path) -> set[str]:
    """What GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_heading_that_a_link_names_is_there(path):
    for name, anchor in re.findall(r"\]\(([\w./-]*)#([^)\s]+)\)", path.read_text()):
        page = path.parent / name if name else path
        assert anchor in anchors(page), f"{name}#{anchor}"


def commands(path: Path) -> list[tuple[str, ...]]:
    """The words of every command with python or accelerate, in blocks and in inline code."""
    text = path.read_text()
    blocks = "".join(block for _, block in FENCE.findall(text)).replace("\\\n", " ")
    found = []
    for line in [*blocks.splitlines(), *code_spans(text)]:
        for part in re.split(r"&&|;|\|", re.sub(r"\$[a-z]+", "1", line.removeprefix("$ "))):
            if start := re.match(r"\s*(?:[A-Z_]+=\S* )*(?=python |accelerate launch )", part):
                found.append(tuple(shlex.split(part[start.end() :], comments=True)))
    return found


class Read(Exception):
    """Carries what a parser has not known out of a script."""


def check_script(module: str, words: list[str], num_processes: int):
    """Fail unless the parser of a script or module accepts the words; nothing of it is run."""
    parse_known_args = argparse.ArgumentParser.parse_known_args

    def read_and_leave(self, args=None, namespace=None):
        raise Read(parse_known_args(self, args, namespace)[1])

    script = importlib.import_module(module)
    if hasattr(script, "__path__"):  # a package, which `python -m` runs by this name
        script = importlib.import_module(f"{module}.__main__")
    if module in ("predict", "app"):
        script = importlib.import_module(f"trainkit.{module}")
    source = Path(script.__file__).read_text()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # @FILE is read from there
        if hasattr(script, "Config"):
            config = parse(script.Config, words)
            if isinstance(config, TrainingConfig):
                assert config.find_unread() == []
                config.set_unset(getattr(script, "LARGE", {}))  # as load_data does
                assert config.find_problems(num_processes) == []
            return
        if "Parser(" not in source:
            assert words == [], f"{module} reads no arguments"
            return
        patch.setattr(sys, "argv", [module, *words])
        patch.setattr(argparse.ArgumentParser, "parse_known_args", read_and_leave)
        with pytest.raises(Read) as left:
            script.main()
    (unknown,) = left.value.args
    if "parse_known_args" in source:  # it hands the rest on
        check_script("train_mnist", unknown, num_processes)
    else:
        assert unknown == []


@pytest.mark.parametrize(
    "words",
    sorted({words for path in PAGES for words in commands(path)}),
    ids=lambda words: " ".join(words)[:90],
)
def test_every_command_of_the_pages_would_be_understood(words, pytestconfig):
    num_processes, words = 1, [word for word in words if word != "..."]
    if words[0] == "accelerate":
        if not any(word == "-m" or word.endswith(".py") for word in words):
            words.append("train_mnist.py")  # the page speaks of the launcher's part alone
        launch = launch_command_parser().parse_args(words[2:])
        if launch.config_file is not None:
            num_processes = num_processes_of(launch.config_file)
        words = ["python", *["-m"] * bool(launch.module), launch.training_script]
        words += launch.training_script_args
    if words[1] != "-m":
        assert (ROOT / words[1]).is_file(), f"there is no {words[1]}"
        words[1:2] = ["-m", words[1].removesuffix(".py").replace("/", ".")]
    module, *flags = words[2:]
    assert importlib.util.find_spec(module), f"there is no {module}"
    if module == "pytest":
        known, unknown = pytestconfig._parser.parse_known_and_unknown_args(flags)
        assert unknown == []
        assert all((ROOT / name).exists() for name in known.file_or_dir), known.file_or_dir
        marks = [line.split(":")[0] for line in pytestconfig.getini("markers")]
        assert not known.markexpr or known.markexpr in marks, known.markexpr
    elif module != "trainkit.tools.ray":  # tests/test_ray.py starts it, where there is Ray
        check_script(module, flags, num_processes)


def test_the_table_has_every_yaml_and_without_a_flag_the_scripts_fit_its_processes():
    rows = table((ROOT / "docs" / "yamls.md").read_text())[2:]
    listed = {name: row[1] for row in rows for name in code_spans(row[0])}
    assert listed.keys() == YAMLS.keys()
    for name, file in YAMLS.items():
        num_processes = num_processes_of(file)
        assert str(num_processes) in numbers(listed[name]), name
        for script in ("train_mnist", "train_regression"):
            check_script(script, [], num_processes)


def test_the_pictures_show_what_is_printed_today(
    small_mnist, run_main, tmp_path, monkeypatch, capsys
):
    """That of the page: tests/test_app.py, in a browser."""
    monkeypatch.chdir(tmp_path)
    flags = "--batch-size 128 --epochs 3 --pictures --run-dir runs/mnist"
    run_main("train_mnist", "--dataset", small_mnist, flags)
    printed = (
        capsys.readouterr().out.replace(str(small_mnist), "data/mnist").replace(f"{ROOT}/", "")
    )
    pictures = ROOT / "docs" / "pictures"
    shown = (pictures / "terminal.txt").read_text().replace("threads", "thread")
    assert without_numbers(f"$ python train_mnist.py\n{printed}") == without_numbers(shown), (
        "python -m benchmarks.pictures"
    )
    for name in ("terminal", "app"):  # the text beside a picture is the text that was drawn
        with Image.open(pictures / f"{name}.png") as picture:
            assert picture.text["Description"] == (pictures / f"{name}.txt").read_text(), name


def test_the_loop_that_is_shown_is_that_of_the_script():
    (shown,) = (text for kind, text in FENCE.findall(README.read_text()) if kind == "python")
    script = (ROOT / "train_mnist.py").read_text()
    assert textwrap.indent(shown, " " * 8).rstrip() in script


def test_the_file_map_is_the_repository():
    rows = table((ROOT / "CONTRIBUTING.md").read_text())[2:]
    listed = {name for row in rows for name in code_spans(row[0])}
    assert all((ROOT / name).exists() for name in listed), listed
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    listed |= {".", "README", "LICENSE", "trainkit/__init__"}
    for name in tracked.stdout.splitlines():  # none if this is not a git checkout
        assert name.startswith((*listed,)), f"{name} is not in the file map"


def test_the_four_figures_are_rounded_from_a_record():
    """Those with a decimal point; the Chinese page has the same numbers."""
    decimals = re.compile(r"\d+\.\d+")
    known = [*map(float, decimals.findall(RECORDS.read_text()))]
    four = README.read_text().partition("\n## Four figures\n")[2].partition("\n## ")[0]
    assert table(four)
    for row in table(four):
        for figure in decimals.findall(re.sub("`.*?`", "", row[-1])):
            num_places = len(figure.partition(".")[2])
            assert any(f"{number:.{num_places}f}" == figure for number in known), (figure, row)


def exists(dotted: str) -> bool:
    """Can `trainkit.room.module.name` be imported?"""
    # The first needs Ray, the second acts when it is imported: other tests start them.
    if dotted.startswith(("trainkit.tools.ray", "trainkit.tools.launch")):
        return True
    names = dotted.split(".")
    for number in range(len(names), 0, -1):
        try:
            found = importlib.import_module(".".join(names[:number]))
        except ImportError:
            continue
        for name in names[number:]:
            found = getattr(found, name, None)
        return found is not None
    return False


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_what_a_page_names_is_there(path):
    """Names that are imported, modules, files, and the tests that hold a promise."""
    text = path.read_text()
    tests = "".join(file.read_text() for file in (ROOT / "tests").rglob("*.py"))
    for module, names in re.findall(r"from (trainkit[\w.]*) import ([\w, ]+)", text):
        assert all(exists(f"{module}.{name.strip()}") for name in names.split(",")), (module, names)
    for names, module in re.findall(
        r"((?:`\w+`(?:, | and )?)+) (?:is|are) in `(trainkit[\w.]*)`", text
    ):
        assert all(exists(f"{module}.{name}") for name in code_spans(names)), (module, names)
    for dotted in re.findall(r"`(trainkit(?:\.\w+)+)`", text):
        assert exists(dotted), dotted
    for name in re.findall(
        r"(?<![\w/])(?:trainkit|tests|benchmarks|examples)/[\w/.-]+\.(?:py|md|yaml|ipynb)", text
    ):
        assert (ROOT / name).is_file(), name
    for name in re.findall(r"`(test_\w+_\w+_\w+)`", text):
        assert f"def {name}(" in tests, name


def test_the_map_has_one_short_row_for_each_room():
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## File map\n")[2]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert [names for names, what in rows if len(what.split()) > 30] == []
    rooms = [path.parent.name for path in (ROOT / "trainkit").glob("*/__init__.py")]
    for room in rooms:
        assert sum(f"`trainkit/{room}/`" in names for names, _ in rows) == 1, room


def test_the_walks_name_files_and_functions_that_are_there():
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## Four walks\n")[2]
    walks = re.findall(r"^\*\*One (\w+)\*\*.*?\n\n(.*?)\n\n", text, re.DOTALL | re.MULTILINE)
    most = {"batch": 5, "loss": 5, "save": 5, "resume": 6}
    assert [name for name, _ in walks] == [*most]
    for walk, stations in walks:
        assert len(stations.splitlines()) <= most[walk]
        for station in stations.splitlines():
            path, names = re.fullmatch(r"\d\. `([\w/.]+)` \((.*?)\): .*", station).groups()
            source = (ROOT / path).read_text()
            for name in code_spans(names):
                assert re.search(rf"(def|class) {name.split('.')[-1]}\b", source), (path, name)
