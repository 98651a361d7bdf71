"""Write the files that a run leaves: run.json, weights, predictions, DONE and pictures."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from trainkit.checkpoints import sharded as shards
from trainkit.checkpoints.contents import Frozen
from trainkit.config import TrainingConfig, metric_and_direction
from trainkit.errors import RunFailure, as_usage_error
from trainkit.launch.processes import failing_together, wait_for_all
from trainkit.numbers.orders import Progress
from trainkit.run.plan import describe_run
from trainkit.run.reporter import show, show_best
from trainkit.store import records
from trainkit.store.atomic import rename_free, write_durably, write_json
from trainkit.store.log import send_all_rows
from trainkit.store.manifest import step_name
from trainkit.store.weights import check_writable, numbered, write_tensors
from trainkit.text import count, first_sentence

Predictions = tuple[dict[str, torch.Tensor], dict[str, Any]]  # tensors, metadata


class Results:
    """Writes into the run folder. Every process must call each method; see Run.begin.

    Raises RunFailure on all of them, for example if the disk is full.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: TrainingConfig,
        frozen: Frozen,
        metadata: dict[str, Any],
        save_frozen: bool,
        trained_weights: Callable[[], AbstractContextManager],
    ):
        """trained_weights: that of EMA."""
        self.accelerator, self.config = accelerator, config
        self.run_dir = config.run_dir
        self.frozen = frozen
        self.metadata = metadata
        self.save_frozen = save_frozen
        self.trained_weights = trained_weights
        self.has_weights = False

    def write_best(self, step: int) -> None:
        """Write best.safetensors, the weights of the best evaluation, which was at this step."""
        self._write_model("best.safetensors", self.frozen.models[0], {"step": step})

    def write_predictions(self, predictions: Predictions | None) -> None:
        if predictions is not None:
            self._write(records.PREDICTIONS, *predictions)

    def write_weights(self) -> None:
        """Write the weights, unless they have been written."""
        if self.has_weights:
            return
        if self.config.ema:
            with self.trained_weights():
                self._write_models("raw.safetensors")
        self._write_models("model.safetensors")
        self.has_weights = True

    def write_pretrained(self, write: Callable[[], None]) -> None:
        """Write the weights; then the main process calls `write`, which makes pretrained/ of them.

        Call this before run.finish(), so that no finished run is without the folder.
        """
        self.write_weights()
        what = f"{self.run_dir / 'pretrained'} cannot be written"
        with failing_together(self.accelerator, what, RunFailure):
            try:
                if self.accelerator.is_main_process:
                    write()
            finally:
                wait_for_all(self.accelerator, self.config.time_limit)

    def finish(
        self,
        progress: Progress,
        next_command: str,
        say: Callable[[str], None],
        finish_mirror: Callable[[], None],
    ) -> None:
        """Write weights and pictures, say so, complete the mirror, and write DONE last."""
        config = self.config
        messages = names = ""
        self.write_weights()
        if config.pictures and self.accelerator.is_main_process:
            try:
                from trainkit.plots.figures import draw_run  # here: matplotlib takes long

                names = "".join(f", {path.name}" for path in draw_run(self.run_dir))
            except Exception as problem:  # no matplotlib, no memory, no disk
                messages += f"the pictures were not drawn: {first_sentence(problem)}\n"
        wait_for_all(self.accelerator, self.config.time_limit)
        if config.keep_best and self.accelerator.is_main_process:
            messages += f"{self._settle_best(progress)}\n"
        measured = show_best(progress.metrics, config.keep_best)
        messages += (
            f"done: {count(progress.step, 'step')}, {measured}; in {self.run_dir}: "
            f"weights, metrics, checkpoints{names}"
        )
        if next_command:
            messages += f"\nnext: {next_command}"
        say(messages)
        finish_mirror()
        with failing_together(self.accelerator, f"{self.run_dir} cannot be written", RunFailure):
            if self.accelerator.is_main_process:
                write_durably(self.run_dir / "DONE", b"")

    def _settle_best(self, progress: Progress) -> str:
        """Say which evaluation was the best and where its weights are. Main process only.

        A best.safetensors of another one is renamed: the run was resumed from an older checkpoint.
        """
        step, path = progress.best_step, self.run_dir / "best.safetensors"
        name, _ = metric_and_direction(self.config.keep_best or "")
        if progress.best is None:
            return f"no evaluation gave a finite {name}: nothing was kept for it"
        where = path.name
        if not path.exists() or records.read_metadata(path)["step"] != step:
            where = f"checkpoints/{step_name(step)}"
            if path.exists():
                rename_free(path, f"abandoned-{path.name}")
        value = show(name, progress.best)
        return f"{name} was best at step {step}, {value}: those weights are in {where}"

    def _write(self, name: str, tensors: dict[str, torch.Tensor], metadata: dict[str, Any]) -> None:
        path = self.run_dir / name
        main = self.accelerator.is_main_process
        whole = shards.gathered(tensors, keep=main)
        with failing_together(self.accelerator, f"{path} cannot be written", RunFailure):
            if main:
                write_tensors(path, whole, metadata)

    def _write_model(self, name: str, model: nn.Module, more: dict[str, Any]) -> None:
        tensors = model.state_dict() if self.save_frozen else self.frozen.state_of(model)
        self._write(name, tensors, self.metadata | more)

    def _write_models(self, name: str) -> None:
        for number, model in enumerate(self.frozen.models):
            self._write_model(numbered(name, number), model, {})


def write_start(accelerator: Accelerator, config: TrainingConfig, project: str) -> None:
    """Write run.json, start the trackers, and remove DONE of a run that finished before."""
    with failing_together(accelerator, f"--run-dir {config.run_dir} cannot be used"):
        if accelerator.is_main_process:
            (config.run_dir / "DONE").unlink(missing_ok=True)
            write_json(config.run_dir / "run.json", describe_run(accelerator, config))
    flags = {name: str(value) for name, value in vars(config).items()}
    send_all_rows(accelerator)
    accelerator.init_trackers(project, flags)


def check_predictions(
    predictions: dict[str, Any] | None, metadata: dict[str, Any]
) -> Predictions | None:
    """Return the predictions as tensors. They are checked in every epoch, not only at the end."""
    with as_usage_error("run.end_epoch(...) got predictions, or metadata, that cannot be written"):
        tensors = {name: torch.as_tensor(value) for name, value in (predictions or {}).items()}
        check_writable(tensors, metadata)
    return None if predictions is None else (tensors, metadata)
