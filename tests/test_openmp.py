"""The waiting policy of OpenMP threads depends on the idle CPUs at the start."""

import os

import pytest

from stackexp.verbs import dispatch
from stackexp.verbs.dispatch import choose_wait_policy, count_idle_cpus


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in (*dispatch.CHOICES, "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(dispatch.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})


@pytest.mark.parametrize(
    ("idle", "threads", "expected"),
    [(4.0, None, None), (3.0, None, "0"), (3.0, "2", None), (0.0, "1", None), (2.0, "3,1", "0")],
)
def test_threads_sleep_only_if_they_share_cpus(monkeypatch, idle, threads, expected):
    monkeypatch.setattr(dispatch, "count_idle_cpus", lambda: idle)
    if threads:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    monkeypatch.setenv("GOMP_SPINCOUNT", "x")  # restored after the test
    monkeypatch.delenv("GOMP_SPINCOUNT")
    choose_wait_policy()
    assert os.environ.get("GOMP_SPINCOUNT") == expected


@pytest.mark.parametrize("name", dispatch.CHOICES)
def test_a_choice_of_the_user_is_kept(monkeypatch, name):
    monkeypatch.setattr(dispatch, "count_idle_cpus", lambda: 0.0)
    monkeypatch.setenv(name, "7")
    before = dict(os.environ)
    choose_wait_policy()
    assert dict(os.environ) == before


def test_idle_cpus_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(dispatch, "CPU_TIMES", tmp_path / "stat")
    assert count_idle_cpus() == float("inf"), "not on Linux"
    (tmp_path / "stat").write_text("cpu  1 1 1 100 5\n")
    assert count_idle_cpus() == 0, "no idle time passes"
