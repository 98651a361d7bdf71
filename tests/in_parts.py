"""examples/finetune.py with a limit so low that all losses are computed in parts, for tests."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from trainkit import token_losses

import torch.nn.functional as F

from examples import finetune


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    token_losses.MAX_LOGITS = 2**13  # 8 tokens of examples/docstrings.py's vocabulary

    def whole(logits: Any, *args: Any, **how: Any) -> Any:
        assert logits.numel() <= token_losses.MAX_LOGITS
        return F.cross_entropy(logits, *args, **how)

    token_losses.F = SimpleNamespace(linear=F.linear, cross_entropy=whole)
    return finetune.main(argv)
