"""Options of the datasets: token shards, arithmetic problems and formal languages."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Optional

from omegaconf import OmegaConf

from stackexp.config.experiment import ExperimentConfig
from stackexp.config.fields import Affects, Errors, option
from stackexp.config.registry import register
from stackexp.tasks import TASKS

RESERVED_SET_NAMES = ("average", "whole", "loss", "perplexity", "bits_per_byte", "accuracy")  # see metric_tags.py


def explain_set_name(name: str) -> str | None:
    """Return the reason why an evaluation set cannot have this name, or None. Names become TensorBoard tags."""
    if name in RESERVED_SET_NAMES:
        return f"{name!r} is reserved, because it is part of the tags of metrics; choose another name"
    if not name.strip() or "/" in name or not name.isprintable():
        return f"{name!r} is not a valid set name; use letters, digits, '-', '_' and '.'"
    return None


def find_batch_errors(batch_size: int, config: ExperimentConfig) -> Errors:
    """Yield an error if the devices cannot share a batch equally."""
    if batch_size % config.trainer.world_size:
        multiple = f"trainer.devices * trainer.num_nodes = {config.trainer.world_size}"
        yield "data.batch_size", f"{batch_size} is not a multiple of {multiple}"


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
    shuffle_seed: Optional[int] = option(None, min=0, max=2**32 - 1)
    """Seed of the sequence order; null is `seed`, which also draws the initial weights."""
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
    max_chunks: Optional[int] = option(None, min=1, affects="evaluation", changes_scores=True)
    """Chunks of each set that are scored, evenly spaced; null scores all."""

    def find_experiment_errors(self, config: ExperimentConfig, is_training: bool) -> Errors:
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
        if len(self.streams) > 1 and not self.shuffle:
            yield "shuffle", "without it, an epoch reads one stream after the other; set data.shuffle=true"
        for key in ("validation", "test"):
            for name in getattr(self, key):
                if message := explain_set_name(name):
                    yield key, message
        if self.cache_limit is not None and not re.fullmatch(r"\d+b?|\d+(\.\d+)? *[kmgt]b", self.cache_limit.lower()):
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


ARITHMETIC_SYMBOLS = (*"0123456789+*=", "<|endoftext|>")
"""The symbol of each token id. The last one ends an answer and fills it up to the longest."""
OPERATORS = {"addition": "+", "multiplication": "*"}
ANSWER_LENGTHS = {"addition": 3, "multiplication": 4}
"""Digits of the largest sum and of the largest product of two-digit numbers."""
PROBLEM_LENGTH = len("37+58=")


@register("data", "arithmetic", builds="stackexp.datamodules.arithmetic:ArithmeticData")
@dataclass
class ArithmeticConfig:
    """All 8,100 problems with two numbers from 10 to 99. Training samples those that are not held out.

    The text is `37+58=95`. Only the answer is scored, in training too.
    """

    objective: ClassVar[str] = "arithmetic"
    lengths_vary: ClassVar[bool] = False
    vocab_size: ClassVar[int] = len(ARITHMETIC_SYMBOLS)

    kind: str = "arithmetic"
    operation: str = option("addition", choices=tuple(OPERATORS), changes_scores=True)
    """The operation of all problems."""
    held_out: float = option(0.1, above=0, below=1, changes_scores=True)
    """Share of the problems that is never trained on."""
    split_seed: int = option(0, min=0, max=2**32 - 1, changes_scores=True)
    """Seed that chooses the held-out problems."""
    reversed_answers: bool = option(False, changes_scores=True)
    """Write answers least significant digit first, as in 37+58=59."""
    batch_size: int = option(256, min=1)
    """Problems per optimizer step over all devices."""
    eval_batch_size: int = option(512, min=1, affects="execution")
    """Problems per device and forward pass in an evaluation."""

    def find_experiment_errors(self, config: ExperimentConfig, is_training: bool) -> Errors:
        """Yield the errors that involve other sections; keys are full keys."""
        if not getattr(config.model, "causal", True):
            yield "model.causal", "arithmetic requires model.causal: true"
        yield from find_batch_errors(self.batch_size, config)

    @property
    def answer_length(self) -> int:
        """Return the symbols of an answer."""
        return ANSWER_LENGTHS[self.operation]

    @property
    def context_length(self) -> int:
        """Return the tokens that the model reads: the problem and all but the last symbol of its answer."""
        return PROBLEM_LENGTH + self.answer_length - 1

    @property
    def global_batch_tokens(self) -> int:
        """Return the tokens per optimizer step."""
        return self.batch_size * self.context_length


def read_task(attribute: str, task: str) -> Any:
    """Return an attribute of a task. An unknown task is reported later, so this returns that of reverse_string."""
    return getattr(TASKS.get(task) or TASKS["reverse_string"], attribute)


OmegaConf.register_resolver("task", read_task, replace=True)


def task_length(attribute: str, usual: int, affects: Affects = "training") -> Any:
    """Define a length whose default is an attribute of the task; `usual` is its default in trial ids and reports."""
    field = option(f"${{task:{attribute},${{data.task}}}}", min=1, affects=affects)
    field.metadata = {**field.metadata, "usual": usual}
    return field


@register("data", "formal_language", builds="stackexp.datamodules.formal_language:FormalLanguageData")
@dataclass
class FormalLanguageConfig:
    """Random strings of one task. A sequence is a string, then an empty token for each symbol of the answer.

    Tasks with an answer at every token have no empty tokens. The lengths are those of the task unless they are set.

    All strings of a batch have one length: uniform from the shortest of the task to max_length, or with probability
    `longest_fraction` the longest. With a curriculum, the longest length grows from curriculum_start to max_length over
    curriculum_steps.
    """

    objective: ClassVar[str] = "transduction"
    lengths_vary: ClassVar[bool] = True

    kind: str = "formal_language"
    task: str = option("reverse_string", choices=TASKS, changes_scores=True)
    """The formal language."""
    vocab_size: int = "${task:vocab_size,${data.task}}"  # type: ignore[assignment]
    """Number of input token ids, set by the task; the last id is the empty token, if the task has one."""
    output_vocab_size: int = "${task:num_answer_symbols,${data.task}}"  # type: ignore[assignment]
    """Number of different answer symbols, set by the task."""

    batch_size: int = option(128, min=1)
    """Strings per optimizer step over all devices."""
    max_length: int = task_length("max_length", 40)
    """Longest training string."""
    curriculum_steps: int = option(0, min=0)
    """Steps over which the longest string grows from curriculum_start to max_length."""
    curriculum_start: int = option(4, min=1)
    """Longest string at the first step of the curriculum."""
    longest_fraction: float = option(0.0, min=0, max=1)
    """Share of the batches whose strings all have the longest length."""
    loop_fraction: float = option(0.0, min=0, max=1)
    """Share of the strings that end with a repeated word of one to three symbols (modular_arithmetic: pairs)."""
    label_smoothing: float = option(0.0, min=0, below=1)
    """Probability mass that training targets spread evenly over all symbols."""

    validation_max_length: int = task_length("validation_max_length", 60, affects="evaluation")
    """Validations during training test all longer lengths than max_length, up to this one."""
    validation_sequences: int = option(32, min=1, affects="evaluation")
    """Strings of each length in validations during training."""

    eval_max_length: int = task_length("eval_max_length", 500, affects="evaluation")
    """Longest test string."""
    eval_length_stride: int = option(1, min=1, affects="evaluation")
    """Test every N-th length, from the first above max_length on, and the longest."""
    eval_sequences: int = option(512, min=1, affects="evaluation")
    """Test strings of each length."""
    eval_batch_size: int = option(128, min=1, affects="execution")
    """Strings per device and forward pass in an evaluation."""

    def find_errors(self) -> Errors:
        """Yield the errors that involve several options."""
        task = TASKS[self.task]
        sizes = {"vocab_size": task.vocab_size, "output_vocab_size": task.num_answer_symbols}
        for name, size in sizes.items():
            if getattr(self, name) != size:
                yield name, f"data.task {self.task} has {size}, found {getattr(self, name)}; remove this option"
        if self.loop_fraction and not task.solve:
            able = ", ".join(name for name, other in TASKS.items() if other.solve)
            yield "loop_fraction", f"requires a task in which words can be repeated: {able}"
        least = task.min_length
        for name in ["curriculum_start", "max_length"] if self.curriculum_steps else ["max_length"]:
            if (length := getattr(self, name)) < least:
                yield name, f"{length} is too short: the shortest string of {self.task} has {least} symbols"
        if self.curriculum_steps and self.curriculum_start > self.max_length:
            yield "curriculum_start", f"must not be larger than max_length {self.max_length}"
        for name in ("validation_max_length", "eval_max_length"):
            if getattr(self, name) < self.first_unseen_length:
                longer = f"to include strings longer than max_length {self.max_length}"
                yield name, f"must be at least {self.first_unseen_length}, {longer}"
        if self.longest_fraction and task.entropy:
            yield "longest_fraction", f"the entropy of {self.task} assumes uniform lengths; remove this option"

    def find_experiment_errors(self, config: ExperimentConfig, is_training: bool) -> Errors:
        """Yield the errors that involve other sections; keys are full keys."""
        if (output := config.model.output_vocab_size) != self.output_vocab_size:
            found = f"data.task {self.task} has {self.output_vocab_size} output symbols, the model {output}"
            yield "model.output_vocab_size", f"{found}; set model.output_vocab_size=${{data.output_vocab_size}}"
        yield from find_batch_errors(self.batch_size, config)

    @property
    def first_unseen_length(self) -> int:
        """Return the smallest length whose strings are longer than those of the training."""
        return TASKS[self.task].find_unseen_length(self.max_length)

    @property
    def tested_lengths(self) -> list[int]:
        """Return the string lengths of the test: every `eval_length_stride`-th one, and the longest."""
        first, last = self.first_unseen_length, self.eval_max_length
        lengths = [*range(1, self.max_length + 1), *range(first, last + 1)]
        return [n for n in lengths if (n - first) % self.eval_length_stride == 0 or n == last]

    @property
    def context_length(self) -> int:
        """Return the tokens in the longest training sequence, including empty tokens."""
        return TASKS[self.task].count_tokens(self.max_length)

    @property
    def global_batch_tokens(self) -> int:
        """Return the mean tokens per optimizer step after the curriculum."""
        task = TASKS[self.task]
        lengths = range(task.min_length, self.max_length + 1)
        uniform = sum(map(task.count_tokens, lengths)) / len(lengths)
        return round(self.batch_size * (uniform + self.longest_fraction * (self.context_length - uniform)))


def get_model_label(options: Mapping[str, Any]) -> str:
    """Return the short name of a model from the options {full key: value} of its config.

    One of transformer, stacktrans, stacktrans-depth, stacktrans-queue, stacktrans-depth-push_only, ...,
    stack_attention, lstm, stack_rnn, delta_net, delta_product, or another kind.
    """
    kind, memory = options["model.kind"], options.get("model.memory.kind")
    if kind == "delta_net" and options.get("model.num_householder", 1) > 1:
        return "delta_product"
    if kind != "transformer" or memory != "stack":
        return kind if kind != "transformer" else memory or kind
    discipline = options["model.memory.discipline"]
    depth = ["depth"] * (options["model.memory.axis"] == "depth")
    return "-".join(["stacktrans", *depth, *[discipline] * (discipline != "stack")])
