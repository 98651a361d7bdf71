"""Every setting of the whole process and every patch of another package, one function each.

run(main) applies them before main. What is about safety or numbers, refuse_pickled_code and
compute_float32_in_full, is applied by Run, so that it holds in a notebook too. A patch whose target
has changed does nothing: the plain way is taken then. What each gives is measured by
`python -m benchmarks.time_to_accuracy --compare startup`.
"""

import ctypes
import functools
import gc
import inspect
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import accelerate
import accelerate.accelerator
import accelerate.optimizer
import torch

from trainkit.errors import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    RunFailure,
    UsageError,
    first_sentence,
    is_main_rank,
    leave,
    printable,
    what_befell,
)
from trainkit.launch import adopt_ranks, by_accelerate

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # <malloc.h>
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def run(main: Callable[[], Any]) -> None:
    """Call main and turn its errors for people into one line on each machine.

    UsageError ends with exit code 2, RunFailure with 1, a second Ctrl-C with 130. What happens to
    one process alone (a lost peer, a dead loader worker, no memory, a full disk) is said by that
    process in one sentence below its traceback, exit code 1. Other exceptions stay as they are.
    """
    keep_memory()
    spare_the_compiler()
    spare_sharded_tensors()
    spare_lookups()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt_once)
    gc.freeze()  # what was imported is never searched for garbage: a start is a fifth shorter
    try:
        adopt_ranks()  # from here on one process speaks for all
        end_with_launcher()
        main()
        sys.stdout.flush()
    except UsageError as error:
        _say(f"error: {error}")
        leave(EXIT_USAGE)
    except RunFailure as error:
        _say(f"error: {error}")
        leave(EXIT_FAILURE)
    except KeyboardInterrupt:
        _say("error: interrupted at once, without saving")
        leave(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # Whoever read the output has left (`| head -1`): nothing can be said to anybody.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        leave(EXIT_FAILURE)
    except (RuntimeError, OSError) as error:
        reason = what_befell(error)
        if reason is None:
            raise
        traceback.print_exc()
        rank = os.environ.get("RANK", "0")
        print(
            f"error: process {rank} {reason}: {first_sentence(error)}; "
            "every checkpoint under its final name is whole: start the same command again with "
            "--resume auto",
            file=sys.stderr,
            flush=True,
        )
        leave(EXIT_FAILURE)


def refuse_pickled_code() -> None:
    """Every torch.load of this process, accelerate's included, refuses to unpickle code."""
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"


def compute_float32_in_full() -> None:
    """float32 is float32 on every device: torch lets a GPU's convolutions round to TF32, 10 bits.

    Whoever wants speed picks a bf16 YAML, which is faster still and says so.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def end_with_launcher() -> None:
    """Let the death of the launcher reach this process as SIGTERM, which saves and ends the run.

    Only under a launcher: `nohup python train_mnist.py &` must outlive its shell. Linux only.
    """
    launched = "TORCHELASTIC_RUN_ID" in os.environ or by_accelerate()
    if not launched or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    # If the launcher died while this process imported torch, the kernel gave it another parent:
    # process 1, or a systemd that asks for orphans. In a container the launcher itself may be 1.
    try:
        parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return
    launcher = any(word in parent for word in (b"python", b"accelerate", b"torchrun"))
    if not launcher and (os.getppid() == 1 or b"systemd" in parent):
        raise RunFailure("the launcher of this process is gone")


def keep_memory() -> None:
    """Keep the memory of freed tensors: wide trains 11 to 17 % faster, small models up to a third.

    glibc would give large tensors back to the kernel in every step and wait for new, zeroed pages
    in the next. So none is mapped on its own, the heap grows by 64 MB and shrinks only from 2 GB.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        for name, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**26)):
            libc.mallopt(name, value)


def spare_the_compiler() -> None:
    """Let optimizers work without importing torch's compiler: a start is 1.1 to 1.3 s sooner.

    torch imports it to mark some methods as not to be compiled, and in each step to end a graph
    that is being compiled. Accelerate compiles the model alone, so here these methods are their
    uncompiled selves from the start. Hooks on a step are called as ever.
    """
    if "torch._dynamo" in sys.modules or compiled_by_launch():
        return
    optimizer = torch.optim.Optimizer
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        plain = inspect.unwrap(getattr(optimizer, name))
        plain.__dynamo_disable = plain  # where torch._compile keeps the marked version
    for kind in (torch.optim.Adam, torch.optim.SGD):  # AdamW has Adam's step
        if not hasattr(kind.step, "hooked"):  # the first optimizer of a kind wraps step for hooks
            kind.step = _without_graph_breaks(inspect.unwrap(kind.step))


def _without_graph_breaks(step: Callable) -> Callable:
    @functools.wraps(step)
    def plain(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *args, **kwargs)

    return plain


def compiled_by_launch() -> bool:
    """True if the launcher asked for torch.compile."""
    return os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no"


def spare_sharded_tensors() -> None:
    """Let accelerator.prepare(...) see no sharded weights where none can be: 0.5 s sooner.

    It imports torch.distributed.tensor to ask whether a weight is a DTensor. Nobody can have made
    one before that import.
    """
    asks = getattr(accelerate.accelerator, "model_has_dtensor", None)
    if asks is not None:
        accelerate.accelerator.model_has_dtensor = lambda model: (
            "torch.distributed.tensor" in sys.modules and asks(model)
        )


def spare_lookups() -> None:
    """Let Accelerate's optimizer look things up once that it looks up in every step.

    It searches the disk for the package lomo_optim twice, 53 us, and works out the signature of
    zero_grad, 20 us: together a sixth of a step of train_regression.py.
    """
    looks = getattr(accelerate.optimizer, "is_lomo_available", None)
    if looks is not None:
        accelerate.optimizer.is_lomo_available = functools.cache(looks)
    zero_grad = torch.optim.Optimizer.zero_grad
    zero_grad.__signature__ = inspect.signature(zero_grad)  # inspect takes one that is stored


def _interrupt_once(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # one more would leave a traceback
    raise KeyboardInterrupt


def _say(text: str) -> None:
    if is_main_rank():
        print(printable(text), file=sys.stderr, flush=True)
