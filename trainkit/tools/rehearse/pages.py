"""What makes numbers others, as data: the sentence that names it, and the row with its cure."""

# Rows of docs/loop.md and docs/resume.md.
BATCH_NORM = "BatchNorm"
ORDER_OF_CHANCE = "random augmentation in a `Dataset`"
DRAWN_FOR_BATCH = "a `collate_fn` that draws random numbers"
OWN_STATE = "a number, a text, a tensor, an array"
FOLLOWS = "what follows the batches"
OF_STREAMS = "what belongs to samples or streams"
AT_START = "what is made at the start of an epoch"
STEP_IN_EPOCH = "the number of the step in its epoch"
REGISTERED = OWN_SCHEDULE = "another object with a `state_dict`"
CHANGED_SET = "a set that the loop itself fills or changes"
TEACHER = "a momentum teacher"
OWN_MEAN = "a metric that needs all predictions"
SAMPLES_COMPARED = "a loss that compares the samples of a batch"
MASKED = "a loss over tokens or pixels with a mask"
SEVERAL = "several objectives with labels missing in places"
NO_GRADIENT = "parameters that get no gradient in some steps"
NO_INDEX = "an iterable data set, a sampler or loader"
ON_DEVICE = "augmentation or noise on the device"
GRADIENTS = "code that reads the gradients"
RESUMED = {  # of docs/resume.md
    OWN_STATE, FOLLOWS, OF_STREAMS, AT_START, STEP_IN_EPOCH, REGISTERED, CHANGED_SET, TEACHER
}  # fmt: skip

BROADCAST = (
    "predictions (n, 1) and targets (n,) make (n, n) in {}: give both one shape, as by "
    "predictions.squeeze(1)"
)
# What a refusal or an error says, what is added to it, and the row.
SAID = {
    r"run\.mean\(values\) returns it": ("", FOLLOWS),
    "mixed torch.Tensor and DTensor|sharded weights, of which": ("", TEACHER),
    "gather|compares the samples": ("", SAMPLES_COMPARED),
    "count=|over=": ("", SEVERAL),
    "mask=|reduction=|padded": ("", MASKED),
    "no gradient in this step|finished reduction": ("", NO_GRADIENT),
    "BatchNorm": ("", BATCH_NORM),
    "differ between the processes after step": (
        "; call the model that accelerator.prepare(...) returned, not the one that it was given",
        "",
    ),
}
# What a variable of each kind is restored by, and its row.
HOMES = {
    "state": ("register it by accelerator.register_for_checkpointing(...)", REGISTERED),
    "number": ("keep it in run.state", OWN_STATE),
    "tensor": ("keep it in run.state", OWN_STATE),
    "start": (
        "make it inside `if run.starts_epoch:` and keep it in run.state, so that a resume does not "
        "make it again from later weights",
        AT_START,
    ),
    "generator": ("draw from torch, numpy or random themselves, which Run seeds", OWN_STATE),
}
GATHERS = (
    "{} counts padding, and takes no unequal shares of a short batch: run.mean(values) is the mean "
    "over the samples of the step"
)
COUNTED = "`{}` counts the batches of this process: take run.progress.step_in_epoch"
BY_MICRO_BATCH = (
    "{} changes with each micro-batch: change it by run.mean(values), the mean over the whole "
    "step, inside `if accelerator.sync_gradients:`, or write the rows of its samples into a table "
    "by run.put(table, index, rows)"
)
BY_SHARE = (
    "{} follows the share of one process: change it by run.mean(values), which is the same on "
    "every process, or write the rows of all processes into a table by run.put(table, index, rows)"
)
EVAL_BATCH = (
    "--eval-batch-size {} changes the evaluation: let its function return a value of each sample "
    "that depends on no other, and compute what needs several from run.predict(...)"
)
NUM_SAMPLES = (
    "it has {} samples to train and evaluate on, and the first run {}: what load_data(config) "
    "returns depends on the number of processes, but each must have all samples, by index"
)
# Of what watching.py notes: its name there, the sentence, and the row.
IN_SAMPLES = (
    ("drawn", "{} of a sample is another one when it is made again with the same seeds: let no "
     "generator of its own, clock or counter decide it", ORDER_OF_CHANCE),
    ("changed", "the samples are no longer what they were at the start", CHANGED_SET),
    ("data", "load_data(config) returns other samples in each run: seed what it draws", ""),
    ("weights", "the weights begin otherwise in each run: make them as Run has seeded torch", ""),
)  # fmt: skip
IN_STEP = (
    ("changes_early", "gradients or weights are changed before the last micro-batch of a step is "
     "there, as clipping, zero_grad() and SAM do: do it `if accelerator.sync_gradients:`",
     GRADIENTS),
)  # fmt: skip
IN_EVALUATION = (
    ("draws_in_evaluation", "the function of run.evaluate(...) or run.predict(...) draws random "
     "numbers: F.dropout(x) is always on, so use nn.Dropout or F.dropout(x, "
     "training=self.training)", ON_DEVICE),
    ("broadcast_in_evaluation", BROADCAST, ""),
)  # fmt: skip
SHARE_MEAN = "a mean over samples comes from run.evaluate(...), not from a process's share"
IN_LOOP = (
    ("by_batch", "{} of a sample depends on the others of its batch", DRAWN_FOR_BATCH),
    ("gathers", GATHERS, FOLLOWS),
    ("passes_backward_by", "loss.backward() came past accelerator.backward(loss), which divides by "
     "--accumulate and scales under fp16: call accelerator.backward(loss)", ""),
    ("broadcast", BROADCAST, ""),
    ("buffers", "the buffer {} changes in the run, by a process's share of a batch: change it by "
     "run.mean(values) or run.put(buffer, index, rows), or keep it as it is", FOLLOWS),
    ("draws", "the loop draws from {}", ON_DEVICE),
)  # fmt: skip
DIVIDED = (
    "the loss is divided by --accumulate, which accelerator.backward(...) does already: leave the "
    "division out"
)
FACTOR = (
    "what run.step_mean(...) returned is multiplied by {:.4g} and here by {:.4g}: put that into "
    "the value of each sample, and use a mean as it is, not its root or logarithm"
)
TERM = (
    "the loss has a term that run.step_mean(...) did not make, {:.4g} and here {:.4g}: give "
    "run.step_mean(...) its values as well, one for each sample"
)
ONE_NUMBER = (
    "run.step_mean(...) got one number for all samples of a share: let each sample have a value "
    "of its own, or compute it from the whole batch, by run.gather(...)"
)
# What may be meant, though all worlds agree.
REMARKS = (
    ("still", "{} is held still here; in a run it depends on how a batch is split: docs/loop.md"),
    ("shared", "about {:.0%} of the evaluation set is in the training set too, so its metrics say "
     "little about new data: split the samples before anything is copied"),
    ("drawn_to_evaluate", "{} of a sample of the evaluation set depends on random numbers, as it "
     "should where tokens are hidden; augmentation belongs into the training set alone"),
    ("untrained", "{} got no gradient in any step, and several processes wait for it: use it in "
     "the loss, or call requires_grad_(False) before accelerator.prepare(...)"),
)  # fmt: skip
