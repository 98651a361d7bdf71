"""Pretrained encoders of texts, those of transformers.

The configuration of one is kept as JSON, so that a run needs only its own folder. No
code that comes with a model is run: the classes are those of transformers, and settings that would
fetch programs are left out of the configuration.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainkit.errors import UsageError, as_usage_error
from trainkit.launch.startup import attend_without_cudnn
from trainkit.reading.paths import read_here_or_from_hub
from trainkit.reading.pretrained_models import check_embedding, without_dropout
from trainkit.reading.recall import describe_recall

if TYPE_CHECKING:  # predict.py uses this room without the loop
    from trainkit.run.run import Run

MAX_TOKENS = 128
# Names of code and of other files, and what the model does not depend on.
LEFT_OUT = {"auto_map", "quantization_config", "architectures", "id2label", "label2id", "dtype"}
LEFT_OUT |= {"transformers_version", "_name_or_path", "problem_type", "torch_dtype"}


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration without the names of code, also in the parts it consists of."""

    def keep(part: dict[str, Any]) -> dict[str, Any]:
        names = [n for n in part if n not in LEFT_OUT and not n.endswith("implementation")]
        return {name: part[name] for name in names}

    return json.loads(json.dumps(values), object_hook=keep)


def read_encoder(config: Any) -> tuple[dict[str, Any] | None, Any]:
    """Return the configuration of --base as JSON, and its tokenizer; set --max-tokens if UNSET.

    All probabilities of dropout are 0, because its masks would depend on the number of processes.
    Without --base both are None. Raises UsageError.
    """
    if config.base is None:
        return None, None
    with as_usage_error("--base needs `pip install transformers`"):
        from transformers import AutoConfig
    with read_here_or_from_hub(config.base, f"--base {config.base}"):
        made = AutoConfig.from_pretrained(config.base, trust_remote_code=False)
        made = without_dropout(made)
        tokenizer = load_tokenizer(config.base)
        values = plain(json.loads(made.to_json_string()) | {"model_type": made.model_type})
    positions = getattr(made, "max_position_embeddings", None) or 0
    limit = min(tokenizer.model_max_length, positions if positions > 0 else math.inf)
    config.set_unset({"max_tokens": min(limit, MAX_TOKENS)})
    if config.max_tokens > limit:
        raise UsageError(f"--max-tokens {config.max_tokens}: {config.base} takes at most {limit}")
    return values, tokenizer


def check_tokens(encoder: dict[str, Any] | None, tokenizer: Any, sets: Sequence[list]) -> None:
    """Raise UsageError if the encoder has no embedding for a token of these samples."""
    if size := (encoder or {}).get("vocab_size"):
        rows = (row for samples in sets for row, _ in samples)
        remedy = f"save the model after model.resize_token_embeddings({len(tokenizer)})"
        check_embedding(size, tokenizer, rows, remedy)


def load_tokenizer(folder: str | Path) -> Any:
    """Return the tokenizer of a folder or Hub id."""
    with as_usage_error(f"the tokenizer of {folder} cannot be read"):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def make_encoder(config: dict[str, Any], base: str | None = None) -> tuple[nn.Module, int]:
    """Make the encoder of a configuration, in float32; return it and the width of its states.

    base: where its weights are; None: they are random. It has no pooler, which would get no
    gradient. Raises UsageError, also if base lacks weights.
    """
    from transformers import CONFIG_MAPPING, AutoModel

    attend_without_cudnn()
    made = CONFIG_MAPPING[config["model_type"]].from_dict(plain(config))
    options = {"config": made, "trust_remote_code": False}
    if base is None:
        encoder = AutoModel.from_config(**options)
    else:
        with as_usage_error(f"--base {base} cannot be read"):
            options |= {"dtype": torch.float32, "output_loading_info": True}
            encoder, info = AutoModel.from_pretrained(base, **options)
        if missing := sorted(name for name in info["missing_keys"] if "pooler" not in name):
            what = f"{len(missing)} parts: {missing[0]} ..."
            raise UsageError(f"--base {base} has no weights for {what}")
    if made.is_encoder_decoder:
        encoder = encoder.get_encoder()
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None
    return encoder.train(), made.hidden_size  # from_pretrained returns it in evaluation mode


def write_results(run: "Run", tokenizer: Any) -> None:
    """Write RUN_DIR/tokenizer, unless it is None, for predict.py; print what was recognised.

    Call it on any process, when the run is over.
    """
    folder = run.config.run_dir
    if run.accelerator.is_main_process:
        print(describe_recall(folder), flush=True)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder / "tokenizer")
