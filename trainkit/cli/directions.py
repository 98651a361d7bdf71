"""Of which metrics a smaller value is better, and of which a larger one: for --keep-best."""

import re

BETTER = {
    "min": "loss error err mse rmse mae medae msle rmsle mape smape logloss bce nll ppl perplexity "
    "bpb bpc deviance brier ece mce wer cer ter der eer fid kid lpips regret",
    "max": "accuracy acc f1 fbeta r2 auc auroc auprc ap map precision recall sensitivity "
    "specificity mcc kappa pearson spearman iou miou dice jaccard bleu sacrebleu chrf rouge rougel "
    "meteor bertscore psnr ssim ndcg mrr reward margin",
}
DIRECTION = {name: direction for direction, names in BETTER.items() for name in names.split()}
# With one of these in it a name says nothing: neg_loss, accuracy_gap, loss_std.
UNCLEAR = "neg negative negated minus inv inverse inverted free rejected gap drop gain delta diff "
UNCLEAR += "difference change ratio reduction improvement increase decrease std stdev var variance"


def metric_and_direction(text: str) -> tuple[str, str]:
    """The metric of --keep-best, and "min" or "max": said as NAME:min, else known by its name.

    A name is known by its parts between underscores and the like, which may end in digits:
    eval_wer, eval_clean-loss, ndcg@10, map50. The direction is "" where nothing in it is known, or
    where it speaks both ways.
    """
    name, _, said = text.rpartition(":")
    if name and said in ("min", "max"):
        return name, said
    parts = set(re.split(r"[\W_]+", "" if ":" in text else text.lower()))
    known = {DIRECTION.get(part) or DIRECTION.get(part.rstrip("0123456789")) for part in parts}
    clear = len(known - {None}) == 1 and parts.isdisjoint(UNCLEAR.split())
    return text, max(filter(None, known)) if clear else ""
