"""The argument parser of all verbs. Imports nothing heavy."""

import argparse
import contextlib
import re
import shutil
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from stackexp.config.experiment import ExperimentConfig
from stackexp.errors import ConfigError, RunError, suggest_name

FIGURE_SUFFIXES = (".png", ".pdf", ".svg")
OVERRIDES_HELP = """\
A config is a shipped name (see `configs list`) or a YAML file; --config may be repeated. Overrides are KEY=VALUE,
--KEY=VALUE or --KEY VALUE. A section set to a name takes the file of that name: model=transformer-360m,
model.memory=queue. model.memory=null disables the memory. Plugin files of a config outside the current project run only
with --trust-plugins.
"""


def fill(text: str, indent: int = 0) -> str:
    """Break the paragraphs of a text into lines of the terminal's width; `indent` spaces begin all but the first."""
    width = max(20, shutil.get_terminal_size().columns - 2 - indent)
    prefix = " " * indent
    paragraphs = [
        textwrap.fill(part, width, subsequent_indent=prefix, break_long_words=False, break_on_hyphens=False)
        for part in text.strip().split("\n\n")
    ]
    return "\n\n".join(paragraphs)


def at_least(minimum: int) -> Callable[[str], int]:
    """Return the `type` of an option that takes an integer >= `minimum`."""

    def parse(text: str) -> int:
        with contextlib.suppress(ValueError):
            if int(text) >= minimum:
                return int(text)
        raise argparse.ArgumentTypeError(f"expected an integer >= {minimum}, found {text}")

    return parse


Settings = dict[str, Any]
"""The settings of `ArgumentParser.add_argument`."""


def setting(metavar: str, description: str, **settings: Any) -> Settings:
    """Return the settings of an argument with one value."""
    return {"metavar": metavar, "help": description} | settings


def count(minimum: int, description: str, default: int | None = None, **settings: Any) -> Settings:
    """Return the settings of an option N that takes an integer >= `minimum`."""
    shown = "" if default is None else f" (default: {default})"
    return setting("N", description + shown, type=at_least(minimum), default=default, **settings)


def flag(description: str) -> Settings:
    """Return the settings of an option without a value."""
    return {"action": "store_true", "help": description}


def split_names(text: str) -> list[str]:
    """Split a list of names at its commas; spaces and empty names are dropped."""
    return [name.strip() for name in text.split(",") if name.strip()]


def list_configs(**_: object) -> list[str]:
    """Return the shipped configs, for completion."""
    from stackexp.config.layers import list_config_names

    return list_config_names()


def list_sweeps(**_: object) -> list[str]:
    """Return the shipped sweeps, for completion."""
    from stackexp.config.layers import list_shipped

    return list(list_shipped("sweep"))


class Parser(argparse.ArgumentParser):
    """An argument parser that raises a one-line ConfigError and accepts no abbreviations."""

    def __init__(self, verb: str, description: str, examples: Sequence[str], notes: str) -> None:
        super().__init__(
            prog=f"python -m stackexp {verb}",
            description=fill(description),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.verb = verb
        self._notes, self._examples = notes, examples
        self.accepts_overrides = False  # if True, `args.overrides` has the KEY=VALUE words of the command line

    def add_config(self, group: Any = None) -> None:
        """Add `--config`, a list of names and paths, to the parser or to a group of it, and accept overrides."""
        action = (group or self).add_argument("--config", action="append", default=[], metavar="NAME_OR_PATH")
        action.completer = list_configs  # type: ignore[attr-defined]
        self.accepts_overrides = True

    def add_sweep(self) -> None:
        """Add `SWEEP`, a sweep's name, file or folder, and accept overrides."""
        action = self.add_argument(
            "sweep", metavar="SWEEP", help="a shipped name, a YAML file, or a sweep's folder in runs/"
        )
        action.completer = list_sweeps  # type: ignore[attr-defined]
        self.accepts_overrides = True

    def format_help(self) -> str:
        """Return the help text: options, notes, then examples."""
        self.usage = None  # argparse's own, with the overrides added
        words = super().format_usage().split()[1:]
        self.usage = fill(" ".join([*words, *["[KEY=VALUE ...]"] * self.accepts_overrides]), indent=len("usage: "))
        examples = "".join(f"  python -m stackexp {example}\n" for example in self._examples)
        notes = [fill(self._notes), fill(OVERRIDES_HELP) if self.accepts_overrides else ""]
        self.epilog = "\n\n".join([*filter(None, notes), f"examples:\n{examples}"])
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with the message and a pointer to the help text."""
        raise ConfigError(f"{self.verb}: {message} (see python -m stackexp {self.verb} --help)")

    def require_config(self, args: argparse.Namespace) -> None:
        """Raise ConfigError if --config is missing. If the first word is a config, the error suggests `--config`."""
        from stackexp.config.layers import split_overrides

        if not args.config:
            split_overrides(args.overrides)
            self.error("--config NAME_OR_PATH is required; `configs list` shows the names")

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """Return the arguments, with `overrides` and the parser itself as `parser` for later errors."""
        if any(re.fullmatch("(--[a-z_-]+=)?", argument) for argument in argv):
            self.error("an argument is empty; a shell variable in the command may not be set")
        args, rest = self.parse_known_args(argv)
        flags = [flag for action in self._actions for flag in action.option_strings]
        for argument in rest:
            name = argument.partition("=")[0]
            is_key = name[2:].split(".")[0] in ExperimentConfig.__dataclass_fields__
            hint = suggest_name(name, flags, cutoff=0.7) if name.startswith("-") and not is_key else ""
            if hint:
                self.error(f"unknown option {name}{hint}")
            if name == "--config":
                self.error("has no --config; give the name or path without it")
            if not self.accepts_overrides:
                self.error(f"unexpected argument {argument}")
        args.overrides, args.parser = rest, self
        return args

    def check_text(self, option: str, text: str) -> None:
        """Raise ConfigError if Python could not decode an option from the bytes of the command line."""
        if any("\ud800" <= character <= "\udfff" for character in text):
            self.error(f"{option}: not valid UTF-8")

    def add_checkpoint(self, default: str = "the newest") -> None:
        """Add `--run` and `--ckpt_path`, a checkpoint of this run; `default` describes the one taken without it."""
        self.add_argument("--run", metavar="FOLDER", required=True, help="run folder")
        self.add_ckpt_path("best|last|ema|PATH", f"checkpoint (default: {default})")

    def add_ckpt_path(self, metavar: str, description: str) -> None:
        """Add `--ckpt_path`."""
        *self.checkpoint_names, _ = metavar.split("|")
        self.add_argument("--ckpt_path", metavar=metavar, help=description)

    def check_run(self, args: argparse.Namespace) -> Path:
        """Return the config.yaml of --run. Raises ConfigError if there is none, RunError for a missing --ckpt_path."""
        path = self.check_run_folder(args.run)
        self.check_checkpoint(args.ckpt_path)
        return path

    def check_checkpoint(self, ckpt_path: str | None) -> None:
        """Raise RunError if `ckpt_path` is a path that does not exist; <step>/ema is part of the checkpoint <step>."""
        if ckpt_path is None or ckpt_path in self.checkpoint_names:
            return
        from stackexp.runs import split_path

        path = Path(ckpt_path)
        if not path.exists() and not split_path(path)[0].is_dir():
            names = ", ".join(self.checkpoint_names)
            raise RunError(f"{path}: no such checkpoint; give a folder in a run's checkpoints/, or {names}")

    def check_output(self, option: str, path: Path | None, suffixes: Sequence[str]) -> None:
        """Raise ConfigError if an output path is given without one of the suffixes, or in a folder that is missing."""
        if path is None:
            return
        if path.suffix.lower() not in suffixes:
            self.error(f"{option} {path}: must end in {', '.join(suffixes)}")
        if not path.parent.is_dir():
            self.error(f"{option} {path}: the folder {path.parent} does not exist; create it first")

    def check_run_folder(self, run: str) -> Path:
        """Return the config.yaml of a run folder. Raises ConfigError if there is none."""
        path = Path(run, "config.yaml")
        if not path.is_file():
            from stackexp.runs import no_run_error

            self.error(f"--run {no_run_error(run)}")
        return path


class Verb:
    """A verb of the command line.

    The first paragraph of its docstring describes it in the help text; the other paragraphs follow the options.
    """

    examples: tuple[str, ...] = ()

    def add_arguments(self, parser: Parser) -> None:
        """Add the options."""

    def run(self, args: argparse.Namespace) -> int:
        """Run the verb and return the exit code."""
        raise NotImplementedError
