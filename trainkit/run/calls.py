"""The order in which a script must call the methods of Run, stage by stage."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

NEXT_BATCH = "the next batch"
# The stages of a run, and the call that comes next in each.
NEXT = {
    "new": "`with Run(...) as run`",
    "entered": "run.load(load_data)",
    "loaded": "accelerator.prepare(...), then run.begin(model, ...)",
    "ready": "the next epoch of run.epochs(), or run.finish() when there is none left",
    "epoch": "`for batch in run.steps(train_loader)`, to its end",
    "batch": "accelerator.backward(run.step_mean(losses)), in every batch",
    "backward": "run.clip_and_check(optimizer), then `if run.end_step(): run.save()`",
    "checked": "`if run.end_step(): run.save()` at the end of the body of run.steps(...)",
    "must save": "run.save(), because run.end_step() returned True",
    "counted": "the next batch of run.steps(...)",
    "trained": "run.end_epoch(metrics)",
    "over": "nothing, the run is over",
}
IN_BATCH = ("batch", "backward", "checked")
IN_LOOP = (*IN_BATCH, "must save", "counted")


def out_of_order(call: str, stage: str, *stages: str) -> RuntimeError:
    """The error of a call in this stage that may be made only in those stages, if in any."""
    sentence = f"{call} is out of order: what comes next is {NEXT[stage]}"
    return RuntimeError(sentence + likely_reason(call, stage, stages))


def likely_reason(call: str, stage: str, stages: Sequence[str]) -> str:
    """What the loop may have done, as the end of the sentence; "" if NEXT says it all."""
    if call == NEXT_BATCH and stage in IN_BATCH:  # the body came to its end, or to a `continue`
        return ", which `continue` must not skip; to end the run early, run.stop() before that"
    uses_gradients = "backward" in stages and "batch" not in stages
    if stage == "batch" and uses_gradients:
        return (
            "; if accelerator.backward(...) was called in this batch, its loss did not come from "
            'run.step_mean(losses), which takes the loss of each sample (reduction="none")'
        )
    is_of_loop = any(each in IN_LOOP for each in stages)
    if stage == "counted" or (stage in IN_LOOP and not is_of_loop):
        return (
            ". Either this stands in the body of run.steps(...), or `break` has left that loop, "
            "or zip(...) with something shorter, which must go to its end: to end the run early, "
            "call run.stop() before run.end_step(); to evaluate sooner, give --eval-every"
        )
    return ""


class Staged(Protocol):
    """A run, which knows its stage."""

    stage: str


def need(run: Staged, call: str, *stages: str) -> None:
    if run.stage not in stages:
        raise out_of_order(call, run.stage, *stages)


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
