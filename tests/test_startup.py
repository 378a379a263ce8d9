"""The command line hides large optional packages from torchmetrics; a plugin can still use them."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

from stackexp.startup import IMPORTER, OPTIONAL, hide_optional_packages

PROGRAM = """
import sys
from stackexp.cli import main

main(["--version"])
import lightning.pytorch
import torchmetrics

print(*sorted({"scipy.signal", *%r} & set(sys.modules)), "|", torchmetrics.MeanMetric.__name__)
"""


@pytest.mark.process
def test_the_command_line_does_not_import_optional_packages_of_torchmetrics():
    process = subprocess.run([sys.executable, "-c", PROGRAM % OPTIONAL], capture_output=True, text=True, check=True)
    version, loaded = process.stdout.splitlines()
    assert version.startswith("stackexp ")
    assert loaded == "| MeanMetric"


def test_a_plugin_that_imports_torchmetrics_gets_all_of_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "torchmetrics", raising=False)
    monkeypatch.delitem(sys.modules, IMPORTER, raising=False)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    hide_optional_packages()
    assert find_spec("torchmetrics").loader.exec_module.__name__ == "exec_module"
    monkeypatch.setitem(sys.modules, IMPORTER, None)
    assert find_spec("torchmetrics").loader.exec_module.__name__ == "<lambda>"
