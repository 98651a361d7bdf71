"""A Hugging Face model is fine-tuned, whole or by LoRA, as transformers itself would do it."""

import itertools
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import rows
from safetensors.torch import load_file

from examples import finetune
from trainkit.errors import UsageError
from trainkit.order import EpochBatches

transformers, peft = map(pytest.importorskip, ("transformers", "peft"))

MODULES = ["peft", "transformers.models.llama.modeling_llama", "transformers.generation"]
# 270 pairs: 11 steps of 24 and one of 6, which leaves some processes without a sample.
FLAGS = "--batch-size 24 --epochs 2 --stop-after-steps 20 --log-every 1 --learning-rate 3e-3"
FLAGS += " --schedule constant --warmup 0 --clip-norm inf --eval-every 6 --no-pictures"
WAYS = [*itertools.product((None, 4), (1, 2), (1, 4))]
QUICK = [(None, 2, 4), (4, 1, 4)]


@pytest.fixture(scope="module")
def flags(nursery: Any, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What all runs here have in common; the model and the pairs are made."""
    folder = tmp_path_factory.mktemp("made")
    made = nursery.run(
        "examples/docstrings.py", "--folder", folder, "--width", 32, "--layers", 1, modules=MODULES
    )
    assert made.codes == [0], made.output
    pairs = (folder / "pairs.jsonl").read_text().splitlines()[:300]
    (folder / "few.jsonl").write_text("\n".join(pairs))
    return [*FLAGS.split(), "--base", f"{folder}/base", "--data", f"{folder}/few.jsonl"]


@pytest.fixture(scope="module")
def start(nursery: Any, flags: list[str]) -> Callable[..., Any]:
    def call(run_dir: Path, lora: int | None, *args: object, **plan: Any) -> Any:
        args = *flags, *(["--lora", lora] if lora else []), "--run-dir", run_dir, *args
        plan = {"world": 1, "timeout": 120, "modules": MODULES, **plan}
        outcome = nursery.run("examples/finetune.py", *args, **plan)
        if "fault" not in plan:
            assert outcome.codes == [0] * plan["world"], outcome.output
            assert f"device      {plan['world']} process" in outcome.output
        return outcome

    return call


def make_model(flags: list[str], lora: int | None) -> tuple[Any, Any]:
    args = finetune.parse_args([*flags, *(["--lora", str(lora)] if lora else [])])
    torch.manual_seed(0)
    return args, finetune.make_model(args)


@pytest.fixture(scope="module")
def plain(flags: list[str]) -> Callable[[int | None], list[float]]:
    """Losses of a loop of plain PyTorch around the loss of transformers, its mask and its shift."""

    def call(lora: int | None) -> list[float]:
        args, model = make_model(flags, lora)
        samples, _, _ = finetune.load_data(args)
        adam = torch.optim.AdamW(model.parameters(), args.learning_rate, weight_decay=0.0)
        order, losses = EpochBatches(len(samples), args.batch_size, seed=0), []
        for epoch in range(2):
            order.set_position(epoch, 0)
            for batch in order:
                chosen = [samples[index] for index in batch.values.tolist()]
                tokens, first, end = finetune.collate(chosen)
                place = torch.arange(tokens.shape[1])
                labels = tokens.where((first <= place) & (place < end), -100)
                loss = model(tokens, attention_mask=(place < end).long(), labels=labels).loss
                losses.append(loss.item())
                adam.zero_grad()
                loss.backward()
                adam.step()
        return losses[: args.stop_after_steps]

    return call


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=torch.arange(3, 40)[None]).logits


@pytest.mark.parametrize(
    ("lora", "world", "accumulate"),
    [pytest.param(*way, marks=[pytest.mark.slow] * (way not in QUICK)) for way in WAYS],
)
def test_losses_are_those_of_transformers_and_from_pretrained_opens_the_end(
    start: Callable,
    plain: Callable,
    flags: list[str],
    tmp_path: Path,
    lora: int | None,
    world: int,
    accumulate: int,
) -> None:
    more = ["--accumulate", accumulate, *(["--ema", 0.9] if world == 2 else [])]
    output = start(tmp_path, lora, *more, world=world).output
    losses = [row["train_loss"] for row in rows(tmp_path, "steps")]
    assert losses == pytest.approx(plain(lora), abs=2e-6)  # float32 has steps of 5e-7 there
    assert output.count("answer: ") == len(rows(tmp_path, "epochs")) == 4
    args, model = make_model(flags, lora)
    before, folder = logits(model), tmp_path / "pretrained"
    missing = model.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert not missing.unexpected_keys and (lora or not missing.missing_keys)
    opened = transformers.AutoModelForCausalLM.from_pretrained(args.base if lora else folder)
    if lora:
        opened = peft.PeftModel.from_pretrained(opened, folder)
    assert torch.equal(logits(opened), logits(model)) and not torch.equal(before, logits(model))
    assert transformers.AutoTokenizer.from_pretrained(folder).eos_token == "<end>"
    assert "| seed | 0 |" in (folder / "README.md").read_text()


@pytest.mark.parametrize("lora", [pytest.param(None, marks=pytest.mark.slow), 4])
def test_a_kill_changes_no_byte(start: Callable, tmp_path: Path, lora: int | None) -> None:
    kill = {"signal": [14, signal.SIGKILL]}
    assert 0 not in start(tmp_path / "killed", lora, world=2, fault=kill).codes
    for name in ("killed", "whole"):
        start(tmp_path / name, lora, "--resume", "auto", world=2)
    files = sorted((tmp_path / "whole").glob("**/pretrained/*.safetensors"))
    for path in (tmp_path / "whole" / "metrics.jsonl", *files):
        killed = tmp_path / "killed" / path.relative_to(tmp_path / "whole")
        assert path.read_bytes() == killed.read_bytes(), path.name


@pytest.mark.parametrize("template", [True, False])
def test_the_answer_and_its_end_are_what_counts(flags: list[str], template: bool) -> None:
    _, _, tokenizer = finetune.load_data(finetune.parse_args(flags))
    if not template:
        tokenizer.chat_template = None
    tokens, first = finetune.encode(tokenizer, "def f():", "Do it.")
    assert tokenizer.decode(tokens[first:]) == "Do it.<end>"
    assert "def f():" in tokenizer.decode(tokens[:first])


def test_a_missing_package_is_asked_for(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    args = finetune.parse_args([*flags, "--lora", "1"])
    for name, call in (("peft", finetune.make_model), ("transformers", finetune.load_data)):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(UsageError, match=f"needs `pip install {name}`"):
            call(args)


def test_a_model_is_trained_as_from_pretrained_returns_it_but_not_once_it_is_put_to_rest(
    run_main: Callable, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, modes = finetune.make_model, []
    monkeypatch.setattr(finetune, "make_model", lambda args: make(args).eval())

    def rest(model: Any, *_: Any) -> None:
        modes.extend(layer.training for layer in model.modules())
        model.eval()

    monkeypatch.setattr(finetune, "answer", rest)
    with pytest.raises(RuntimeError, match="a model is in evaluation mode"):
        run_main("examples.finetune", *flags, "--run-dir", tmp_path)
    assert modes and all(modes)
