"""Count the operations of a step that would launch a kernel on a GPU, on any device."""

import contextlib
import io
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

WATCHED = 4  # the first steps, which check more and draw no numbers ahead
# Operations that only describe memory, so that they launch no kernel on a card.
VIEWS = {
    f"aten::{name}"
    for name in (
        *("view", "_unsafe_view", "view_as", "reshape", "_reshape_alias", "flatten", "unflatten"),
        *("as_strided", "expand", "expand_as", "permute", "transpose", "t", "movedim", "diagonal"),
        *("slice", "select", "narrow", "unbind", "split", "chunk", "unfold"),
        *("alias", "detach", "detach_", "squeeze", "unsqueeze", "lift_fresh", "set_", "resize_"),
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "result_type"),
        *("resolve_conj", "resolve_neg", "is_nonzero", "item", "_local_scalar_dense"),
    )
}


class Launches(TorchDispatchMode):
    """Counts the operations that launch a kernel, from an early optimizer step to the last."""

    def __init__(self, train: Callable[[], Any]):
        super().__init__()
        self.num = self.num_before = self.num_steps = 0
        hook = register_optimizer_step_post_hook(self.mark)
        with contextlib.redirect_stdout(io.StringIO()):
            train()
        hook.remove()
        self.__exit__(None, None, None)

    def mark(self, *_: Any) -> None:
        self.num_steps, self.num_before = self.num_steps + 1, self.num
        if self.num_steps == WATCHED:
            self.__enter__()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = f"aten::{function.overloadpacket.__name__}"
        self.num += name not in VIEWS and "record_function" not in name
        return function(*args, **(kwargs or {}))

    @property
    def each_step(self) -> float:
        return self.num_before / (self.num_steps - WATCHED)
