"""The options of a verb. Light: read before anything heavy is imported."""

import argparse
import dataclasses
from typing import NoReturn

from stackexp.config.suggestions import nearest
from stackexp.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and takes no abbreviations."""

    def __init__(self, verb: str, purpose: str, examples: list[str], usage: str, about: str = "") -> None:
        lines = "".join(f"  python -m stackexp {example}\n" for example in examples)
        super().__init__(
            prog=f"python -m stackexp {verb}",
            usage=f"python -m stackexp {verb} {usage}",
            description=purpose,
            epilog=f"{about}\nexamples:\n{lines}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.verb = verb

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.verb}: {message} (see python -m stackexp {self.verb} --help)")

    def split(self, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
        """The options, and the overrides that are left. An argument that looks like a misspelt option is an error."""
        options, overrides = self.parse_known_args(argv)
        flags = [flag for action in self._actions for flag in action.option_strings]
        for argument in overrides:
            name = argument.partition("=")[0]
            is_key = name[2:].split(".")[0] in _top_keys()
            hint = nearest(name, flags, cutoff=0.7) if name.startswith("-") and not is_key else ""
            if hint:
                self.error(f"unknown option {name}{hint}")
        return options, overrides

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """The options of a verb that takes no overrides."""
        options, rest = self.split(argv)
        if rest:
            self.error(f"unexpected argument {rest[0]}")
        return options


def _top_keys() -> list[str]:
    from stackexp.config.experiment import ExperimentConfig

    return [field.name for field in dataclasses.fields(ExperimentConfig)]
