"""Options of token datasets."""

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Optional

from stackexp.config.fields import Problems, above, at_least
from stackexp.config.registry import register

if TYPE_CHECKING:
    from stackexp.config.experiment import ExperimentConfig


@dataclass
class DataConfig:
    """What every source of tokens shares; a plugin's options derive from it."""

    objective: ClassVar[str] = "language_modeling"  # what a model is trained for: a key of `modules.objectives`
    lengths_vary: ClassVar[bool] = False  # from batch to batch; context_length is then that of the longest

    kind: str = "shards"
    vocab_size: int = at_least(2, 49152)
    context_length: int = at_least(2, 2048)
    global_batch_tokens: int = at_least(1, 2**21)  # tokens per optimizer step over all devices
    micro_batch_size: int = at_least(1, 8)  # sequences per device and forward pass
    eval_batch_size: int = at_least(1, 8)  # sequences per device; changes no figure
    eval_sequences: Optional[int] = at_least(1, None)  # of each set while fitting; None: all
    shuffle: bool = True
    num_workers: int = at_least(0, 1)
    num_canonical_nodes: int = at_least(1, 1)  # fixes the order of samples whatever the number of devices
    keep_remainder: bool = False  # score every token of a set but its first, not whole chunks alone as OLMo does
    document_mask: bool = False  # attention stays within a document, and positions begin anew in each
    hash_interval: int = at_least(1, 10)  # steps between two records of the hash of all tokens trained on so far

    def micro_batch(self, devices: int) -> int:
        """Sequences of one forward pass on each of so many devices."""
        return self.micro_batch_size

    def experiment_problems(self, config: "ExperimentConfig", trains: bool) -> Problems:
        """What model and trainer must agree in with the tokens; keys are those of the experiment."""
        model = config.model
        if not getattr(model, "causal", True):
            yield "model.causal", "a token must not see the next one, which is to be foretold; set it to true"
        if getattr(model, "output_vocab_size", None) not in (None, model.vocab_size):
            yield "model.output_vocab_size", "next tokens are of vocab_size; set it to null"
        axis = getattr(getattr(model, "memory", None), "axis", "depth")
        if self.document_mask and axis != "depth":
            yield "data.document_mask", f"a memory of axis {axis} lasts across documents; set it to false"
        batch, step = self.global_batch_tokens, config.tokens_per_pass
        if trains and batch % step:
            nearest = max(1, round(batch / step)) * step
            yield (
                "data.global_batch_tokens",
                (
                    f"{batch} is not a multiple of trainer.devices * trainer.num_nodes * data.micro_batch_size * "
                    f"data.context_length = {step}; the nearest that is: {nearest}"
                ),
            )


@dataclass
class StreamConfig:
    """One source of a mixture: a set made by `stackexp data prepare`, on a disk or in object storage."""

    path: Optional[str] = None  # its folder; with `remote` the cache of it
    remote: Optional[str] = None  # s3://bucket/folder
    proportion: Optional[float] = above(0, None)  # its share of the sequences, relative to the others'
    repeat: Optional[float] = above(0, None)  # how often each of its sequences comes in an epoch


@register("data", "shards", builds="stackexp.datamodules.pretraining:PretrainingData")
@dataclass
class ShardsConfig(DataConfig):
    """Token shards made by `stackexp data prepare`, and named sets of tokens to validate and test on.

    A set to validate or test on is a file or a folder: a prepared set, raw token ids (.npy, .bin), .jsonl or text.
    A folder of several such sets gives a group: `v2: data/olmo/v2` has the sets v2/4chan, v2/c4_en ...
    """

    kind: str = "shards"
    path: Optional[str] = None  # the folder `data prepare` wrote; with `remote` the cache of it
    remote: Optional[str] = None  # s3://bucket/folder: where that folder was copied to
    streams: dict[str, StreamConfig] = field(default_factory=dict)  # a mixture instead: name -> source
    cache_limit: Optional[str] = None  # of the cached shards of a remote on each node, such as 200gb; null: no limit
    download_timeout: float = above(0, 60)  # seconds without an answer from the server
    download_retries: int = at_least(0, 4)
    validation: dict[str, str] = field(default_factory=dict)  # name -> a set, or a folder of sets
    test: dict[str, str] = field(default_factory=dict)

    def problems(self) -> Problems:
        single = self.path or self.remote
        if bool(single) == bool(self.streams):
            missing = "a source of tokens is required; set it with data.path=FOLDER, data.remote=URL or data.streams"
            yield "path", "give one source (data.path, data.remote) or data.streams, not both" if single else missing
        for name, stream in self.streams.items():
            key = f"streams.{name}"
            if not (stream.path or stream.remote):
                yield f"{key}.path", "a stream needs a path, a remote, or both"
            if stream.proportion is not None and stream.repeat is not None:
                yield f"{key}.repeat", "give proportion or repeat, not both"
        if len({s.proportion is None for s in self.streams.values()}) > 1:
            yield "streams", "give proportion to all streams or to none (repeat counts epochs, not shares)"
        if self.cache_limit is not None and not re.fullmatch(r"\d+(\.\d+)? *([kmgt]?b)?", self.cache_limit.lower()):
            yield "cache_limit", f"expected a size such as 200gb, found {self.cache_limit!r}"


@register("data", "stdlib", builds="stackexp.datamodules.pretraining:StdlibData")
@dataclass
class StdlibConfig(DataConfig):
    """The Python standard library's own source, prepared on first use and cached: needs no download."""

    kind: str = "stdlib"
    vocab_size: int = at_least(300, 4096)
    context_length: int = at_least(2, 256)
    global_batch_tokens: int = at_least(1, 4096)
