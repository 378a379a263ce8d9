"""Invalid formal-language experiments: one error line each, before anything starts."""

from types import SimpleNamespace

import pytest

from stackexp.config.compose import compose
from stackexp.datamodules.formal_language import FormalLanguageData
from stackexp.errors import ConfigError
from stackexp.inspection.inspect import open_task


def test_verbs_for_text_reject_formal_languages():
    config = compose(["formal/transformer"])
    with pytest.raises(ConfigError, match=r"data\.eval_length_stride"):
        FormalLanguageData(config.data, seed=0).select_sets("test", ["length_041"])


def test_strings_to_inspect_exist():
    run = SimpleNamespace(config=compose(["formal/stacktrans"], ["data.task=binary_addition"]))
    for length in (2, 99999999999999999999, "x"):
        with pytest.raises(ConfigError, match=f"--task binary_addition:{length}: the length must be from 3 to 65536"):
            open_task(run, f"binary_addition:{length}")
    with pytest.raises(ConfigError, match="reverse_string: the run was trained on binary_addition; use"):
        open_task(run, "reverse_string")
