"""What a finished run says of texts."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainkit.reading.predictor import Classifier
from trainkit.texts import bags, encoders, texts


class TextPredictor(Classifier):
    """Classifies texts: tokens, int64 (n, longest), and their lengths, as collate of the script.

    A file is a .txt file, of which each line is a text, or a table.
    """

    options = ("encoding", "sheet", "header_row")

    def open(self, script: Any, run_dir: Path) -> None:
        self.collate = script.collate
        if self.metadata["encoder"] is None:
            self.tokenize = partial(bags.make_bags, num_bits=self.metadata["num_bits"])
        else:
            options = {"max_tokens": self.metadata["max_tokens"]}
            options["tokenizer"] = encoders.load_tokenizer(run_dir / "tokenizer")
            self.tokenize = partial(texts.tokenize, **options)

    def forward(self, inputs: Any) -> torch.Tensor:
        logits = self.model(inputs.tokens, inputs.lengths, inputs.pieces)
        return (logits / self.calibration["temperature"]).softmax(1)

    def read(self, text: str) -> tuple[Any, str]:
        """Return a text as inputs of forward (n = 1), and no doubt about it."""
        return self.collate([(tokens, 0) for tokens in self.tokenize([text])]), ""

    def predict_file(self, path: Path, **options: Any) -> str:
        """Return a line for each text of the file: its number, and the answer of Classifier."""
        options = self.metadata.get("read_options", {}) | options
        lines = texts.read_texts(path, self.metadata.get("text"), **options)
        answers = [
            f"{path}:{number}: {self.describe(self(self.read(line)[0])[0])}"
            for number, line in enumerate(lines, 1)
            if line
        ]
        return "\n".join(answers) or f"{path}: no text"
