"""A lazy module is imported when one of its attributes is first read."""

import sys

import pytest

from stackexp.lazy import LazyModule


def test_a_module_is_imported_at_its_first_use(tmp_path, monkeypatch):
    (tmp_path / "slow_module.py").write_text("ANSWER = 42")
    monkeypatch.syspath_prepend(tmp_path)
    module = LazyModule("slow_module")
    assert "slow_module" not in sys.modules
    assert module.ANSWER == 42
    assert "slow_module" in sys.modules
    with pytest.raises(AttributeError, match="QUESTION"):
        _ = module.QUESTION
