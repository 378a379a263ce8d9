"""Packaging. configs/ and sweeps/ live at the top of the repository and are installed inside the package."""

import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
SHIPPED = ("configs", "sweeps")
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "stackexp/__init__.py").read_text(encoding="utf-8"))[1]


class BuildWithConfigs(build_py):
    """Copy the shipped YAML into the built package, where stackexp.config.yaml_files looks for it."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:  # the repository's own files are read in place
            return
        for folder in SHIPPED:
            for source in sorted((ROOT / folder).rglob("*.yaml")):
                target = Path(self.build_lib, "stackexp", source.relative_to(ROOT))
                self.mkpath(str(target.parent))
                self.copy_file(str(source), str(target))


setup(
    name="stackexp",
    version=VERSION,
    description="Experiments with differentiable stacks between Transformer layers (StackTrans, arXiv 2507.15343)",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    python_requires=">=3.11",
    packages=find_packages(include=["stackexp", "stackexp.*"]),
    package_data={"stackexp.evaluation.benchmarks": ["tasks/*.yaml"], "stackexp.data": ["english.yaml"]},
    cmdclass={"build_py": BuildWithConfigs},
    entry_points={"console_scripts": ["stackexp=stackexp.__main__:run"]},
    install_requires=[
        "torch>=2.11",
        "numpy>=2",
        "pandas>=2.2",
        "scipy>=1.15",  # quantiles and power of Student's t
        "numba>=0.63",  # the scan over tokens on CPUs: compiles without a compiler
        "lightning>=2.6,!=2.6.2,!=2.6.3",  # 2.6.2 and 2.6.3 on PyPI were malicious
        "torchmetrics>=1.9",
        "tensorboard>=2.20",
        "matplotlib>=3.9",
        "omegaconf>=2.4",
        "pyyaml>=6",
        "mosaicml-streaming>=0.13,<0.14",  # datamodules/token_stream.py uses private names
        "pyarrow>=20",  # parquet, the format of FineWeb-Edu and SmolLM-Corpus
        "lxml>=5",  # text of HTML and XML manuals, for `data english`
        "tokenizers>=0.22",
        "zstandard>=0.23",
        "tqdm>=4.66",
        "tabulate>=0.9",
        "argcomplete>=3.6",  # shell completion
        "aalpy>=2",  # learns automata, for `certify`
        "safetensors>=0.5",
        "huggingface-hub>=0.30",  # split and index the files of an exported model
    ],
    extras_require={
        "dev": [
            # pytest 9.2 ignores the groups of pytest-xdist 3.8.
            *("pytest>=8,<9.2", "pytest-xdist>=3.6", "hypothesis>=6.100", "optuna>=4", "moto[server]>=5"),
            *("lm-eval>=0.4.13", "transformers>=4.57", "accelerate>=1"),  # as in eval
            *("wandb>=0.20", "mlflow-skinny>=3"),  # as in wandb and mlflow
            *("ruff>=0.12", "mypy>=1.15", "types-PyYAML", "types-tabulate", "types-tqdm", "pre-commit>=4"),
        ],
        "eval": ["lm-eval>=0.4.13", "transformers>=4.57", "accelerate>=1"],  # `evaluate`; the last two for --model hf:
        "wandb": ["wandb>=0.20"],  # logging.loggers=[wandb]
        "mlflow": ["mlflow-skinny>=3", "sqlalchemy>=2", "alembic>=1.10"],  # logging.loggers=[mlflow]
        "optuna": ["optuna>=4"],
        "flash": ["flash-attn>=2.8"],  # model.attention=flash_attn
        "fla": ["flash-linear-attention>=0.4"],  # model.kernel=fla of delta_net
    },
)
