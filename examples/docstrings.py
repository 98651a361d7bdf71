"""Something to try finetune.py with, made in seconds without a network: a tiny model, and pairs.

python examples/docstrings.py    makes runs/docstrings/base and runs/docstrings/pairs.jsonl

A prompt is the head of a function of Python's own standard library, its answer the first line of
the function's docstring. The weights are random.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # trainkit/ lies beside examples/

from trainkit import arguments

PAIR = re.compile(r'^ *(def [^\n]+:)\n +"""(\S[^\n]+?)(?:"""|\n)', re.MULTILINE)
TEMPLATE = """{% for each in messages %}<{{ each.role }}>{{ each.content }}<end>{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""


def find_pairs() -> list[dict[str, str]]:
    """Prompts and answers, sorted, each prompt once."""
    files = sorted(Path(argparse.__file__).parent.glob("[a-z]*.py"))
    found = {m[1]: m[2] for file in files for m in PAIR.finditer(file.read_text("utf-8"))}
    return [{"prompt": prompt, "answer": found[prompt]} for prompt in sorted(found)]


def make_base(folder: Path, texts: list[str], args: argparse.Namespace) -> None:
    """Write a Llama with random weights, and a tokenizer that has learned these texts."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    parts = Tokenizer(models.BPE())
    parts.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    parts.decoder = decoders.ByteLevel()
    special, letters = ["<end>", "<user>", "<assistant>"], pre_tokenizers.ByteLevel.alphabet()
    learn = {"vocab_size": 1024, "special_tokens": special, "initial_alphabet": letters}
    parts.train_from_iterator(texts, trainers.BpeTrainer(**learn, show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=parts, eos_token="<end>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.width,
        intermediate_size=3 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.width // 32,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments.Parser(__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/docstrings"), help="made here")
    parser.add_argument("--layers", type=int, default=2, help="of the model")
    parser.add_argument("--width", type=int, default=128, help="a multiple of 32")
    parser.add_argument("--vocabulary", type=int, default=1024, help="at least 1024")
    args = parser.parse_args(argv)
    pairs = find_pairs()
    make_base(args.folder / "base", [text for pair in pairs for text in pair.values()], args)
    lines = "".join(f"{json.dumps(pair)}\n" for pair in pairs)
    (args.folder / "pairs.jsonl").write_text(lines, "utf-8")
    print(f"{len(pairs)} pairs and a model in {args.folder}")


if __name__ == "__main__":
    main()
