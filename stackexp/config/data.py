"""Options of token datasets."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Optional

from stackexp.config.fields import Errors, option
from stackexp.config.registry import register

if TYPE_CHECKING:
    from stackexp.config.experiment import ExperimentConfig


RESERVED_SET_NAMES = ("average", "whole", "loss", "perplexity", "bits_per_byte", "accuracy")  # see metric_tags.py


def explain_set_name(name: str) -> str | None:
    """Return the reason why an evaluation set cannot have this name, or None. Names become TensorBoard tags."""
    if name in RESERVED_SET_NAMES:
        return f"{name!r} is reserved, because it is part of the tags of metrics; choose another name"
    if not name.strip() or "/" in name or not name.isprintable():
        return f"{name!r} is not a valid set name; use letters, digits, '-', '_' and '.'"
    return None


@dataclass
class DataConfig:
    """Options of all token datasets; a plugin derives its own options from this class."""

    objective: ClassVar[str] = "language_modeling"  # a key of `modules.objectives`
    lengths_vary: ClassVar[bool] = False  # between batches; context_length is then the longest

    kind: str = "shards"
    vocab_size: int = option(49152, min=2, max=2**31 - 1)
    """Number of token ids."""
    context_length: int = option(2048, min=2, changes_scores=True)
    """Tokens per sequence."""
    document_mask: bool = False
    """Restart attention and positions at each document."""

    global_batch_tokens: int = option(2**21, min=1)
    """Tokens per optimizer step over all devices."""
    micro_batch_size: int = option(8, min=1, affects="execution")
    """Sequences per device and forward pass."""
    shuffle: bool = True
    """Shuffle the sequences of each epoch."""
    num_canonical_nodes: int = option(1, min=1)
    """Nodes that the sample order is computed for; a multiple or a divisor of the real number of nodes."""
    num_workers: int = option(1, min=0, affects="execution")
    """Loader processes per device."""
    hash_interval: int = option(10, min=1, affects="logging")
    """Steps between two records of the training data hash in data.jsonl."""

    eval_batch_size: int = option(8, min=1, affects="execution")
    """Sequences per device and forward pass in an evaluation."""
    eval_sequences: Optional[int] = option(None, min=1, affects="evaluation")
    """Sequences of each set that validations during training score; null scores all."""
    score_remainder: bool = option(False, affects="evaluation", changes_scores=True)
    """Score every token of a set except the first; if false, drop the incomplete last chunk, as in OLMo."""

    def find_experiment_errors(self, config: "ExperimentConfig", is_training: bool) -> Errors:
        """Yield the errors that involve other sections, with full keys."""
        model = config.model
        if not getattr(model, "causal", True):
            yield "model.causal", "language modeling requires model.causal: true"
        if getattr(model, "output_vocab_size", None) not in (None, model.vocab_size):
            yield "model.output_vocab_size", "language modeling requires model.output_vocab_size: null"
        axis = getattr(model, "memory_axis", "depth")
        if self.document_mask and axis != "depth":
            yield "data.document_mask", f"not supported by model.memory.axis: {axis}; use false"
        if self.document_mask and not hasattr(model, "memory_axis"):
            yield "data.document_mask", f"not supported by model.kind: {model.kind}; use false"
        batch, step = self.global_batch_tokens, config.tokens_per_pass
        if is_training and batch % step:
            factors = "trainer.devices * trainer.num_nodes * data.micro_batch_size * data.context_length"
            nearest = max(1, round(batch / step)) * step
            message = f"{batch} is not a multiple of {factors} = {step}; the nearest multiple is {nearest}"
            yield "data.global_batch_tokens", message


@dataclass
class StreamConfig:
    """One source of a mixture: a dataset made by `stackexp data prepare`, on disk or in object storage."""

    path: Optional[str] = option(None, affects="location")
    """Folder of the prepared dataset; with remote, the folder of its cache."""
    remote: Optional[str] = option(None, affects="location")
    """URL of the prepared dataset, such as s3://bucket/folder."""
    proportion: Optional[float] = option(None, above=0)
    """Share of the sequences, relative to the other streams."""
    repeat: Optional[float] = option(None, above=0)
    """Passes over the stream's sequences in each epoch; 0.5 takes half of them."""


@register("data", "shards", builds="stackexp.datamodules.pretraining:PretrainingData")
@dataclass
class ShardsConfig(DataConfig):
    """Token shards made by `stackexp data prepare`, and named sets for validation and test.

    A set is a file or a folder: a prepared dataset, raw token ids (.npy, .bin), .jsonl or text. A folder of several
    sets is a group: `v2: data/olmo/v2` has the sets v2/4chan, v2/c4_en, ...
    """

    kind: str = "shards"
    path: Optional[str] = option(None, affects="location")
    """Folder written by `data prepare`; with remote, the folder of its cache."""
    remote: Optional[str] = option(None, affects="location")
    """URL of a copy of a prepared folder, such as s3://bucket/folder."""
    streams: dict[str, StreamConfig] = option({})
    """Sources of a mixture by name, instead of path and remote."""
    cache_limit: Optional[str] = option(None, affects="execution")
    """Largest size of the cached shards per node, such as 200gb; null sets no limit."""
    download_timeout_seconds: float = option(60, above=0, affects="execution")
    """Seconds without a response from the server after which a download fails."""
    download_retries: int = option(4, min=0, affects="execution")
    """Number of times that a failed download is retried."""
    validation: dict[str, str] = option({}, affects="evaluation")
    """Validation sets by name; the value is the path of a set, or of a folder of sets."""
    test: dict[str, str] = option({}, affects="evaluation")
    """Test sets by name; the value is the path of a set, or of a folder of sets."""

    def find_errors(self) -> Errors:
        """Yield the errors that involve several options."""
        has_source = bool(self.path or self.remote)
        if has_source and self.streams:
            yield "path", "give one source (data.path, data.remote) or data.streams, not both"
        if not has_source and not self.streams:
            yield "path", "no training data; set data.path=FOLDER, data.remote=URL or data.streams"
        for name, stream in self.streams.items():
            key = f"streams.{name}"
            if not (stream.path or stream.remote):
                yield f"{key}.path", "a stream requires a path, a remote, or both"
            if stream.proportion is not None and stream.repeat is not None:
                yield f"{key}.repeat", "give proportion or repeat, not both"
        if len({stream.proportion is None for stream in self.streams.values()}) > 1:
            yield "streams", "give proportion to all streams or to none"
        for key in ("validation", "test"):
            for name in getattr(self, key):
                if message := explain_set_name(name):
                    yield key, message
        if self.cache_limit is not None and not re.fullmatch(r"\d+(\.\d+)? *([kmgt]?b)?", self.cache_limit.lower()):
            yield "cache_limit", f"expected a size such as 200gb, found {self.cache_limit!r}"


@register("data", "stdlib", builds="stackexp.datamodules.pretraining:StdlibData")
@dataclass
class StdlibConfig(DataConfig):
    """The source code of the Python standard library, prepared and cached on first use; needs no download."""

    kind: str = "stdlib"
    vocab_size: int = option(4096, min=300, max=2**20)
    """Number of token ids of the tokenizer that is trained."""
    context_length: int = option(256, min=2, changes_scores=True)
    """Tokens per sequence."""
    global_batch_tokens: int = option(4096, min=1)
    """Tokens per optimizer step over all devices."""
    packages: bool = False
    """Also train on the source code of installed packages, up to 24 MB in all, without repeated files."""
