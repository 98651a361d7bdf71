"""The order in which a script must call the methods of Run, stage by stage."""

import functools
from collections.abc import Callable
from typing import Any, Protocol

# The stages of a run, and the call that comes next in each.
NEXT = {
    "new": "`with Run(...) as run`",
    "entered": "run.load(load_data)",
    "loaded": "accelerator.prepare(...), then run.begin(model, ...)",
    "ready": "the next epoch of run.epochs(), or run.finish() when there is none left",
    "epoch": "`for batch in run.steps(train_loader)`, to its end",
    "batch": "accelerator.backward(run.step_mean(losses)), in every batch",
    "backward": "run.clip_and_check(optimizer), then `if run.end_step(): run.save()`",
    "checked": "`if run.end_step(): run.save()` at the end of the body of run.steps(...); to end "
    "the run early, run.stop() before it",
    "must save": "run.save(), because run.end_step() returned True",
    "counted": "the next batch of run.steps(...)",
    "trained": "run.end_epoch(metrics)",
    "over": "nothing, the run is over",
}
IN_BATCH = ("batch", "backward", "checked")


def out_of_order(call: str, stage: str) -> RuntimeError:
    return RuntimeError(f"{call} is out of order: what comes next is {NEXT[stage]}")


class Staged(Protocol):
    """A run, which knows its stage."""

    stage: str


def need(run: Staged, call: str, *stages: str) -> None:
    if run.stage not in stages:
        raise out_of_order(call, run.stage)


def need_gradients(run: Staged) -> None:
    """Raise RuntimeError at the end of a step that did not use its gradients."""
    if run.stage == "backward":
        raise RuntimeError(
            "run.end_step() came without run.clip_and_check(optimizer): each batch of "
            "run.steps(...) is a step of the optimizer; to add up the gradients of N batches give "
            "--accumulate N and N times the --batch-size"
        )
    need(run, "run.end_step()", "checked")


def allowed(*stages: str, then: str | None = None) -> Callable[[Callable], Callable]:
    """Decorate a method that may be called only in these stages; `then` is the stage after it.

    Without `then` the stage does not change. A generator sets later stages itself.
    """

    def decorate(method: Callable) -> Callable:
        @functools.wraps(method)
        def checked(run: Staged, *args: Any, **options: Any) -> Any:
            need(run, f"run.{method.__name__}(...)", *stages)
            result = method(run, *args, **options)
            run.stage = then or run.stage
            return result

        return checked

    return decorate
