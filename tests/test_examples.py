"""The scripts of examples/ as people take them: where they lie, changed as the docs say, short.

Their numbers: tests/test_worlds.py.
"""

import ast
import re
import shutil
import subprocess
import sys

from conftest import ROOT, rows, run


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


def test_what_a_command_of_a_script_names_is_quoted_for_a_shell():
    """Such as the one after `next:`, in a run folder with blanks."""
    named = []
    for path in [*ROOT.glob("*.py"), *ROOT.glob("examples/*.py"), *ROOT.glob("trainkit/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.unparse(node) if isinstance(node, ast.JoinedStr) else ""
            if re.match(r"""f['"]+( --|python (\w+/)?\w+\.py)""", text):
                values = [value for value in node.values if isinstance(value, ast.FormattedValue)]
                named += [ast.unparse(value.value) for value in values]
    assert len(named) >= 4
    assert all(text.startswith(("shlex.quote(", "typed(")) for text in named), named
