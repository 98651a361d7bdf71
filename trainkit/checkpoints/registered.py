"""What accelerator.register_for_checkpointing(...) was given: saved without pickle.

Accelerate pickles such things, so a forged file could execute code. Here their tensors go to
registered.safetensors (or to the shards) and the rest, as JSON, to trainer.json.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

from trainkit.checkpoints.changes import Marks
from trainkit.checkpoints.content import text_of
from trainkit.errors import UsageError
from trainkit.hashes import digest
from trainkit.repairs.replaced import take_registered

Tensors = dict[str, torch.Tensor]

# Kinds of dicts and of sequences, by the name that stands for them in trainer.json.
DICTS: dict[str, Callable[[Any], Any]] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
SEQUENCES: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "size": torch.Size}
NAMES = {kind: name for name, kind in (DICTS | SEQUENCES).items()}


class Registered:
    """The registered things of a run, in their order.

    Raises UsageError if the state of one holds what JSON and tensors cannot.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.things = take_registered(accelerator)
        self.states()

    @property
    def kinds(self) -> list[str]:
        """The names of their classes."""
        return [type(thing).__name__ for thing in self.things]

    def states(self) -> tuple[list[Any], Tensors]:
        """Their states as JSON, and the tensors that these name."""
        tensors: Tensors = {}
        states = []
        for number, thing in enumerate(self.things):
            where = f"the state_dict() of the {type(thing).__name__}"
            states.append(pack_state(thing.state_dict(), str(number), where, tensors))
        return states, tensors

    def digests(self) -> dict[str, str]:
        """A text by name that differs if a state does; rows of sharded tensors are left out."""
        states, tensors = self.states()
        texts = {}
        for number, (name, state) in enumerate(zip(self.names(), states, strict=True)):
            texts[name] = digest(text_of(state) + Marks(whole_tensors(number, tensors)).hash())
        return texts

    def names(self) -> list[str]:
        """What messages call them."""
        return [f"the registered {kind} (number {n})" for n, kind in enumerate(self.kinds)]

    def entries(self) -> list[dict[str, str]]:
        """For each of them a text for each entry of its state, which differs if the entry does."""
        states, tensors = self.states()
        of_all = []
        for number, state in enumerate(states):
            texts = texts_of_entries(state)
            for name, tensor in whole_tensors(number, tensors).items():
                texts[name.partition(".")[2]] = Marks({name: tensor}).hash()
            of_all.append(texts)
        return of_all

    def names_of_buffers(self, number: int) -> list[str]:
        """The names of the float buffers of one of them, if it is a module."""
        thing = self.things[number]
        return names_of_float_buffers(thing) if isinstance(thing, nn.Module) else []

    def check_kinds(self, saved: Sequence[str]) -> None:
        """Raise UsageError if the things of a checkpoint are not those of this run."""
        if [*saved] != self.kinds:
            before, now = (", ".join(kinds) or "nothing" for kinds in (saved, self.kinds))
            raise UsageError(
                f"the checkpoint holds {before} of accelerator.register_for_checkpointing(...) and "
                f"this run has registered {now}: register the same things in the same order, or "
                "start anew without --resume"
            )

    def places(self, states: Sequence[Any]) -> Tensors:
        """Tensors to read the saved ones into, of the saved states, on their devices."""
        likes = self.states()[1]
        tensors: Tensors = {}
        for leaf in leaves(states):
            name = leaf["name"]
            shape = leaf["shape"]
            dtype = getattr(torch, leaf["dtype"])
            like = likes.get(name)
            if leaf["kind"] == "tensor" and like is not None and [*like.shape] == shape:
                tensors[name] = torch.empty_like(like.detach(), dtype=dtype)
            else:
                tensors[name] = torch.empty(shape, dtype=dtype)
        return tensors

    def load(self, states: Sequence[Any], tensors: Tensors) -> None:
        """Give each thing its saved state."""
        for thing, state in zip(self.things, states, strict=True):
            thing.load_state_dict(unpack_state(state, tensors))

    def check_late(self) -> None:
        """Raise RuntimeError if something was registered after run.begin(...)."""
        if late := take_registered(self.accelerator):
            raise RuntimeError(
                f"accelerator.register_for_checkpointing(...) got a {type(late[0]).__name__} after "
                "run.begin(...), which loads the checkpoint: register it before"
            )


def pack_state(value: Any, name: str, where: str, tensors: Tensors) -> Any:
    """Return the value as JSON, from which unpack_state makes an equal one of the same types.

    Every JSON object in it has a "kind", and `tensors` gets each tensor and array by name. Raises
    UsageError, which says what it is and `where`, for what is neither.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.ndarray | np.generic):
        array = np.array(value)  # a copy, which torch may share
        try:
            tensor = torch.from_numpy(array)
        except TypeError:
            raise _refused(value, where) from None
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return _leaf(kind, tensor, name, tensors)
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            raise _refused(value, where)
        return _leaf("tensor", value.detach(), name, tensors)
    if type(value) in DICTS.values():
        items = value.items()
        pairs = [
            [
                pack_state(key, f"{name}.{key}", f"{where}, a key", tensors),
                pack_state(x, f"{name}.{key}", f"{where}, {key!r}", tensors),
            ]
            for key, x in items
        ]
        return {"kind": NAMES[type(value)], "items": pairs}
    if type(value) is list or type(value) in SEQUENCES.values():
        items = [pack_state(x, f"{name}.{n}", where, tensors) for n, x in enumerate(value)]
        return items if type(value) is list else {"kind": NAMES[type(value)], "items": items}
    raise _refused(value, where)


def _leaf(kind: str, tensor: torch.Tensor, name: str, tensors: Tensors) -> dict[str, Any]:
    while name in tensors:
        name += "'"
    tensors[name] = tensor
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"kind": kind, "name": name, "dtype": dtype, "shape": [*tensor.shape]}


def _refused(value: Any, where: str) -> UsageError:
    return UsageError(
        f"{where}, registered with accelerator.register_for_checkpointing(...), holds a "
        f"{type(value).__name__}, which cannot be saved without pickle: let it hold numbers, "
        "texts, lists, tuples, dicts, tensors and arrays"
    )


def unpack_state(state: Any, tensors: Tensors) -> Any:
    """Undo pack_state, with these tensors."""
    if isinstance(state, list):
        return [unpack_state(item, tensors) for item in state]
    if not isinstance(state, dict):
        return state
    kind = state["kind"]
    if kind in DICTS:
        return DICTS[kind](
            {unpack_state(k, tensors): unpack_state(x, tensors) for k, x in state["items"]}
        )
    if kind in SEQUENCES:
        return SEQUENCES[kind]([unpack_state(item, tensors) for item in state["items"]])
    value = tensors[state["name"]]
    if kind == "tensor":
        return value
    return value.numpy() if kind == "array" else value.numpy()[()]


def whole_tensors(number: int, tensors: Tensors) -> Tensors:
    """Those of the registered thing of this number that are not sharded."""
    of_this = {name: x for name, x in tensors.items() if name.partition(".")[0] == str(number)}
    return {name: x for name, x in of_this.items() if not hasattr(x, "to_local")}


def texts_of_entries(state: Any, name: str = "") -> dict[str, str]:
    """The numbers and texts in an encoded state, as texts, by their names; no tensors."""
    if isinstance(state, dict) and "name" in state:
        return {}
    if isinstance(state, dict) and state["kind"] in DICTS:
        pairs = [(str(key), value) for key, value in state["items"]]
    elif isinstance(state, dict | list):
        items = state["items"] if isinstance(state, dict) else state
        pairs = [(str(number), value) for number, value in enumerate(items)]
    else:
        return {name: repr(state)}
    texts: dict[str, str] = {}
    for key, value in pairs:
        texts |= texts_of_entries(value, f"{name}.{key}" if name else key)
    return texts


def names_of_float_buffers(module: nn.Module) -> list[str]:
    return [name for name, buffer in module.named_buffers() if buffer.is_floating_point()]


def leaves(state: Any) -> list[dict[str, Any]]:
    """The entries of an encoded state that stand for a tensor."""
    if isinstance(state, dict) and "name" in state:
        return [state]
    if isinstance(state, dict):
        state = state["items"]
    return [leaf for item in state for leaf in leaves(item)] if isinstance(state, list) else []
