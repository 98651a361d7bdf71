"""Ask the language model of a finished run, with prompts as it was trained to answer them.

python -m trainkit.language.ask runs/finetune "What does this function do?" "And this one?"
python -m trainkit.language.ask runs/finetune

Without a prompt each line that is typed, or piped in, is one. An answer knows nothing of those
before it. Chat template, system turn and date are those of the training.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
from tyro.conf import Positional

from trainkit.config import Count, find_broken_rules, parse
from trainkit.errors import UsageError, as_usage_error
from trainkit.language.conversations import answer
from trainkit.language.templates import Chat
from trainkit.launch import startup
from trainkit.store.records import read_run_json
from trainkit.text import printable


@dataclass
class Config:
    run_dir: Positional[Path]
    """folder of a finished run of examples/finetune.py or examples/preference.py"""
    prompts: Positional[list[str]] = field(default_factory=list)
    """what to answer; none: each line of the input"""
    max_new_tokens: Count = 200
    """of an answer"""


def load_model(run_dir: Path) -> tuple[Any, Any]:
    """Return the model and the tokenizer of a run folder. Raises UsageError."""
    folder = run_dir / "pretrained"
    if not (folder / "tokenizer_config.json").is_file():
        raise UsageError(
            f"{run_dir} is not a finished run of a language model: it has no "
            "pretrained/tokenizer_config.json"
        )
    with as_usage_error("to ask a language model needs `pip install transformers`"):
        from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    startup.attend_without_cudnn()
    with as_usage_error(f"{folder} cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        # transformers gives an adapter that of its base, which may not know where an answer ends.
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    return model, tokenizer


def main(argv: Sequence[str] | None = None) -> None:
    """Print an answer to each prompt."""
    config = parse(Config, argv)
    if problems := find_broken_rules(config):
        raise UsageError("; ".join(problems))
    model, tokenizer = load_model(config.run_dir)
    started = read_run_json(config.run_dir)["arguments"]
    day = started.get("day")
    chat = Chat(tokenizer, date.fromisoformat(day) if day else None)
    if not config.prompts and sys.stdin.isatty():
        print("type a prompt and press Enter; Ctrl-D ends", flush=True)
    for prompt in filter(None, map(str.strip, config.prompts or sys.stdin)):
        tokens = chat.ask(prompt, started.get("system"))
        print(printable(answer(model, tokenizer, tokens, config.max_new_tokens)), flush=True)


if __name__ == "__main__":
    startup.run(main, prints_results=True)
