"""Tell for --keep-best whether a smaller or a larger value of a metric is better."""

import re

BETTER = {
    "min": "loss error err mse rmse mae medae msle rmsle mape smape logloss bce nll ppl perplexity "
    "bpb bpc deviance brier ece mce wer cer ter der eer fid kid lpips regret",
    "max": "accuracy acc f1 fbeta r2 auc auroc auprc ap map precision recall sensitivity "
    "specificity mcc kappa pearson spearman iou miou dice jaccard bleu sacrebleu chrf rouge rougel "
    "meteor bertscore psnr ssim ndcg mrr reward margin",
}
DIRECTION = {name: direction for direction, names in BETTER.items() for name in names.split()}
# A name that contains one of these does not tell the direction: neg_loss, accuracy_gap, loss_std.
UNCLEAR = "neg negative negated minus inv inverse inverted free rejected gap drop gain delta diff "
UNCLEAR += "difference change ratio reduction improvement increase decrease std stdev var variance"


def metric_and_direction(text: str) -> tuple[str, str]:
    """Return the metric of --keep-best, and "min" or "max": given as NAME:min, or by the name.

    A name is recognised by its parts between underscores and the like, which may end in digits:
    eval_wer, eval_clean-loss, ndcg@10, map50. The direction is "" if no part is recognised, or if
    the parts contradict each other.
    """
    name, _, direction = text.rpartition(":")
    if name and direction in ("min", "max"):
        return name, direction
    parts = set(re.split(r"[\W_]+", "" if ":" in text else text.lower()))
    directions = {DIRECTION.get(part) or DIRECTION.get(part.rstrip("0123456789")) for part in parts}
    clear = len(directions - {None}) == 1 and parts.isdisjoint(UNCLEAR.split())
    return text, max(filter(None, directions)) if clear else ""
