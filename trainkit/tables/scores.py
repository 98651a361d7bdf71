"""What predictions for the rows of a table are worth."""

from collections.abc import Sequence

import numpy as np
import torch


def measure_numbers(
    prediction: np.ndarray, truth: np.ndarray, baseline: Sequence[float]
) -> dict[str, float]:
    """Return MSE, RMSE, MAE and R2 of (rows, targets), each as the mean over the targets.

    r2 is scikit-learn's r2_score; r2_train_mean compares with `baseline` instead of the mean of the
    truth. For a target that does not vary both are 0, or 1 if its predictions are exact.
    """
    error = truth - prediction
    mse = (error**2).mean(0)
    values = {"mse": mse, "rmse": np.sqrt(mse), "mae": np.abs(error).mean(0)}
    for name, guess in (("r2", truth.mean(0)), ("r2_train_mean", np.asarray(baseline))):
        spread = ((truth - guess) ** 2).mean(0)
        values[name] = np.where(spread > 0, 1 - mse / np.where(spread > 0, spread, 1), mse == 0)
    return {f"eval_{name}": float(value.mean()) for name, value in values.items()}


def measure_classes(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Return accuracy and balanced accuracy of (rows, classes), and the AUC of two classes.

    Balanced accuracy is the mean over the classes, of those that have rows, of the share that is
    recognised. AUC is the share of pairs, one row of each class, that are in the right order.
    """
    right = (logits.argmax(1) == labels).double()
    shares = [right[labels == number].mean() for number in labels.unique()]
    metrics = {
        "eval_accuracy": right.mean().item(),
        "eval_balanced_accuracy": torch.stack(shares).mean().item(),
    }
    if logits.shape[1] == 2 and len(shares) == 2:
        # The sum of the ranks (Mann and Whitney, 1947); equal scores share their mean rank.
        _, place, counts = (logits[:, 1] - logits[:, 0]).unique(
            return_inverse=True, return_counts=True
        )
        rank = (counts.cumsum(0) - (counts - 1) / 2)[place]
        positive, negative = (labels == 1).sum(), (labels == 0).sum()
        pairs = rank[labels == 1].double().sum() - positive * (positive + 1) / 2
        metrics["eval_auc"] = (pairs / (positive * negative)).item()
    return metrics
