"""How far apart do the losses of one experiment drift, trained by other processes or threads?

    python -m benchmarks.rounding

Draws docs/rounding.png: per step of the default run, the distance of its training loss from that of
one process with one thread. Order, augmentation and rates are equal in all of them; sums are made
in another order, which changes last bits, and training amplifies these.
"""

from benchmarks._runs import MNIST, draw, launcher, one_run, table

ALIKE = 1e-5
WORLDS = {  # processes and threads of each
    "1 process, 1 thread": (1, "1"),
    "1 process, 2 threads": (1, "2"),
    "2 processes, 1 thread each": (2, "1"),
}


def main() -> None:
    """Print a row per world and write docs/rounding.png."""
    rates, losses = [], {}
    for world, (num_processes, num_threads) in WORLDS.items():
        how = {"launch": launcher(num_processes), "env": {"OMP_NUM_THREADS": num_threads}}
        run = one_run(MNIST, "--log-every", 1, **how)
        rows = [row for row in run.metrics if "learning_rate" in row]
        rates.append([row["learning_rate"] for row in rows])
        losses[world] = [row["train_loss"] for row in rows]
    assert all(rate == rates[0] for rate in rates)
    first, rows, lines = losses.pop("1 process, 1 thread"), [], {}
    for world, values in losses.items():
        apart = [abs(value - one) for value, one in zip(values, first, strict=True)]
        alike = next((step for step, gap in enumerate(apart) if gap > ALIKE), len(apart))
        rows.append((world, alike, f"{max(apart[:100]):.1e}", f"{max(apart):.1e}"))
        lines[world] = range(1, len(apart) + 1), apart
    table(f"world | steps within {ALIKE:g} | at most in the first 100 | in all", rows)
    draw("rounding", lines, x="optimizer steps", y="distance of the loss")


if __name__ == "__main__":
    main()
