"""Use a trained model in the browser, on this machine and without a network.

python app.py runs/mnist         draw, or choose a picture file
python app.py runs/regression    a field for each column, and the prediction
python app.py runs/text          a place for a text, and the probability of each class

`python -m trainkit.app` is the same in a folder without app.py, after `pip install .`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainkit import predict, startup

from tyro.conf import Positional

from trainkit.config import parse
from trainkit.tools import page


@dataclass
class Config:
    run_dir: Positional[Path] = Path("runs/mnist")
    """of a finished run"""
    script: Path | None = None
    """the script that made the run, if it is not beside predict.py or in examples/"""
    host: str | None = None
    """0.0.0.0: for other machines too (default: GRADIO_SERVER_NAME, or 127.0.0.1)"""
    port: int | None = None
    """(default: the first free one from 7860 on)"""


def main(argv: Sequence[str] | None = None) -> None:
    """Serve the page of a run."""
    config = parse(Config, argv)
    predictor = predict.load_run(config.run_dir, config.script)
    page.serve(predictor, config.run_dir, config.host, config.port)


if __name__ == "__main__":
    startup.run(main)
