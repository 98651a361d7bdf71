"""The suite itself: what hangs is seen, and no order of the tests hangs."""

import subprocess
import sys

import pytest
from conftest import ROOT


def run_pytest(*words: str, **options: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, **options)


@pytest.mark.slow
def test_a_rehearsal_after_a_fresh_process_ends():
    """Once the rehearsal's tests waited for ever for a server that such a process held open."""
    files = "tests/test_startup.py", "tests/test_rehearse.py"
    chosen = "freed_memory or settings_about_numbers or a_right_script_keeps"
    done = run_pytest("-n", "0", *files, "-k", chosen, cwd=ROOT)
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout + done.stderr


def test_a_test_that_hangs_ends_the_run_with_its_stacks(tmp_path):
    (tmp_path / "test_it.py").write_text("import time\n\n\ndef test_it():\n    time.sleep(50)\n")
    limit = "-o", "faulthandler_timeout=1"
    done = run_pytest("-n", "2", "-c", str(ROOT / "pyproject.toml"), *limit, cwd=tmp_path)
    assert done.returncode != 0 and "test_it.py" in done.stderr, done.stdout + done.stderr
    assert "Timeout" in done.stderr, done.stderr
