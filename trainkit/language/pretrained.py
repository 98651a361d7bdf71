"""Load a model for training, and write folders that from_pretrained of a library can load."""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from trainkit.config import Count, MayChange, ReadOnlyIf, TrainingConfig
from trainkit.errors import UsageError, as_usage_error
from trainkit.launch.startup import attend_without_cudnn, keep_memory
from trainkit.reading.pretrained_models import check_embedding
from trainkit.store.records import read_run_json

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


def load_base(config: LanguageConfig, /, **options: Any) -> Any:
    """Return the causal language model of --base, in evaluation mode.

    What is trained is float32. What --lora freezes has the type of the base and is memory-mapped,
    so that the processes of a machine share it. With --load-4bit the matrices of its layers are
    NF4 numbers (Dettmers and others 2023, arXiv 2305.14314), and all is computed in the type of the
    YAML. Raises UsageError.
    """
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    attend_without_cudnn()
    if not config.load_4bit:
        dtype = "auto" if config.lora else torch.float32
        return AutoModelForCausalLM.from_pretrained(config.base, dtype=dtype, **options)
    state = AcceleratorState()
    if not config.lora:
        raise UsageError("--load-4bit freezes the weights of --base: give --lora a rank as well")
    if state.is_fsdp2:
        raise UsageError(
            "--load-4bit: a YAML that shards cannot divide numbers of 4 bits: leave one out"
        )
    with as_usage_error("--load-4bit needs `pip install bitsandbytes`"):
        import bitsandbytes  # noqa: F401
    dtype = DTYPES.get(state.mixed_precision, torch.float32)
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    options |= {"dtype": dtype, "quantization_config": settings}
    keep_memory(return_blocks=True)
    model = AutoModelForCausalLM.from_pretrained(config.base, **options)
    for part in model.modules():
        # Else, on a CPU with AVX512-BF16, layers that were evaluated once compute in bf16 and pass
        # no gradient on.
        part.support_avx512bf16_for_cpu = False
    return model


def add_adapter(model: Any, rank: int) -> Any:
    """Freeze a model and put matrices of this rank beside all its linear layers (LoRA)."""
    with as_usage_error("--lora needs `pip install peft`"):
        from peft import LoraConfig, get_peft_model
    lora = LoraConfig(
        task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules="all-linear"
    )
    return get_peft_model(model, lora)


def resize_embeddings(model: Any, base: str, is_frozen: bool) -> None:
    """Give the embedding rows for all tokens of the tokenizer of --base: the mean of the others."""
    from transformers import AutoTokenizer

    if is_frozen:
        raise UsageError("--resize-embeddings makes rows to be trained: leave --lora out")

    num_tokens = len(AutoTokenizer.from_pretrained(base))
    size = len(model.get_input_embeddings().weight)
    if num_tokens > size:
        model.resize_token_embeddings(num_tokens, mean_resizing=False)
        with torch.no_grad():
            for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
                layer.weight[size:] = layer.weight[:size].mean(0)


def check_vocabulary(model: Any, tokenizer: Any, tokens: Iterable[torch.Tensor]) -> None:
    """Raise UsageError if the embedding has no row for one of these tokens, int64."""
    remedy = (
        "take a tokenizer without it, or give examples/finetune.py --resize-embeddings, which "
        "trains rows for the new tokens"
    )
    check_embedding(len(model.get_input_embeddings().weight), tokenizer, tokens, remedy)


def dtype_of(base: str) -> torch.dtype | None:
    """Return the type of the weights of a folder or Hub id; None if its config does not say."""
    from transformers import AutoConfig

    dtype = AutoConfig.from_pretrained(base).dtype
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def stop_at(model: Any, token: int | None) -> None:
    """Make model.generate(...) also stop after this token, here and in the written folder."""
    config = model.generation_config
    ends = config.eos_token_id
    ends = [ends] if isinstance(ends, int) else (ends or [])
    if token is not None and token not in ends:
        config.eos_token_id = [*ends, token]


def write_pretrained(
    run: "Run", tokenizer: Any, base: str, merge: bool = False, dtype: torch.dtype | None = None
) -> None:
    """Write RUN_DIR/pretrained: the weights of model.safetensors, the tokenizer, a model card.

    The weights of a whole model are written in this type, None: as they were trained, and those
    that are tied once. For a PeftModel it holds the adapter; with `merge` RUN_DIR/merged has the
    whole model too, with the adapter merged into it. Every process must call this, before
    run.finish(), so that no finished run is without the folder; the main process writes the weights
    from the file, so nothing has to be gathered. The first model of the run must have
    save_pretrained; the tokenizer may be any processor that has it.
    """
    run.results.write_pretrained(
        run.ema.trained_weights, lambda: _write_pretrained(run, tokenizer, base, merge, dtype)
    )


def _write_pretrained(
    run: "Run", tokenizer: Any, base: str, merge: bool, dtype: torch.dtype | None
) -> None:
    config = run.config
    model = run.models[0]
    folder = run.config.run_dir / "pretrained"
    is_adapter = hasattr(model, "peft_config")
    path = config.run_dir / "model.safetensors"
    if is_adapter:
        model.save_pretrained(folder, state_dict=load_file(path))
        model.generation_config.save_pretrained(folder)  # which peft omits
    else:
        write_weights(model, path, folder, dtype)
    tokenizer.save_pretrained(folder)
    started = read_run_json(config.run_dir)
    rows = {"base": base, **run.progress.metrics, "step": run.progress.step, "seed": config.seed}
    rows |= {"command": f"`{shlex.join(started['command'])}`", "run on": started["world"]}
    table = "".join(f"| {name} | {value} |\n" for name, value in rows.items())
    library = "peft" if is_adapter else "transformers"
    head = f"---\nlibrary_name: {library}\n---\n# {config.run_dir.name}\n\n| | |\n| --- | --- |\n"
    (folder / "README.md").write_text(head + table, encoding="utf-8")
    name = "" if is_adapter or not dtype else f", in {str(dtype).removeprefix('torch.')}"
    print(f"for from_pretrained: {folder}{name}", flush=True)
    if merge and is_adapter:
        _write_merged(model.generation_config, tokenizer, base, folder)


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
