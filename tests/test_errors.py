"""Messages: one printable line, without secrets."""

import pickle

import pytest

from stackexp.errors import ConfigError, escape, mask_secrets


def test_messages_are_printable():
    assert escape("plain: é\nsecond") == "plain: é second"
    assert escape("\x1b[31mred\x07\ta\x00\u202e") == r"\x1b[31mred\x07\ta\x00\u202e"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://key:secret@bucket/x", "s3://***@bucket/x"),
        ("fit data.remote=https://me:pw@host/a?b=1", "fit data.remote=https://***@host/a?b=1"),
        ("https://host/x?X-Amz-Signature=abc123&part=1", "https://host/x?X-Amz-Signature=***&part=1"),
        ("https://host/x?token=abc&b=2", "https://host/x?token=***&b=2"),
        ("HF_TOKEN=abc python -m stackexp", "HF_TOKEN=*** python -m stackexp"),
        ("model.password=x API_KEY=y apikey=z", "model.password=*** API_KEY=*** apikey=***"),
        ("data.global_batch_tokens=2048 trainer.max_steps=3", "data.global_batch_tokens=2048 trainer.max_steps=3"),
        ("design=1 at user@host:/path", "design=1 at user@host:/path"),
    ],
)
def test_secrets_are_masked(text, expected):
    assert mask_secrets(text) == expected


def test_config_errors_start_with_their_origin():
    error = pickle.loads(pickle.dumps(ConfigError("seed: expected an integer", "a.yaml:3")))
    assert (str(error), error.origin) == ("a.yaml:3: seed: expected an integer", "a.yaml:3")
    assert (str(ConfigError("a.yaml:3: no")), ConfigError("a.yaml:3: no").origin) == ("a.yaml:3: no", "")


def test_error_line_is_escaped_and_masked(invoke):
    line = invoke("fit --config", "no\x1b[31msuch.yaml", "token=abc", expect=2)
    assert line.isprintable()
    assert "pw" not in invoke("validate --run s3://me:pw@host/run", expect=2)


def test_long_error_lines_keep_both_ends(invoke):
    line = invoke("fit --config quickstart", f"data.{'x' * 9000}=1", expect=2)
    assert line.startswith("error: override data.xxx")
    assert " ... " in line
    assert len(line) <= len("error: ") + 3000
