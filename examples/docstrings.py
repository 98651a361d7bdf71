"""Make a tiny model and pairs to try finetune.py and preference.py in seconds, without a network.

python examples/docstrings.py    makes base, pairs.jsonl and preferred.jsonl in runs/docstrings

A prompt is the first line of a function in Python's own standard library, and its answer is the
first line of the function's docstring. The weights are random.
"""

import json
import re
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # trainkit/ lies beside examples/

from trainkit.config import parse

PAIR = re.compile(r'^ *(def [^\n]+:)\n +"""(\S[^\n]+?)(?:"""|\n)', re.MULTILINE)
TEMPLATE = """{% for each in messages %}<{{ each.role }}>{{ each.content }}<end>{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""


@dataclass
class Config:
    folder: Path = Path("runs/docstrings")  # made here
    layers: int = 2  # of the model
    width: int = 128  # a multiple of 32
    vocabulary: int = 1024  # at least 1024


def find_pairs() -> list[dict[str, str]]:
    """Return prompts and answers, sorted, with each prompt once."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))
    answers = {m[1]: m[2] for file in files for m in PAIR.finditer(file.read_text("utf-8"))}
    return [{"prompt": prompt, "answer": answers[prompt]} for prompt in sorted(answers)]


def make_base(folder: Path, texts: list[str], config: Config) -> None:
    """Write a Llama with random weights, and a tokenizer trained on these texts."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    parts = Tokenizer(models.BPE())
    parts.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    parts.decoder = decoders.ByteLevel()
    special = ["<end>", "<user>", "<assistant>"]
    letters = pre_tokenizers.ByteLevel.alphabet()
    learn = {"vocab_size": 1024, "special_tokens": special, "initial_alphabet": letters}
    parts.train_from_iterator(texts, trainers.BpeTrainer(**learn, show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=parts, eos_token="<end>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    llama = LlamaConfig(
        vocab_size=config.vocabulary,
        hidden_size=config.width,
        intermediate_size=3 * config.width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.width // 32,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(llama).save_pretrained(folder)


def main(argv: Sequence[str] | None = None) -> None:
    config = parse(Config, argv)
    pairs = find_pairs()
    make_base(config.folder / "base", [text for pair in pairs for text in pair.values()], config)
    lines = "".join(f"{json.dumps(pair)}\n" for pair in pairs)
    (config.folder / "pairs.jsonl").write_text(lines, "utf-8")
    # Of two answers the one that belongs to the prompt is preferred.
    others = [pair["answer"] for pair in pairs[1:] + pairs[:1]]
    preferred = [
        {"prompt": pair["prompt"], "chosen": pair["answer"], "rejected": other}
        for pair, other in zip(pairs, others, strict=True)
    ]
    lines = "".join(f"{json.dumps(row)}\n" for row in preferred)
    (config.folder / "preferred.jsonl").write_text(lines, "utf-8")
    print(f"{len(pairs)} pairs and a model in {config.folder}")


if __name__ == "__main__":
    main()
