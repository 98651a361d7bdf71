"""What is compiled where the YAML compiles: the first whole step of a process, and nothing else."""

import os
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend


def keep_compiled() -> None:
    """Keep what inductor compiles beside the decoded data, so that it outlives a cleaned /tmp.

    It does nothing if the YAML does not compile, or if TORCHINDUCTOR_CACHE_DIR is set.
    """
    if os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() == "inductor":
        import datasets  # slow to import; load_data imports it too

        folder = Path(datasets.config.HF_DATASETS_CACHE, "inductor")
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


class Compiling:
    """Lets models be compiled in the first step that has all its samples.

    The last short batch of an epoch, evaluations and what the script does with a model elsewhere
    have other shapes or modes, for each of which a model would be compiled again, for up to minutes
    on a card. They use what is compiled if it fits, and else run as they are written. So after a
    resume the same is compiled as before it. What a script compiles by itself is left alone.
    """

    def __init__(self, accelerator: Accelerator):
        self.is_due = accelerator.state.dynamo_plugin.backend != DynamoBackend.NO
        self.is_in_use = self.is_due
        if self.is_in_use:
            torch.compiler.set_stance("eager_on_recompile")

    def start_step(self, is_whole: bool) -> None:
        """Let models be compiled if this is the first step with all its samples."""
        if self.is_due and is_whole:
            torch.compiler.set_stance("default")

    def finish_step(self, is_whole: bool) -> None:
        """From now on nothing is compiled if that step is over."""
        if self.is_due and is_whole:
            torch.compiler.set_stance("eager_on_recompile")
            self.is_due = False

    def release(self) -> None:
        """Let everything be compiled again, as a notebook may wish to."""
        if self.is_in_use:
            torch.compiler.set_stance("default")
