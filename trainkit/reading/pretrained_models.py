"""What more than one wing asks of models and tokenizers of transformers."""

from collections.abc import Iterable
from typing import Any

import torch

from trainkit.errors import UsageError


def without_dropout(config: Any) -> Any:
    """Set all probabilities of dropout in the config of a transformers model to 0; return it."""
    for part in (config, config.get_text_config()):
        values = part.to_dict().items()
        part.update({n: 0.0 for n, value in values if "drop" in n and isinstance(value, float)})
    return config


def check_embedding(size: int, tokenizer: Any, tokens: Iterable[torch.Tensor], remedy: str) -> None:
    """Raise UsageError if an embedding of this size has no row for one of these tokens, int64."""
    highest = max((int(row.max()) for row in tokens if len(row)), default=-1)
    if highest >= size:
        name = tokenizer.convert_ids_to_tokens(highest)
        raise UsageError(
            f"the embedding of --base has {size} tokens and its tokenizer {len(tokenizer)}, of "
            f"which number {highest}, {name}, is in the data: {remedy}"
        )
