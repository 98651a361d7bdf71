"""Write the files that a run leaves: run.json, weights, predictions, DONE and pictures."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from trainkit import best, shards

import torch
from accelerate import Accelerator
from torch import nn

from trainkit.checks.prepared import Predictions
from trainkit.cli.console import show_best
from trainkit.cli.world import describe_run
from trainkit.config import TrainingConfig
from trainkit.ema import EMA
from trainkit.errors import RunFailure, UsageError, failing_together
from trainkit.position import Progress
from trainkit.run_dir import records
from trainkit.run_dir.files import write_durably, write_json
from trainkit.run_dir.mirror import Mirror
from trainkit.run_dir.weights import layout, numbered, write_tensors
from trainkit.text import check_json, count, first_sentence


class Results:
    """Writes into the run folder. Every process must call each method.

    Raises RunFailure on all of them, for example if the disk is full.

    Args:
        metadata: saved with the weights, as JSON.
        save_frozen: False leaves out frozen weights, as checkpoints do.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: TrainingConfig,
        models: Sequence[nn.Module],
        metadata: dict[str, Any],
        save_frozen: bool,
    ):
        check_json("the metadata of run.begin(...)", metadata)
        self.accelerator = accelerator
        self.config = config
        self.run_dir = config.run_dir
        self.models, self.metadata, self.save_frozen = models, metadata, save_frozen
        self.has_weights = False

    def write_start(self) -> None:
        """Write run.json, and remove DONE, which is there if this run finished before."""
        with failing_together(self.accelerator, f"--run-dir {self.run_dir} cannot be used"):
            if self.accelerator.is_main_process:
                (self.run_dir / "DONE").unlink(missing_ok=True)
                described = describe_run(self.accelerator, self.config)
                write_json(self.run_dir / "run.json", described)

    def write_best(self, progress: Progress) -> tuple[bool, UsageError | None]:
        """Write best.safetensors if this evaluation is the best by --keep-best; return whether.

        The second value is an error if the evaluation lacks that metric.
        """
        is_best = best.update_best(self.config, progress)
        if is_best:
            self._write_model("best.safetensors", self.models[0], {"step": progress.step})
        return is_best, best.unknown_metric(self.config, progress)

    def write_predictions(self, predictions: Predictions | None) -> None:
        """Write predictions.safetensors, if there are predictions."""
        if predictions is not None:
            self._write(records.PREDICTIONS, *predictions)

    def write_weights(self, ema: EMA) -> None:
        """Write the weights, unless they have been written."""
        if self.has_weights:
            return
        if self.config.ema:
            with ema.trained_weights():
                self._write_models("raw.safetensors")
        self._write_models("model.safetensors")
        self.has_weights = True

    def write_pretrained(self, ema: EMA, write: Callable[[], None]) -> None:
        """Write the weights; then the main process calls `write`, which makes pretrained/ of them.

        Call this before run.finish(), so that no finished run is without the folder.
        """
        self.write_weights(ema)
        what = f"{self.run_dir / 'pretrained'} cannot be written"
        with failing_together(self.accelerator, what, RunFailure):
            if self.accelerator.is_main_process:
                write()

    def finish(
        self,
        progress: Progress,
        ema: EMA,
        next_command: str,
        say: Callable[[str], None],
        mirror: Mirror | None,
    ) -> None:
        """Write weights and pictures, say so, complete the mirror, and write DONE last.

        trainkit.tools.plots draws the pictures from the files in the run folder. If one cannot be
        drawn, the message says so and the run does not fail.
        """
        config = self.config
        messages = ""
        self.write_weights(ema)
        names = ""
        if config.pictures and self.accelerator.is_main_process:
            try:
                # Imported by name, because training does not depend on the tools that show results.
                drawn = import_module("trainkit.tools.plots").draw_run(self.run_dir)
                names = "".join(f", {path.name}" for path in drawn)
            except Exception as problem:  # no matplotlib, no memory, no disk
                messages += f"the pictures were not drawn: {first_sentence(problem)}\n"
        if config.keep_best:
            messages += f"{best.describe_best(self.accelerator, config, progress)}\n"
        measured = show_best(progress.metrics, config.keep_best)
        say(
            f"{messages}done: {count(progress.step, 'step')}, {measured}; in "
            f"{self.run_dir}: weights, metrics, checkpoints{names}"
            + f"\nnext: {next_command}"
            * bool(next_command)
        )
        if mirror:
            mirror.finish()
        with failing_together(self.accelerator, f"{self.run_dir} cannot be written", RunFailure):
            if self.accelerator.is_main_process:
                write_durably(self.run_dir / "DONE", b"")

    def _write(self, name: str, tensors: dict[str, torch.Tensor], metadata: dict[str, Any]) -> None:
        path = self.run_dir / name
        main = self.accelerator.is_main_process
        # One by one, because the main process may not have the memory for a sharded model.
        names, _ = layout(tensors, {"trainkit": metadata})
        rows = (shards.gathered(tensors[key], keep=main) for key in names)
        with failing_together(self.accelerator, f"{path} cannot be written", RunFailure):
            try:
                if main:
                    write_tensors(path, tensors, metadata, rows)
            finally:
                for _ in rows:  # every process gathers all of them, even if the disk is full
                    pass

    def _write_model(self, name: str, model: nn.Module, more: dict[str, Any]) -> None:
        tensors = model.state_dict() if self.save_frozen else shards.state_of(model)
        self._write(name, tensors, self.metadata | more)

    def _write_models(self, name: str) -> None:
        for number, model in enumerate(self.models):
            self._write_model(numbered(name, number), model, {})
