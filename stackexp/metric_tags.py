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

from functools import cache
from typing import Any

TRAIN_LOSS = "train/loss"
AVERAGE_LOSS = "val/loss/average"
AVERAGE_ACCURACY = "val/accuracy/average"
TOKENS_PER_SECOND = "train/tokens_per_second"

AVERAGED_STEPS = 20
"""A run's training loss is the mean over this many last steps, and searches compare means over this many steps."""

DOWNSTREAM = "downstream"

NAMESPACES = ("train", "val", "test", "memory", "memory_val", DOWNSTREAM)
_OLD_TAGS = {
    "loss/train": TRAIN_LOSS,
    "loss/z": "train/z_loss",
    "loss/action_entropy": "train/action_entropy",
    "loss/spike": "train/spike",
    "accuracy/train": "train/accuracy",
}
_OLD_NAMESPACES = {"optimizer": "train", "throughput": "train", "data": "train", "validation": "val", "sample": "val"}


def rename_old_tags(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line of metrics.jsonl with tags of older versions renamed to the current names."""
    return {rename_old_tag(tag): value for tag, value in line.items()}


@cache
def rename_old_tag(tag: str) -> str:
    """Return the current name of a tag."""
    namespace, separator, rest = tag.partition("/")
    if tag in _OLD_TAGS or not separator or namespace in NAMESPACES:
        return _OLD_TAGS.get(tag, tag)
    if namespace in _OLD_NAMESPACES:
        return f"{_OLD_NAMESPACES[namespace]}/{rest}"
    return f"val/{tag}"  # a group of whole sets, such as v2/c4_en
