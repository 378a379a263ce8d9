"""What the README shows composes. (Its memory is trained in end_to_end/test_plugin.py.)"""

import re
import shlex
from pathlib import Path

from stackexp.config.compose import compose

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_config_for_one_s_own_text_composes(tmp_path):
    (block,) = re.findall(r"```yaml\n(# mine.yaml.*?)```", README, flags=re.DOTALL)
    path = tmp_path / "mine.yaml"
    path.write_text(block)
    config = compose([str(path)])
    assert config.data.validation == {"held-out": "texts/held-out"}
    assert config.model.vocab_size == 8192
    assert config.trainer == compose(["quickstart"]).trainer


def test_every_fit_command_composes():
    commands = re.findall(r"python -m stackexp fit --config quickstart([^#`\n]*)", README)
    overrides = [shlex.split(command) for command in commands]
    plain = [[o for o in command if o != "--print-config"] for command in overrides if "--ckpt_path" not in command]
    assert sum("model.memory.num_slot=8" in command for command in plain) == 1, "the mistake it shows"
    for command in plain:
        if "model.memory.num_slot=8" not in command:
            compose(["quickstart"], command)


def test_every_command_on_formal_languages_composes():
    docs = Path(__file__).parents[1] / "docs" / "formal.md"
    text = README + docs.read_text(encoding="utf-8")
    commands = re.findall(r"python -m stackexp fit --config (formal/[^#`\n]*)", text)
    assert len(commands) > 5
    for command in commands:
        name, *overrides = shlex.split(command)
        assert compose([name], overrides).data.kind == "formal_language"
