"""A run with weighted draws and a state of its own, for tests to start."""

from collections.abc import Sequence

import torch
from torch import nn

from trainkit import arguments
from trainkit.optim import make_optimizer
from trainkit.order import InMemory, make_loaders
from trainkit.run import Run

NUM_SAMPLES = 43  # a prime
WEIGHTS = torch.arange(NUM_SAMPLES) % 4  # of a sample; every fourth is never drawn


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Count in run.state how often each sample was drawn; stop at the 13th draw of number 1."""
    parser = arguments.Parser()
    parser.add_argument("--power", type=float, default=1.0)
    arguments.add_training_arguments(parser)
    arguments.add_run_arguments(parser, "runs/weighted", not_the_experiment=["power"])
    parser.set_defaults(batch_size=6, epochs=20, log_every=1, pictures=False)
    args = parser.parse_args(argv)
    with Run(args, "weighted") as run:
        accelerator, x = run.accelerator, torch.linspace(-1, 1, NUM_SAMPLES)[:, None]
        sets = run.load(lambda args: (InMemory(x, x.sin()), InMemory(x, x.sin())))
        weights = WEIGHTS.double() ** args.power
        train_loader, eval_loader = make_loaders(accelerator, *sets, args, weights=weights)
        model = nn.Linear(1, 1)
        optimizer = make_optimizer(accelerator, model.parameters(), args)
        model, optimizer, train_loader, eval_loader = accelerator.prepare(
            model, optimizer, train_loader, eval_loader
        )
        run.begin(model, {})
        for _ in run.epochs():
            for x, y, indices in run.steps(train_loader):
                with accelerator.accumulate(model):
                    losses = (model(x) - y).square()
                    accelerator.backward(run.step_mean(losses))
                    run.clip_and_check(optimizer)
                    optimizer.step()
                    optimizer.zero_grad()
                run.add(loss=losses)
                drawn = torch.bincount(indices, minlength=NUM_SAMPLES)
                drawn = accelerator.reduce(drawn, reduction="sum")
                before = torch.tensor(run.state.get("drawn", [0] * NUM_SAMPLES))
                run.state["drawn"] = (before + drawn).tolist()
                if run.state["drawn"][1] >= 13:
                    run.stop()
            run.end_epoch(run.evaluate(eval_loader, lambda batch: {"loss": (batch[1] - batch[0])}))
        run.print(f"drawn {run.state['drawn']}")
        return run.finish()
