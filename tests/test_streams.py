"""Mixtures: how many sequences of each source, in which order, whoever reads them, and going on in the middle."""

import json
import math
from collections import Counter
from pathlib import Path

import pytest
from forks import Forks, processes_in
from hypothesis import given
from hypothesis import strategies as st
from loaders import STEP, T, config_of, loader_of, run_ranks, samples, steps, write
from records import only_run, record
from slurm import wait_for

from stackexp.config.data import StreamConfig
from stackexp.data import hash_log
from stackexp.data.shards import TokenSet
from stackexp.data.tokenizer import train_tokenizer
from stackexp.datamodules.remote import DESCRIPTION, Remote, SourceError
from stackexp.datamodules.training_set import apportion, bytes_of
from stackexp.errors import RunError


@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> dict[str, str]:
    """Three sets of about 150, 60 and 20 sequences."""
    folder = tmp_path_factory.mktemp("sets")
    counts = {"books": (0, 60), "code": (1000, 25), "math": (5000, 8)}
    return {name: str(write(folder / name, first, count)) for name, (first, count) in counts.items()}


def mixture(sets: dict[str, str], weights: dict[str, dict], **changes):
    return config_of(streams={name: StreamConfig(path=sets[name], **of) for name, of in weights.items()}, **changes)


PROPORTIONS = {"books": {"proportion": 1}, "code": {"proportion": 2}, "math": {"proportion": 1}}


def test_an_epoch_has_the_proportions_asked_for_in_whole_global_batches(sets):
    taken = samples(loader_of(mixture(sets, PROPORTIONS)))
    total = sum(len(TokenSet(path)) for path in sets.values()) // STEP * STEP
    counts = Counter(source for _, source, _ in taken)
    assert len(taken) == total
    assert [counts[n] for n in range(3)] == apportion(total, [1, 2, 1])


def test_repeats_say_how_often_each_sequence_comes(sets):
    config = mixture(sets, {"books": {"repeat": 0.5}, "code": {}, "math": {"repeat": 3}})
    taken, sizes = samples(loader_of(config)), [len(TokenSet(path)) for path in sets.values()]
    assert len(taken) % STEP == 0
    counts = Counter(source for _, source, _ in taken)
    for n, repeat in enumerate((0.5, 1, 3)):
        assert counts[n] == pytest.approx(repeat * sizes[n], abs=STEP)
    of_math = Counter(index for index, source, _ in taken if source == 2)
    assert set(of_math.values()) <= {2, 3}


def test_the_shares_hold_from_the_first_batch_on(sets):
    """However unequal the shards are: here one of 150 sequences, and of another source thirty times one of 20."""
    taken = samples(loader_of(mixture(sets, {"books": {}, "math": {"repeat": 30}})))
    of_books = [source == 0 for _, source, _ in taken]
    share = sum(of_books) / len(taken)
    for count in (100, 200, 400):
        deviation = math.sqrt(share * (1 - share) / count)
        assert sum(of_books[:count]) / count == pytest.approx(share, abs=4 * deviation)


def test_every_sample_is_of_the_source_that_its_number_says(sets):
    config = mixture(sets, PROPORTIONS)
    opened = [TokenSet(path) for path in sets.values()]
    begins = [sum(len(of) for of in opened[:n]) for n in range(3)]
    for batch in loader_of(config):
        for tokens, index, source, digest in zip(
            *(batch[k] for k in ("tokens", "index", "source", "hash")), strict=True
        ):
            expected = opened[source][int(index) - begins[source]]
            assert tokens.tolist() == expected.tolist()
            assert digest == hash_log.hash_sequence(expected)


def test_the_order_is_a_function_of_the_seed_alone(sets):
    config = mixture(sets, PROPORTIONS)
    one = samples(loader_of(config), epochs=2)
    half = len(one) // 2
    assert sorted(one[:half]) != one[:half]
    assert one[:half] != one[half:], "each epoch has its own order"
    for workers in (1, 3):
        assert samples(loader_of(mixture(sets, PROPORTIONS, num_workers=workers)), epochs=2) == one
    backwards = dict(reversed(PROPORTIONS.items()))
    assert samples(loader_of(mixture(sets, backwards)), epochs=2) == one


def test_the_global_batches_are_the_same_for_any_number_of_processes(sets, tmp_path):
    """2 processes stop after 5 steps, one goes on for 30, into the second epoch, then 4; the loaders' workers vary."""
    config = mixture(sets, PROPORTIONS, micro_batch_size=2)
    whole = steps(samples(loader_of(config), epochs=3))
    epoch = len(whole) // 3
    assert 5 < epoch < 35, "the second part does not cross the end of an epoch"
    first, state = run_ranks(2, config, tmp_path / "two", 5)
    config.num_workers = 2
    second, state = run_ranks(1, config, tmp_path / "one", 30, state)
    config.num_workers = 0
    third, _ = run_ranks(4, config, tmp_path / "four", 10, state)
    assert first + second + third == whole[:45]


def test_what_is_downloaded_is_read_before_it_is_evicted(tmp_path, monkeypatch):
    """Read in order, with room for eight shards of many, few are downloaded twice."""
    fetched = []
    fetch = Remote.fetch
    monkeypatch.setattr(Remote, "fetch", lambda self, name, *rest: (fetched.append(name), fetch(self, name, *rest)))
    folder = write(tmp_path / "set", 0, 400)
    shards = [shard["raw_data"]["bytes"] for shard in json.loads((folder / "index.json").read_text())["shards"]]
    described = sum((folder / name).stat().st_size for name in DESCRIPTION)
    limit = f"{described + 8 * max(shards) + 1000}b"
    config = config_of(remote=str(folder), path=str(tmp_path / "cache"), cache_limit=limit, shuffle=False)
    samples(loader_of(config))
    downloads = [name for name in fetched if "shard" in name]
    assert len(set(downloads)) == len(shards)
    assert len(downloads) <= 1.25 * len(shards)


def test_a_shard_damaged_while_it_is_read_is_named(tmp_path):
    folder = write(tmp_path / "set", 0, 40)
    loader = loader_of(config_of(path=str(folder)))
    shard = min(folder.rglob("shard*"))
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(SourceError, match=rf"{shard.name}: damaged \(.*\); prepare it again"):
        samples(loader)


def test_another_tokenizer_is_named(sets, tmp_path):
    from stackexp.data.packing import write_documents

    texts = ["quite other words, " * 200]
    write_documents(tmp_path / "other", texts, train_tokenizer(texts, 280), T)
    config = mixture(sets | {"other": str(tmp_path / "other")}, {"books": {}, "other": {}})
    with pytest.raises(RunError, match=r"other: made with another tokenizer than .*books; prepare it with --tokenizer"):
        loader_of(config)


def test_a_share_of_nothing_is_named(sets):
    with pytest.raises(RunError, match=r"data\.streams\.math: its share of an epoch of \d+ sequences is less than one"):
        loader_of(mixture(sets, {"books": {"proportion": 1}, "math": {"proportion": 1e-9}}))


def test_less_than_one_global_batch_is_one_line(sets):
    with pytest.raises(RunError, match=r"set data\.global_batch_tokens=\d+ or less"):
        loader_of(mixture(sets, {"books": {}, "code": {}}, global_batch_tokens=T * 4096))


@given(st.integers(0, 10**12), st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9))
def test_apportioned_shares_add_up_and_are_within_one(total, shares):
    parts = apportion(total, shares)
    assert sum(parts) == total
    for part, share in zip(parts, shares, strict=True):
        assert abs(part - total * share / math.fsum(shares)) < 1 + 1e-3


def test_sizes():
    sizes = {"12": 12, "12b": 12, "1.5kb": 1536, "2 MB": 2 << 20, "200gb": 200 << 30, "3t": 3 << 40}
    assert {size: bytes_of(size) for size in sizes} == sizes


def test_a_run_on_a_mixture_killed_and_resumed_is_the_run_that_was_not(tiny, corpus, tmp_path):
    """With the program; the counts of each source are in the metrics, the hash in data.jsonl and result.json."""
    streams = ["data.path=null", f"data.streams.a.path={corpus['train']}", f"data.streams.b.path={corpus['left']}"]
    streams += ["data.streams.a.proportion=0.7", "data.streams.b.proportion=0.3", "data.hash_interval=2"]
    command = ("fit", "--config", tiny, *streams, "trainer.max_steps=10", "logging.progress_bar=false")
    forks = Forks(tmp_path)
    forks.run(*command, f"logging.root={tmp_path}/whole")
    whole = only_run(tmp_path / "whole")
    killed = forks.start(*command, "data.num_workers=1")
    killed.kill_when(
        lambda: any(run.joinpath("checkpoints", "00000004").exists() for run in (tmp_path / "runs").glob("tiny/*"))
    )
    wait_for(lambda: not processes_in(tmp_path), seconds=30)  # its loader's has ended with it
    forks.run(*command, "data.micro_batch_size=2", "--ckpt_path", "last")
    resumed = only_run(tmp_path / "runs")
    assert hash_log.read_hashes(resumed.path) == hash_log.read_hashes(whole.path)
    assert sorted(hash_log.read_hashes(whole.path)) == [2, 4, 6, 8, 10]
    counts = {line["step"]: line["data/sequences/a"] for line in record(resumed) if "data/sequences/a" in line}
    assert sorted(counts) == [2, 4, 6, 8, 10]
    last = hash_log.read_hash_log(Path(whole.path))[-1]
    assert last["sequences"]["a"] == counts[10]
    assert sum(last["sequences"].values()) == 10 * 8
