"""The scripts of examples/ as people take them: where they lie, changed as the docs say, short.

Their numbers: tests/test_worlds.py.
"""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from conftest import ROOT, rows, run

import train_regression
from trainkit.store import records
from trainkit.store.records import page_command


def test_an_example_starts_where_it_lies(tmp_path):
    """From any folder, without anything installed or exported."""
    flags = f"--num-lines 109 --stop-after-steps 1 --no-pictures --run-dir {tmp_path}/run"
    ended = run("examples/text.py", flags, cwd=tmp_path, env={"PYTHONPATH": ""})
    assert f"\nnext: python {ROOT}/app.py {tmp_path}/run\n" in ended.stdout


def test_a_copy_in_another_folder_ends_with_the_error_that_the_docs_name(tmp_path):
    """Without `pip install .`; -S leaves out what is installed here."""
    docs = (ROOT / "docs" / "loop.md").read_text()
    paths = [*ROOT.glob("*.py"), *ROOT.glob("examples/*.py")]
    scripts = [path for path in paths if "startup.run(main)" in path.read_text()]
    assert len(scripts) >= 11
    for path in scripts:
        copy = shutil.copy(path, tmp_path)
        ended = subprocess.run([sys.executable, "-ES", copy], capture_output=True, text=True)
        assert ended.returncode == 1
        assert f"`{ended.stderr.splitlines()[-1]}`" in docs, (path, ended.stderr)
        assert "# pip install ." in ended.stderr or path.stem in ("predict", "app"), path


def test_the_five_edits_of_the_docs_make_a_script_that_learns(fork_main, tmp_path):
    """What docs/loop.md shows is done to a copy of examples/text.py."""
    docs = (ROOT / "docs" / "loop.md").read_text()
    script = (ROOT / "examples" / "text.py").read_text()
    blocks = re.findall(r"```python\n(?:@dataclass\n)?(def|class) (\w+)(.*?)```", docs, re.DOTALL)
    blocks = [block for block in blocks if re.search(rf"^(def|class) {block[1]}\b", script, re.M)]
    assert len(blocks) == 4
    for kind, name, text in blocks:
        old = re.compile(rf"^(?:def|class) {name}\b.*?(?=\n\n\n)", re.DOTALL | re.MULTILINE)
        (found,) = old.findall(script)
        script = script.replace(found, f"{kind} {name}{text.rstrip()}")
    (lines,) = re.findall(r"```diff\n(.*?)```", docs, re.DOTALL)
    changes = re.findall(r"^-(.*)\n(?:\+(.*)\n)?", lines, re.MULTILINE)  # of some only the -
    assert sum(1 + bool(new) for _, new in changes) == len(lines.splitlines())
    for old, new in changes:
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    (tmp_path / "rows.py").write_text(script)
    flags = f"--run-dir {tmp_path}/run --no-pictures"
    done = fork_main(tmp_path / "rows.py", flags, world=2).finished()
    assert "\nnext: " not in done  # as app.py has no page for it
    assert rows(tmp_path / "run")[-1]["eval_accuracy"] > 0.8


def test_the_command_after_next_is_quoted_for_a_shell(tmp_path, monkeypatch):
    """From the folder where it is typed."""
    about = {"input": "picture"}
    monkeypatch.chdir(ROOT)
    config = train_regression.Config(run_dir=Path("my runs/1"))
    assert page_command(config, about) == "python app.py 'my runs/1'"
    assert page_command(config, {}) == ""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(records, "CLONE", None)
    words = shlex.split(page_command(config, about))
    assert words[1:4] == ["-m", "trainkit.app", "my runs/1"]
    assert words[4:] == ["--script", f"{ROOT}/train_regression.py"]
