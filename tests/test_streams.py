"""Mixtures of training sources: proportions, order, resume, and errors."""

import json
import math
from collections import Counter

import pytest
from forks import processes_in
from hypothesis import given
from hypothesis import strategies as st
from loaders import BATCH, T, build_config, build_loader, read_samples, run_ranks, split_into_steps, write_set
from processes import wait_until
from records import only_run, record
from streaming.base.util import bytes_to_int

from stackexp.config.data import ShardsConfig, StreamConfig
from stackexp.data import hash_log
from stackexp.data.shards import TokenSet
from stackexp.data.tokenizer import train_tokenizer
from stackexp.data.units import write_documents
from stackexp.datamodules.node_storage import SourceError
from stackexp.datamodules.pretraining import apportion
from stackexp.datamodules.token_stream import TokenSource, find_path
from stackexp.errors import RunError

PROPORTIONS = {"books": {"proportion": 1}, "code": {"proportion": 2}, "math": {"proportion": 1}}


@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> dict[str, str]:
    """Three sets of about 150, 60 and 20 sequences."""
    folder = tmp_path_factory.mktemp("sets")
    counts = {"books": (0, 60), "code": (1000, 25), "math": (5000, 8)}
    return {name: str(write_set(folder / name, first, count)) for name, (first, count) in counts.items()}


def mix(sets: dict[str, str], weights: dict[str, dict], **changes):
    streams = {name: StreamConfig(path=sets[name], **weight) for name, weight in weights.items()}
    return build_config(streams=streams, **changes)


def test_an_epoch_has_the_configured_proportions(sets):
    samples = read_samples(build_loader(mix(sets, PROPORTIONS)))
    total = sum(len(TokenSet(path)) for path in sets.values()) // BATCH * BATCH
    counts = Counter(source for _, source, _ in samples)
    assert len(samples) == total
    assert [counts[n] for n in range(3)] == apportion(total, [1, 2, 1])


def test_repeat_sets_the_passes_per_epoch(sets):
    config = mix(sets, {"books": {"repeat": 0.5}, "code": {}, "math": {"repeat": 3}})
    samples, sizes = read_samples(build_loader(config)), [len(TokenSet(path)) for path in sets.values()]
    assert len(samples) % BATCH == 0
    counts = Counter(source for _, source, _ in samples)
    for n, repeat in enumerate((0.5, 1, 3)):
        assert counts[n] == pytest.approx(repeat * sizes[n], abs=BATCH)
    repeats = Counter(index for index, source, _ in samples if source == 2)
    assert set(repeats.values()) <= {2, 3}


def test_the_proportions_hold_from_the_first_batch(sets):
    """Even if one source has 150 sequences, and another has 20 that come thirty times."""
    samples = read_samples(build_loader(mix(sets, {"books": {}, "math": {"repeat": 30}})))
    is_books = [source == 0 for _, source, _ in samples]
    share = sum(is_books) / len(samples)
    for count in (100, 200, 400):
        deviation = math.sqrt(share * (1 - share) / count)
        assert sum(is_books[:count]) / count == pytest.approx(share, abs=4 * deviation)


def test_samples_match_their_index_source_and_hash(sets):
    opened = [TokenSet(path) for path in sets.values()]
    offsets = [sum(len(tokens) for tokens in opened[:n]) for n in range(3)]
    for batch in build_loader(mix(sets, PROPORTIONS)):
        columns = (batch[key] for key in ("tokens", "index", "source", "hash"))
        for tokens, index, source, digest in zip(*columns, strict=True):
            expected = opened[source][int(index) - offsets[source]]
            assert tokens.tolist() == expected.tolist()
            assert digest == hash_log.hash_sequence(expected)


def test_the_order_depends_on_the_seed_alone(sets):
    samples = read_samples(build_loader(mix(sets, PROPORTIONS)), epochs=2)
    half = len(samples) // 2
    assert sorted(samples[:half]) != samples[:half] != samples[half:]
    for workers in (1, 3):
        assert read_samples(build_loader(mix(sets, PROPORTIONS, num_workers=workers)), epochs=2) == samples
    backwards = dict(reversed(PROPORTIONS.items()))
    assert read_samples(build_loader(mix(sets, backwards)), epochs=2) == samples


def test_resume_with_other_numbers_of_ranks_and_workers(sets, tmp_path):
    """2 ranks for 5 steps, then 1 rank with 2 workers for 30 steps, into the second epoch, then 4 ranks."""
    config = mix(sets, PROPORTIONS, micro_batch_size=2)
    steps = split_into_steps(read_samples(build_loader(config), epochs=3))
    assert 5 < len(steps) // 3 < 35  # the second part crosses the end of an epoch
    first, state = run_ranks(2, config, tmp_path / "two", 5)
    config.num_workers = 2
    second, state = run_ranks(1, config, tmp_path / "one", 30, state)
    config.num_workers = 0
    third, _ = run_ranks(4, config, tmp_path / "four", 10, state)
    assert first + second + third == steps[:45]


def test_shards_are_read_before_they_are_evicted(tmp_path, monkeypatch):
    """Read in order, with space for eight of many shards, few are downloaded twice."""
    names, prepare = [], TokenSource.prepare_shard
    record_shard = lambda self, shard: names.append(find_path(shard)) or prepare(self, shard)  # noqa: E731
    monkeypatch.setattr(TokenSource, "prepare_shard", record_shard)
    folder = write_set(tmp_path / "set", 0, 400)
    sizes = [shard["raw_data"]["bytes"] for shard in json.loads((folder / "index.json").read_text())["shards"]]
    limit = f"{(folder / 'index.json').stat().st_size + 10 * max(sizes)}b"
    cache = str(tmp_path / "cache")
    read_samples(build_loader(build_config(remote=str(folder), path=cache, cache_limit=limit, shuffle=False)))
    assert len(set(names)) == len(sizes)
    assert len(names) <= 1.25 * len(sizes)


# Errors


def test_a_shard_damaged_during_training_is_named(tmp_path):
    folder = write_set(tmp_path / "set", 0, 40)
    loader = build_loader(build_config(path=str(folder)))
    read_samples(loader)  # verifies every shard
    shard = min(folder.rglob("shard*"))
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(SourceError, match=rf"{shard.name}: damaged \(.*\); prepare or copy it again"):
        read_samples(loader)


def test_a_source_with_another_tokenizer_is_named(sets, tmp_path):
    texts = ["quite other words, " * 200]
    write_documents(tmp_path / "other", texts, train_tokenizer(texts, 280), T)
    config = mix(sets | {"other": str(tmp_path / "other")}, {"books": {}, "other": {}})
    with pytest.raises(RunError, match=r"other: made with another tokenizer than .*books; prepare it with --tokenizer"):
        build_loader(config)


def test_a_source_without_a_sequence_in_the_epoch_is_named(sets):
    with pytest.raises(RunError, match=r"data\.streams\.math: its share of an epoch of \d+ sequences is less than one"):
        build_loader(mix(sets, {"books": {"proportion": 1}, "math": {"proportion": 1e-9}}))


@given(st.integers(0, 10**12), st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9))
def test_apportion_is_exact_in_sum_and_within_one(total, shares):
    parts = apportion(total, shares)
    assert sum(parts) == total
    for part, share in zip(parts, shares, strict=True):
        assert abs(part - total * share / math.fsum(shares)) < 1 + 1e-3


def test_cache_limits_that_the_config_accepts_are_read_by_the_library():
    sizes = {"12": 12, "12b": 12, "1.5kb": 1536, "2 MB": 2 << 20, "200gb": 200 << 30, "3tb": 3 << 40}
    for size, expected in sizes.items():
        assert not list(ShardsConfig(path="x", cache_limit=size).find_errors())
        assert bytes_to_int(size) == expected
    for size in ("3t", "1.5b", "1.5", "b", "3xb"):
        assert list(ShardsConfig(path="x", cache_limit=size).find_errors())


@pytest.mark.process
def test_a_killed_and_resumed_run_on_a_mixture_equals_an_uninterrupted_run(tiny, corpus, forks, tmp_path):
    """The sequence counts of each source are in the metrics, the hashes in data.jsonl."""
    streams = ["data.path=null", f"data.streams.a.path={corpus['train']}", f"data.streams.b.path={corpus['left']}"]
    streams += ["data.streams.a.proportion=0.7", "data.streams.b.proportion=0.3", "data.hash_interval=2"]
    command = ("fit", "--config", tiny, *streams, "trainer.max_steps=10", "logging.progress_bar=false")
    forks.run(*command, f"logging.root={tmp_path}/whole")
    whole = only_run(tmp_path / "whole")
    killed = forks.start(*command, "data.num_workers=1")
    killed.kill_when(lambda: any((tmp_path / "runs").glob("tiny/*/checkpoints/00000004")))
    wait_until(lambda: not processes_in(tmp_path), seconds=30)  # the worker has ended too
    forks.run(*command, "data.micro_batch_size=2", "--ckpt_path", "last")
    resumed = only_run(tmp_path / "runs")
    assert hash_log.read_hashes(resumed.path) == hash_log.read_hashes(whole.path)
    assert sorted(hash_log.read_hashes(whole.path)) == [2, 4, 6, 8, 10]
    counts = {line["step"]: line["train/sequences/a"] for line in record(resumed) if "train/sequences/a" in line}
    assert sorted(counts) == [2, 4, 6, 8, 10]
    last = hash_log.read_hash_log(whole.path)[-1]
    assert last["sequences"]["a"] == counts[10]
    assert sum(last["sequences"].values()) == 10 * 8
