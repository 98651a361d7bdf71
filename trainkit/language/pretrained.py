"""Write a folder of a finished run that from_pretrained of transformers, or of peft, can load."""

import shlex
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from trainkit.run_dir.records import read_run_json


def stop_at(model: Any, token: int | None) -> None:
    """Make model.generate(...) also stop after this token, here and in the written folder."""
    config = model.generation_config
    known = [config.eos_token_id] if isinstance(config.eos_token_id, int) else config.eos_token_id
    if token is not None and token not in (known or []):
        config.eos_token_id = [*(known or []), token]


def write_pretrained(run: Any, tokenizer: Any, base: str, merge: bool = False) -> None:
    """Write RUN_DIR/pretrained: the weights of model.safetensors, the tokenizer, a model card.

    For a PeftModel it holds the adapter; with `merge` RUN_DIR/merged has the whole model too, with
    the adapter merged into it. Every process must call this, before run.finish(), so that no
    finished run is without the folder; the main process writes the weights from the file, so
    nothing has to be gathered. The first model of the run must have save_pretrained; the tokenizer
    may be any processor that has it.
    """
    run.results.write_pretrained(run.ema, lambda: _write_pretrained(run, tokenizer, base, merge))


def _write_pretrained(run: Any, tokenizer: Any, base: str, merge: bool) -> None:
    config, model, folder = run.config, run.models[0], run.config.run_dir / "pretrained"
    model.save_pretrained(folder, state_dict=load_file(config.run_dir / "model.safetensors"))
    if hasattr(model, "peft_config"):  # its save_pretrained omits the generation settings
        model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    about = read_run_json(config.run_dir)
    rows = {"base": base, **run.progress.metrics, "step": run.progress.step, "seed": config.seed}
    rows |= {"command": f"`{shlex.join(about['command'])}`", "run on": about["world"]}
    table = "".join(f"| {name} | {value} |\n" for name, value in rows.items())
    library = "peft" if hasattr(model, "peft_config") else "transformers"
    head = f"---\nlibrary_name: {library}\n---\n# {config.run_dir.name}\n\n| | |\n| --- | --- |\n"
    (folder / "README.md").write_text(head + table, encoding="utf-8")
    print(f"for from_pretrained: {folder}", flush=True)
    if merge and library == "peft":
        _write_merged(model.generation_config, tokenizer, base, folder)


def _write_merged(settings: Any, tokenizer: Any, base: str, adapter: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    model.generation_config, folder = settings, adapter.with_name("merged")
    for each in (model, tokenizer):
        each.save_pretrained(folder)
    print(f"with the adapter merged into its weights: {folder}", flush=True)
