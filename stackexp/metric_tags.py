"""Tags of metrics.jsonl and TensorBoard, in the namespaces train/, val/, test/, memory/, memory_val/, downstream/.

train/<figure>                      of an optimizer step
val/<score>/<set>                   of a validation during training; the set `average` is the mean over all sets
val/<group>/<set>                   the loss of a set of a group, such as v2
val/<group>/average/<score>         the means over a group
val/whole/...                       the same over whole sets, in runs that validate on a sample (data.eval_sequences)
test/...                            the same for `test`; of formal languages test/accuracy_by_length and test/score_*
downstream/<task>/<score>           accuracy and bits_per_byte of a benchmark during training
memory/<figure>/layer_<number>      of a probed step; with a memory at each sublayer, followed by _<site>
memory_val/<figure>/layer_<number>  the same, and how stacks are read, on the first 8 sequences of each validation set
"""

TRAIN_LOSS = "train/loss"
AVERAGE_LOSS = "val/loss/average"
AVERAGE_ACCURACY = "val/accuracy/average"
TOKENS_PER_SECOND = "train/tokens_per_second"

AVERAGED_STEPS = 20
"""A run's training loss is the mean over this many last steps, and searches compare means over this many steps."""

DOWNSTREAM = "downstream"
