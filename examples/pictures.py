"""Train a pretrained network on your own colour pictures, in a folder for each class.

python examples/pictures.py --dataset fruit
python examples/pictures.py --dataset fruit --freeze    trains the last layer alone: much faster
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # trainkit/ lies beside examples/
from trainkit import (  # pip install .
    Run,
    Share,
    compiled_with_model,
    keyed_uniform,
    make_loaders,
    make_optimizer,
    make_scheduler,
    parse,
    startup,
)

import torch
import torch.nn.functional as F
from torch import nn

from trainkit.pictures import (
    Features,
    PhotoConfig,
    choose_layout,
    draw_input,
    load_network,
    load_photos,
    make_network,
    measure,
    standardise,
    write_timm_folder,
)

make_model = make_network  # for predict.py, which loads the weights into it
NUM_SEEN = 12_000  # by default at least so many are trained on, unless 20 epochs have fewer


@dataclass
class Config(PhotoConfig):
    balance: bool = False  # draw all classes equally often
    smallest_crop: Share = 0.6  # the smallest share of a picture's area in a random crop
    colour: Share = 0.3  # largest change of brightness, contrast and saturation
    label_smoothing: Share = 0.1  # of the training loss
    run_dir: Path = Path("runs/pictures")
    batch_size: int = 32
    eval_batch_size: int = 64

    def find_problems(self, num_processes: int) -> list[str]:
        problems = super().find_problems(num_processes)
        if self.freeze and (self.smallest_crop, self.colour) != (0.6, 0.3):
            problems.append("--freeze augments nothing: leave out --smallest-crop, --colour")
        return problems


def augment(
    images: torch.Tensor, indices: torch.Tensor, epoch: int, config: Config
) -> torch.Tensor:
    """Crop, flip and colour each picture by amounts fixed by (seed, epoch, sample index) alone."""
    if config.freeze:  # they are features, which cannot be augmented
        return images
    return change(images, keyed_uniform(config.seed, epoch, indices, 8), config)


@compiled_with_model  # where the YAML compiles
def change(images: torch.Tensor, numbers: torch.Tensor, config: Config) -> torch.Tensor:
    """Crop, flip and colour each picture by amounts that its 8 numbers, from 0 to 1, decide."""
    area = 1 - (1 - config.smallest_crop) * numbers[:, 0]
    stretch = torch.exp((numbers[:, 1] - 0.5) * math.log(4 / 3))
    sides = torch.stack((area.sqrt() * stretch, area.sqrt() / stretch), 1).clamp(max=1)
    centres = (numbers[:, 3:5] * 2 - 1) * (1 - sides)
    flips = torch.where(numbers[:, 2:3] < 0.5, -1, 1)
    points = (2 * torch.arange(config.size, device=images.device) + 1) / config.size - 1
    x = points * sides[:, :1] * flips + centres[:, :1]
    y = points * sides[:, 1:] + centres[:, 1:]
    grid = torch.stack(torch.broadcast_tensors(x[:, None], y[:, :, None]), -1)
    images = F.grid_sample(images.float(), grid, align_corners=False, padding_mode="border")
    # Change the colours, 0 to 255.
    factors = 1 + config.colour * (2 * numbers[:, 5:] - 1)
    brightness, contrast, saturation = factors.view(-1, 3, 1, 1, 1).unbind(1)
    grey = images.mean(1, keepdim=True)
    images = grey * (1 - saturation) + images * saturation
    return ((images - 127.5) * contrast + 127.5).mul_(brightness).clamp_(0, 255)


def load_data(config: Config) -> tuple:
    """Return the photos to train and evaluate on, the network, its metadata, the plan's lines."""
    network, metadata, lines = load_network(config)
    train_set, eval_set, plan = load_photos(config)
    epochs = 20 if config.freeze else min(20, max(5, NUM_SEEN // len(train_set)))
    config.set_unset({"epochs": epochs})
    metadata |= {"script": Path(__file__).stem, "classes": train_set.classes}
    metadata |= {"reading": train_set.split.reading}
    return train_set, eval_set, network, metadata, plan | lines


def make_head(network: nn.Module, classes: list[str]) -> nn.Linear:
    """Return the last layer. It begins with zeros, unless --base was trained on these classes."""
    if network.pretrained_cfg.get("label_names") != classes:
        network.reset_classifier(len(classes))
        nn.init.zeros_(network.get_classifier().weight)
    return network.get_classifier()


def train_but_norms(model: nn.Module) -> None:
    """Put a model into training mode, except BatchNorm, whose mean and variance then stay fixed."""
    for layer in model.train().modules():
        layer.training = not isinstance(layer, nn.BatchNorm2d)


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Train, evaluate, write the run folder and RUN_DIR/pretrained; return the last metrics."""
    config = parse(Config, argv)
    with Run(config, "pictures") as run:
        accelerator = run.accelerator
        train_set, eval_set, network, metadata, plan = run.load(load_data)
        model = head = make_head(network, train_set.classes)
        groups = [{"params": [*head.parameters()]}]
        sets = [train_set, eval_set]
        num_seen = config.epochs * len(train_set) / accelerator.num_processes
        layout = choose_layout(accelerator.device, num_seen)
        if config.freeze:  # the last layer alone is trained, on what it gets for each picture
            sets = [Features(part) for part in sets]
        else:
            model = network.to(memory_format=layout)
            body = [w for w in model.parameters() if all(w is not x for x in head.parameters())]
            groups.append({"params": body, "lr": config.peak_learning_rate / 3})
        train_but_norms(model)
        weights = 1 / train_set.labels.bincount()[train_set.labels] if config.balance else None
        loaders = make_loaders(accelerator, *sets, config, weights=weights)
        optimizer = make_optimizer(accelerator, groups, config)
        scheduler = make_scheduler(optimizer, config, run.steps_per_epoch)
        model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
            model, optimizer, *loaders, scheduler
        )
        run.begin(model, metadata, plan)
        draw_input(run, train_set, eval_set, metadata, lambda x, i: augment(x, i, 0, config))
        if config.freeze:
            for part in sets:  # now that the plan is on the screen, because this takes longest
                part.compute(accelerator, network, metadata)

        for epoch in run.epochs():
            for images, labels, indices in run.steps(train_loader):
                with accelerator.accumulate(model):
                    seen = augment(images, indices, epoch, config)
                    logits = model(standardise(seen, metadata, layout))
                    targets = F.one_hot(labels, len(train_set.classes)).float()
                    losses = F.cross_entropy(
                        logits, targets, reduction="none", label_smoothing=config.label_smoothing
                    )
                    accelerator.backward(run.step_mean(losses))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                run.add(
                    loss=F.cross_entropy(logits.detach(), labels, reduction="none"),
                    loss_smoothed=losses,  # what is minimised
                    accuracy=logits.argmax(1) == labels,
                )
                if run.end_step():
                    run.save()
            logits = run.predict(
                eval_loader, lambda b: model(standardise(b.images, metadata, layout))
            )
            run.end_epoch(*measure(logits, eval_set))
        write_timm_folder(run, network, metadata)
        return run.finish()


if __name__ == "__main__":
    startup.run(main)
