"""Draw the plots of a finished run, or compare runs, from the files in their folders alone.

python -m trainkit.tools.plots runs/mnist         draws the plots of one run again
python -m trainkit.tools.plots runs/a runs/b      compares the settings and the metrics of runs
python -m trainkit.tools.plots runs/sweep        compares the runs in a folder, the best one first
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from trainkit.config import parse
from trainkit.errors import UsageError, as_usage_error
from trainkit.launch import startup
from trainkit.plots import figures


@dataclass
class Config:
    run_dirs: Positional[list[Path]]
    """one, or several to compare, or a folder that holds several"""


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the plots of one run folder, or compare several."""
    run_dirs = []
    for path in parse(Config, argv).run_dirs:
        inside = sorted(file.parent for file in path.glob("*/metrics.jsonl"))
        is_run = (path / "metrics.jsonl").exists()
        run_dirs += inside if inside and not is_run else [path]
    for run_dir in run_dirs:
        if not (run_dir / "metrics.jsonl").exists():
            raise UsageError(f"{run_dir} is not a run folder: it has no metrics.jsonl")
    if not run_dirs:
        raise UsageError("name a run folder, several, or a folder that holds several")
    with as_usage_error(f"{' and '.join(map(str, run_dirs))} cannot be drawn"):
        if len(run_dirs) == 1:
            drawn = figures.draw_run(run_dirs[0])
            if not drawn:
                raise UsageError(f"{run_dirs[0]} cannot be drawn: the reasons are above")
            print(*drawn, sep="\n")
        else:
            from trainkit.tools.compare import compare_runs  # here: its evaluate may take 3 s

            print(compare_runs(run_dirs))


if __name__ == "__main__":
    startup.run(main, prints_results=True)
