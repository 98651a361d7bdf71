"""What is compiled where the YAML compiles: the first whole step of a process, and nothing else."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend
from torch.utils.data import get_worker_info

from trainkit.config import WITH_CUDA_GRAPHS

Inputs = ParamSpec("Inputs")
Output = TypeVar("Output")


def compiled_with_model(function: Callable[Inputs, Output]) -> Callable[Inputs, Output]:
    """Compile this function where the YAML compiles the model; else leave it as it is written.

    This is for what the loop does with whole batches outside of the model, such as augmentation.
    The function should get tensors and settings that stay the same: draw the random numbers, count
    epochs and use numpy outside of it. In workers it is not compiled.
    """

    @functools.wraps(function)
    def call(*args: Inputs.args, **kwargs: Inputs.kwargs) -> Output:
        is_part = torch.compiler.is_compiling()  # of something that is compiled as a whole
        if is_part or not _of_run or get_worker_info():
            return function(*args, **kwargs)
        return _of_run[-1].compiled(function)(*args, **kwargs)

    return call


class Compiling:
    """Lets models be compiled in the first step that has all its samples.

    Short batches and evaluations have other shapes or modes, for each of which a model would be
    compiled again, for up to minutes on a card. They use what is compiled if it fits, and else run
    as they are written. So after a resume the same is compiled as before it.
    """

    def __init__(self, accelerator: Accelerator):
        self.plugin = accelerator.state.dynamo_plugin
        self.is_in_use = self.is_due = self.plugin.backend != DynamoBackend.NO
        self.has_graphs = self.is_in_use and self.plugin.mode in WITH_CUDA_GRAPHS
        self.compiled = functools.cache(lambda f: torch.compile(f, **self.plugin.to_kwargs()))
        if self.is_in_use:
            torch.compiler.set_stance("eager_on_recompile")
            _of_run.append(self)

    def start_step(self, is_whole: bool) -> None:
        """Let models be compiled if this is the first step with all its samples."""
        if self.is_due and is_whole:
            torch.compiler.set_stance("default")
        if self.has_graphs:
            # They use the memory of the last step again. By themselves they would do so at each
            # call, and lose the pictures that a compiled augmentation has made for the model.
            torch.compiler.cudagraph_mark_step_begin()

    def finish_step(self, is_whole: bool) -> None:
        """From now on nothing is compiled if that step is over."""
        if self.is_due and is_whole:
            torch.compiler.set_stance("eager_on_recompile")
            self.is_due = False

    def release(self) -> None:
        """Let everything be compiled again, as a notebook may wish to."""
        if self.is_in_use:
            torch.compiler.set_stance("default")
            _of_run.clear()


_of_run: list[Compiling] = []  # one from begin() to the end of the run, if its YAML compiles
