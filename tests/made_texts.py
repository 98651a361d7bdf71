"""Texts of three classes, and a small encoder that knows their words."""

import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch

WORDS = {"sport": "ball goal team", "food": "bread salt soup", "art": "paint song stage"}
LINES = [
    (f"{' '.join([*words.split(), 'and'] * (1 + n % 4))} number {n}", label)
    for n in range(46)
    for label, words in WORDS.items()
][:136]


def make_base(folder: Path):
    """A BERT with one layer, random weights and dropout; below, in float64; and lines.csv."""
    pd.DataFrame(LINES, columns=["text", "label"]).to_csv(folder / "lines.csv", index=False)
    transformers = pytest.importorskip("transformers")
    known = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "and", *" ".join(WORDS.values()).split()]
    vocabulary = {word: n for n, word in enumerate(known)}
    tokenizer = transformers.BertTokenizer(vocab=vocabulary, model_max_length=40)
    tokenizer.save_pretrained(folder)
    config = transformers.BertConfig(
        hidden_size=16,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=len(known),
        num_hidden_layers=1,
        max_position_embeddings=40,
    )
    torch.manual_seed(0)
    model = transformers.BertModel(config)
    model.save_pretrained(folder)
    shutil.copytree(folder, folder / "double")
    model.double().save_pretrained(folder / "double")
