"""Load a model for training, and write folders that from_pretrained of a library can load."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from trainkit.config import Count, MayChange, ReadOnlyIf, TrainingConfig
from trainkit.errors import UsageError, as_usage_error
from trainkit.language.losses import allow_parts
from trainkit.language.packing import Packed, check_packing
from trainkit.launch.startup import attend_without_cudnn, keep_memory
from trainkit.reading.pretrained_models import check_embedding, without_dropout

if TYPE_CHECKING:  # predict.py uses this room without the loop
    from trainkit.run.run import Run

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}  # by the YAML's mixed_precision


@dataclass
class LanguageConfig(TrainingConfig):
    """The flags of a script that trains a language model further."""

    base: MayChange[str] = "runs/docstrings/base"  # a folder, or a model of the Hub
    data: MayChange[str] = "runs/docstrings/pairs.jsonl"  # JSON, Parquet, a folder, or a Hub id
    eval_data: MayChange[str | None] = None  # to evaluate on (default: a test split, or a tenth)
    lora: Count | None = None  # rank: freeze the model and train matrices beside it
    # With --lora: keep the frozen matrices as numbers of 4 bits.
    load_4bit: Annotated[bool, ReadOnlyIf("lora")] = False
    # With --lora: also write the model with what was trained, as one.
    merge: Annotated[MayChange[bool], ReadOnlyIf("lora")] = False
    # Write pretrained/ as trained, not in the base's type.
    save_float32: Annotated[MayChange[bool], ReadOnlyIf("lora", (None,))] = False
    max_tokens: Count = 512  # of prompt and answer, which are truncated to this many
    day: MayChange[str | None] = None  # that a chat template writes (default: of the first start)


def load_base(config: LanguageConfig, resize_embeddings: bool = False, dropout: bool = True) -> Any:
    """Return the causal language model of --base, in evaluation mode.

    What is trained is float32. What --lora freezes has the type of the base, or with --load-4bit
    is NF4 numbers (arXiv 2305.14314) that are computed with in the type of the YAML.

    Args:
        resize_embeddings: make rows for tokens of the tokenizer that the model lacks.
        dropout: False turns it off, also in training; the written config keeps it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    attend_without_cudnn()
    options: dict[str, Any] = {"dtype": "auto" if config.lora else torch.float32}
    if config.load_4bit:
        options = _settings_of_4_bits(config)
        keep_memory(return_blocks=True)
    if not dropout:
        options["config"] = without_dropout(AutoConfig.from_pretrained(config.base))
    model = AutoModelForCausalLM.from_pretrained(config.base, **options)
    if not dropout:
        model.config = AutoConfig.from_pretrained(config.base)  # to be written
    for part in model.modules() if config.load_4bit else ():
        # Else, on a CPU with AVX512-BF16, layers that were evaluated once compute in bf16 and pass
        # no gradient on.
        part.support_avx512bf16_for_cpu = False
    num_tokens = len(AutoTokenizer.from_pretrained(config.base)) if resize_embeddings else 0
    if num_tokens > len(model.get_input_embeddings().weight):
        model.resize_token_embeddings(num_tokens)
    allow_parts(model)
    return model


def _settings_of_4_bits(config: LanguageConfig) -> dict[str, Any]:
    """Return what from_pretrained takes for --load-4bit."""
    from transformers import BitsAndBytesConfig

    state = AcceleratorState()
    if state.is_fsdp2:
        raise UsageError(
            "--load-4bit: a YAML that shards cannot divide numbers of 4 bits: leave one out"
        )
    dtype = DTYPES.get(state.mixed_precision, torch.float32)
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"dtype": dtype, "quantization_config": settings}


def add_adapter(model: Any, rank: int) -> Any:
    """Freeze a model and put matrices of this rank beside all its linear layers (LoRA)."""
    with as_usage_error("--lora needs `pip install peft`"):
        from peft import LoraConfig, get_peft_model
    lora = LoraConfig(
        task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules="all-linear"
    )
    return get_peft_model(model, lora)


def fit_to_data(accelerator: Accelerator, model: Any, sets: Any) -> None:
    """Let generate stop after the token that ends an answer, here and in the written folder.

    Raises UsageError if the embedding has no row for a token of these sets, of load_chats or
    load_pairs, or if the model does not keep packed samples apart. Every process must call this,
    before accelerator.prepare.
    """
    remedy = (
        "take a tokenizer without it, or give examples/finetune.py --resize-embeddings, which "
        "trains rows for the new tokens"
    )
    rows = (row for rows in (sets.train_set, sets.eval_set) for row in rows)
    # A pair has two samples.
    samples = (x for row in rows for x in (row[:2] if isinstance(row[0], tuple) else [row]))
    size = len(model.get_input_embeddings().weight)
    check_embedding(size, sets.tokenizer, (tokens for tokens, *_ in samples), remedy)
    if isinstance(sets.train_set, Packed):
        check_packing(accelerator, model)
    config = model.generation_config
    ends = config.eos_token_id
    ends = [ends] if isinstance(ends, int) else (ends or [])
    if sets.end is not None and sets.end not in ends:
        config.eos_token_id = [*ends, sets.end]


def write_pretrained(
    run: "Run", tokenizer: Any, base: str, merge: bool = False, save_float32: bool = False
) -> None:
    """Write RUN_DIR/pretrained: the weights of model.safetensors and the tokenizer.

    The weights of a whole model are written in the type of the base, with save_float32 as they were
    trained. Of a PeftModel it is the adapter; with `merge` RUN_DIR/merged has the whole model too.
    Every process must call this, before run.finish(). The first model of the run and the tokenizer,
    or any processor, must have save_pretrained.
    """
    from transformers import AutoConfig

    model = run.models[0]
    folder = run.config.run_dir / "pretrained"
    path = run.config.run_dir / "model.safetensors"
    is_adapter = hasattr(model, "peft_config")
    dtype = None if save_float32 or is_adapter else AutoConfig.from_pretrained(base).dtype

    def write() -> None:
        if is_adapter:
            model.save_pretrained(folder, state_dict=load_file(path))
            model.generation_config.save_pretrained(folder)  # which peft omits
        else:
            write_weights(model, path, folder, dtype)
        tokenizer.save_pretrained(folder)
        name = f", in {str(dtype).removeprefix('torch.')}" if dtype else ""
        print(f"for from_pretrained: {folder}{name}", flush=True)
        if merge and is_adapter:
            _write_merged(model.generation_config, tokenizer, base, folder)

    run.results.write_pretrained(write)


def write_weights(model: Any, path: Path, folder: Path, dtype: torch.dtype | None) -> None:
    """Write the weights of a file in this type, None: as they are; those that are tied once."""
    weights = load_file(path)
    kept = next(weight.dtype for weight in weights.values() if weight.is_floating_point())
    options = {"config": model.config, "state_dict": weights, "dtype": dtype or kept}
    written = type(model).from_pretrained(None, **options)
    written.generation_config = model.generation_config
    written.save_pretrained(folder)


def _write_merged(settings: Any, tokenizer: Any, base: str, adapter: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    model.generation_config = settings
    folder = adapter.with_name("merged")
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    print(f"with the adapter merged into its weights: {folder}", flush=True)
