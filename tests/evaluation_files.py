"""Evaluation sets of every kind, built from the same few documents."""

import json
from pathlib import Path

import numpy as np

from stackexp.config.data import ShardsConfig
from stackexp.data.evaluation_sets import EvaluationSet, open_set
from stackexp.data.tokenizer import KnownTokenizer, train_tokenizer

T, V = 16, 300
TEXTS = [f"line {n} of {n * n} lines, naïve\n" * 3 for n in range(40)]
TOKENIZER = train_tokenizer(TEXTS, V)
IDS = [id_ for text in TEXTS for id_ in [*TOKENIZER.encode(text).ids, 0]]  # documents, each with its end


def config(**changes) -> ShardsConfig:
    return ShardsConfig(**{"path": "x", "vocab_size": V, "context_length": T} | changes)


def open_one(path: Path, known: KnownTokenizer | None = None, **changes) -> EvaluationSet:
    return open_set("set", path, config(**changes), known)


def read_tokens(dataset: EvaluationSet) -> list[int]:
    return dataset.chunks.tokens[0 : len(dataset.chunks.tokens)].tolist()


def write_raw(path: Path, ids: list[int] = IDS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(np.array(ids, "<u2").tobytes())
    return path


def make_json_lines() -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
