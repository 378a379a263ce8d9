"""Dockerfile and apptainer.def agree with each other and the repository. Building them needs a container registry."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
APPTAINER = (ROOT / "apptainer.def").read_text()


def read_commands(text: str, pattern: str) -> set[str]:
    return set(re.findall(pattern, text.replace("\\\n", " ")))


def test_both_images_have_the_same_base_packages_and_extras():
    assert re.search(r"^ARG BASE=(\S+)$", DOCKERFILE, re.M)[1] == re.search(r"^From: (\S+)$", APPTAINER, re.M)[1]
    for pattern in (r"apt-get install [^&\n]*?(?= *&&| *\n)", r"git config [^&\n]*?(?= *&&| *\n)"):
        assert read_commands(DOCKERFILE, pattern) == read_commands(APPTAINER, pattern)
        assert read_commands(DOCKERFILE, pattern)
    extras = [re.search(r"pip install .*\[(\w+)\]", text)[1] for text in (DOCKERFILE, APPTAINER)]
    assert extras == ["eval", "eval"]
    assert f'"{extras[0]}": [' in (ROOT / "setup.py").read_text()


def test_copied_files_exist_and_are_not_ignored():
    sources = [source for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.M) for source in line.split()[:-1]]
    assert all((ROOT / source).exists() for source in sources)
    ignored = set((ROOT / ".dockerignore").read_text().split("\n"))
    assert not ignored & {"stackexp", "configs", "sweeps", ".git"}


def test_images_run_commands_that_exist():
    """The Python of the image, the default command, and the check of `apptainer build`."""
    from stackexp.cli import main

    assert re.search(r'ENTRYPOINT \["python", "-m", "stackexp"\]\nCMD \["fit", "--config", "quickstart"\]', DOCKERFILE)
    assert "set -- fit --config quickstart" in APPTAINER
    (check,) = re.findall(r"^    python -m stackexp (fit .*)$", APPTAINER, re.M)
    assert main([*shlex.split(check), "--print-config"]) == 0
    minor = int(re.search(r"python:3\.(\d+)", DOCKERFILE)[1])
    assert minor >= int(re.search(r"python_requires=\">=3\.(\d+)", (ROOT / "setup.py").read_text())[1])
