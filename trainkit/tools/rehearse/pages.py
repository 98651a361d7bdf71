"""Rows of the tables in docs/loop.md and docs/resume.md, which have the cures."""

BATCH_NORM = "BatchNorm"
ORDER_OF_CHANCE = "random augmentation in a `Dataset`"
DRAWN_FOR_BATCH = "a `collate_fn` that draws random numbers"
OWN_STATE = "state of your own that a resume must restore"
OWN_SCHEDULE = "a schedule that is no schedule of torch"
REGISTERED = "anything else that the loop changes"
CHANGED_SET = "a set that the loop itself fills or changes"
TEACHER = "a momentum teacher"
OWN_MEAN = "a metric that needs all predictions"
SAMPLES_COMPARED = "a loss that compares the samples of a batch"
MASKED = "a loss over tokens or pixels with a mask"
SEVERAL = "several objectives with labels missing in places"
NO_GRADIENT = "parameters that get no gradient in some steps"
ON_DEVICE = "augmentation or noise on the device"
GRADIENTS = "code that reads the gradients"
RESUMED = {OWN_STATE, OWN_SCHEDULE, REGISTERED, CHANGED_SET, TEACHER}  # of docs/resume.md
# What a refusal or an error says, and the row with its cure.
SAID = {
    r"mixed torch.Tensor and DTensor|sharded weights, of which": TEACHER,
    r"gather|compares the samples": SAMPLES_COMPARED,
    r"count=|over=": SEVERAL,
    r"mask=|reduction=|padded": MASKED,
    r"did not receive grad|Expected to have finished reduction|no gradient": NO_GRADIENT,
    r"BatchNorm": BATCH_NORM,
}
# What a variable of each kind is restored by, and its row.
HOMES = {
    "state": ("register it by accelerator.register_for_checkpointing(...)", REGISTERED),
    "number": ("keep it in run.state", OWN_STATE),
    "tensor": ("keep it in a buffer of a prepared module", OWN_STATE),
    "generator": ("draw from torch, numpy or random themselves, which Run seeds", OWN_STATE),
}
