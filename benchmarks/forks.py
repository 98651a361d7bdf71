"""Count forked children that hang because a thread was about to call Python when they were forked.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 3 -m benchmarks.forks
    OMP_NUM_THREADS=1 torchrun --nproc_per_node 3 -m benchmarks.forks --rest

That happens in Python before 3.11.10 (https://github.com/python/cpython/issues/112275); here the
thread is one of gloo's, at the end of a collective. With --rest each fork waits 10 ms, as a run
does in such a Python. Each process prints how many children it forked, and how many of them hung.
"""

import argparse
import os
import signal
import time

import torch
import torch.distributed as dist

HUNG_SECONDS = 5
MEMORY = b"x" * 2**25  # a smaller process is forked too fast


def ends(child: int) -> bool:
    """Wait for a child; kill it and return False if it hangs."""
    deadline = time.monotonic() + HUNG_SECONDS
    while not os.waitpid(child, os.WNOHANG)[0]:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        time.sleep(0.0005)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rest", action="store_true")
    parser.add_argument("--seconds", type=float, default=120)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    if args.rest:
        os.register_at_fork(before=lambda: time.sleep(0.01))
    num_forked = num_hung = 0
    until = time.monotonic() + args.seconds
    while True:
        is_over = torch.tensor([float(time.monotonic() > until)])
        dist.all_reduce(is_over)
        if is_over:
            break
        works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(20)]
        for work in works:
            work.wait()
        del work, works
        if not (child := os.fork()):
            os._exit(0)
        num_forked += 1
        num_hung += not ends(child)
    print(f"{num_forked} forked, {num_hung} hung", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
