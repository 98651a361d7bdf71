"""The loops of docs/loop.md that do more than one mean and one step, in one and two processes."""

import pytest
from conftest import rows
from loops import HEAD
from plain import quick

SCRIPT = (
    HEAD
    + """

def load_data(config):
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    return InMemory(x[17:]), InMemory(x[:17])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return h, self.a(h)[:, 0], self.b(h)[:, 0]


def main(argv=None):
    config = parse(Config, argv)
    with Run(config, "loops") as run:
        accelerator = run.accelerator
        train_set, eval_set = run.load(load_data)
        loaders = make_loaders(accelerator, train_set, eval_set, config)
        net = Net()
        optimizer = torch.optim.Adam(net.parameters(), 0.02)
        model, optimizer, train_loader, eval_loader = accelerator.prepare(net, optimizer, *loaders)
        run.begin(model, {"script": "loops"})
        weights = [*net.parameters()]
        share = run.state.setdefault("share", torch.ones(2))
        hidden = run.state.setdefault("hidden", torch.zeros(5, 8))
        run.state.setdefault("queue", torch.zeros(12, 8))

        def losses_of(batch):
            x, h, a, b = batch[0], *model(batch[0])
            return h, (a - x.sum(1)) ** 2, (b + x[:, 0] * x[:, 1]).abs()

        for epoch in run.epochs():
            if run.starts_epoch:
                hidden.zero_()
            for batch in run.steps(train_loader):
                with accelerator.accumulate(model):
                    h, one, two = losses_of(batch)
                    stream = batch[-1] % 5
                    if CASE == "streams":
                        one = one * (1 + (h * hidden[stream]).sum(1) ** 2)
                    if CASE == "queue":
                        two = two + (h @ run.state["queue"].T).logsumexp(1)
                    means = [run.step_mean(one), run.step_mean(two)]
                    if CASE == "gradnorm":
                        costs = run.mean(torch.stack((one, two), 1))
                        share.mul_(0.9).add_(0.1 * costs / costs.mean())
                        means = [part * mean for part, mean in zip(share.tolist(), means)]
                    if CASE == "pcgrad":
                        first, second = (
                            accelerator.reduce(torch.cat([g.flatten() for g in grads]), "mean")
                            for grads in (
                                torch.autograd.grad(
                                    mean, weights, retain_graph=True, materialize_grads=True,
                                    allow_unused=True,
                                )
                                for mean in means
                            )
                        )
                    accelerator.backward(sum(means))
                    if CASE == "pcgrad":
                        total, dot = first + second, first @ second
                        if dot < 0:
                            total = total - dot / (second @ second) * second
                            total = total - dot / (first @ first) * first
                        parts = total.split([weight.numel() for weight in weights])
                        for weight, part in zip(weights, parts):
                            weight.grad.copy_(part.view_as(weight))
                    optimizer.step()
                    optimizer.zero_grad()
                run.put(hidden, stream, h)
                if CASE == "queue":
                    keys, _ = run.gather(h.detach())
                    run.state["queue"] = torch.cat((keys, run.state["queue"]))[:12]
                run.add(loss=one + two)
                if run.end_step():
                    run.save()
            sums = run.predict(eval_loader, lambda batch: sum(losses_of(batch)[1:]))
            total = float(sums.sum())
            if CASE == "torchmetrics":
                from torchmetrics import SumMetric

                metric = SumMetric(sync_on_compute=False)  # each process has all rows already
                metric.update(sums)
                total = float(metric.compute())
            run.end_epoch({"eval_total": total})
        return run.finish()
"""
)


CASES = ["pcgrad", "gradnorm", "streams", "queue", "torchmetrics"]


@pytest.mark.parametrize("case", quick(zip(CASES), [("gradnorm",), ("streams",), ("queue",)]))
def test_a_loop_of_the_docs_is_alike_in_one_and_two_processes(fork_main, tmp_path, case):
    if case == "torchmetrics":
        pytest.importorskip("torchmetrics")
    for name, world in (("one", {}), ("two", {"world": 2})):
        flags = f"--log-every 1 --no-pictures --run-dir {tmp_path}/{name}"
        fork_main(SCRIPT, flags, given={"CASE": case}, **world).finished()
    pairs = zip(rows(tmp_path / "one"), rows(tmp_path / "two"), strict=True)
    for row, same in pairs:
        assert row == pytest.approx(same, rel=1e-4)
