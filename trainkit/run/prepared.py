"""Check what a script has prepared, and refuse what could not be trained or resumed."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from trainkit.numbers.loaders import EpochBatches, batches_of
from trainkit.numbers.optim import weights_of
from trainkit.repairs.private_names import (
    is_trained,
    prepared_loaders,
    prepared_models,
    prepared_optimizers,
    prepared_schedulers,
    registered_things,
)
from trainkit.repairs.replaced import complete_hooks, fix_bucket_order, name_without_compiler
from trainkit.text import count


def check_prepared(accelerator: Accelerator, num_models: int) -> None:
    """Raise RuntimeError if what accelerator.prepare was given could not be trained or resumed."""
    models, optimizers = prepared_models(accelerator), prepared_optimizers(accelerator)
    if num_models != len(models):
        raise RuntimeError(
            f"run.begin(...) got {count(num_models, 'model')} and accelerator.prepare "
            f"{len(models)}: give it all of them, as a list. A teacher that is not trained need "
            "not be prepared: name it in run.begin(..., fixed={'teacher': teacher})"
        )
    if any(batches_of(loader) is None for loader in prepared_loaders(accelerator)):
        raise RuntimeError(
            "accelerator.prepare was given a loader that make_loaders(...) did not make: "
            "use that function, because Accelerate may yield samples of other loaders twice"
        )
    if not optimizers:
        raise RuntimeError(
            "accelerator.prepare was given no torch.optim.Optimizer: prepare every optimizer (the "
            "wrapper of schedulefree is none: use its AdamWScheduleFree or SGDScheduleFree)"
        )
    check_tensors(models)
    strange = {*weights_of(*optimizers)} - {w for model in models for w in model.parameters()}
    if strange:
        raise RuntimeError(
            f"{len(strange)} of the optimizers' weights are in no model that "
            "accelerator.prepare was given, so they would be neither averaged nor saved: "
            "prepare every module that is trained"
        )
    schedules = prepared_schedulers(accelerator)
    steered = [optimizer for schedule in schedules for optimizer in schedule.optimizers]
    steered += [getattr(thing, "optimizer", None) for thing in registered_things(accelerator)]
    for optimizer in optimizers:
        # A schedule stores its initial rate there.
        is_steered = optimizer in steered or optimizer.optimizer in steered
        if "initial_lr" in optimizer.param_groups[0] and not is_steered:
            raise RuntimeError(
                "a learning rate schedule was not given to accelerator.prepare, so a resume "
                "would restart it: prepare it with its optimizer, or, if it is not torch's, give "
                "it to accelerator.register_for_checkpointing(...)"
            )


def check_tensors(models: Sequence[nn.Module]) -> None:
    """Raise RuntimeError if a weight has no values, or a checkpoint could not hold a state."""
    named = (pair for model in models for pair in model.named_parameters())
    if empty := [n for n, w in named if w.is_meta or nn.parameter.is_lazy(w)]:
        raise RuntimeError(
            f"{empty[0]} of a model has no values yet: give a lazy layer a batch, or load what is "
            "on the meta device, before the optimizer is made"
        )
    states = (pair for model in models for pair in model.state_dict().items())
    if others := [n for n, x in states if not hasattr(x, "stride") or 0 in x.stride()]:
        raise RuntimeError(
            f"{others[0]} of a model is not a tensor with its own storage, and checkpoints hold "
            "nothing else: keep what get_extra_state returns in a buffer, clone what expand returns"
        )


def check_optimizer(kind: type) -> None:
    """Raise RuntimeError for a kind of optimizer that needs a closure."""
    if issubclass(kind, torch.optim.LBFGS) or hasattr(kind, "first_step"):  # as SAM has
        raise RuntimeError(
            f"{kind.__name__} computes the loss several times in a step, by a closure, and a step "
            "of this loop computes it once: use another optimizer, or fit such a model outside of "
            "this loop"
        )


def check_loader(
    accelerator: Accelerator, loader: Any, call: str, to_train: bool = False
) -> EpochBatches:
    """Return the batches of a loader; refuse any but the prepared one from make_loaders(...).

    call: begins the message. to_train: the loader must be that of the training set.
    """
    batches = batches_of(loader)
    is_prepared = loader in prepared_loaders(accelerator)
    if batches is not None and is_prepared and to_train == (batches.seed is not None):
        return batches
    kind = "training" if to_train else "evaluation"
    raise RuntimeError(
        f"{call} got a {type(loader).__name__}: give it the {kind} loader that "
        "make_loaders(...) made and accelerator.prepare returned: other loaders cannot be resumed, "
        "and may yield a sample twice (for an order of your own use weights= or order=)"
    )


class Prepared:
    """What accelerator.prepare was given. It refuses changes made to it while the run trains.

    A model that is entirely in evaluation mode, as from_pretrained returns it, is put into training
    mode here, unless it has no trainable weights.

    Args:
        wrapped: what accelerator.prepare returned for the model, or for each model.

    Attributes:
        models: the models without the wrappers of DDP and torch.compile.
        parts: their layers and weights, and whether each is trained.
        saved: where the schedules are in the checkpoint.
    """

    def __init__(self, accelerator: Accelerator, wrapped: nn.Module | Sequence[nn.Module]):
        self.wrapped = [wrapped] if isinstance(wrapped, nn.Module) else list(wrapped)
        check_prepared(accelerator, len(self.wrapped))
        self.accelerator = accelerator
        self.models = prepared_models(accelerator)  # unwrap_model imports torch's compiler, 1.2 s
        self.optimizers = prepared_optimizers(accelerator)
        for optimizer in self.optimizers:
            check_optimizer(type(optimizer.optimizer))
            complete_hooks(optimizer.optimizer)
        for model in self.models:
            name_without_compiler(model)
            if is_trained(model) and not any(layer.training for layer in model.modules()):
                model.train()
        fix_bucket_order(*self.wrapped)
        self.parts = [*self._parts()]
        self.saved: list[Any] | None = None

    def note(self) -> None:
        """Remember where the schedules are, which must not change until the next step."""
        self.saved = self._positions()

    def check_unchanged(self) -> None:
        """Raise RuntimeError if weights, layers, train mode or a schedule were changed."""
        for before, now in zip_longest(self.parts, self._parts()):
            if None in (before, now) or before[1] is not now[1] or before[2] != now[2]:
                raise RuntimeError(
                    f"{(before or now)[0] or 'a model'} was replaced, added, removed, frozen or "
                    "unfrozen after accelerator.prepare(...), so neither an optimizer nor a "
                    "checkpoint would fit: do that before the optimizer is made; to unfreeze "
                    "weights, start a new run with --start-from, or keep them trainable from the "
                    "start, in a group whose learning rate is 0 until then (docs/loop.md, "
                    "unfreezing)"
                )
        if not all(model.training for model in self.models if is_trained(model)):
            raise RuntimeError(
                "a model is in evaluation mode: call model.train() before run.steps(...), then "
                "eval() on the layers that should stay in it"
            )
        if self.saved not in (None, self._positions()):
            raise RuntimeError(
                "a learning rate schedule was stepped after run.save() or run.end_epoch(...), so "
                "the checkpoint lacks the change: do that before"
            )

    def _parts(self) -> Iterator[tuple[str, Any, bool]]:
        for model in self.models:
            yield from ((name, layer, True) for name, layer in model.named_modules())
            # While a sharded model computes, other objects stand for its weights.
            for name, weight in model.named_parameters():
                yield name, None if self.accelerator.is_fsdp2 else weight, weight.requires_grad
        for weight in weights_of(*self.optimizers):
            yield "a weight of an optimizer", weight, weight.requires_grad

    def _positions(self) -> list[Any]:
        schedules = prepared_schedulers(self.accelerator)
        return [getattr(wrapped.scheduler, "last_epoch", None) for wrapped in schedules]
