"""Shell completion with argcomplete, for `stackexp` and `python -m stackexp`."""

import argparse
import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from stackexp.verbs.dispatch import find_verb, load_verb
from stackexp.verbs.parser import Parser, Verb

COMMANDS = "stackexp python python3"
FUNCTION = "_python_argcomplete_global"
REGISTER = {
    "bash": f"complete -o default -o bashdefault -F {FUNCTION} {COMMANDS}",
    "zsh": f"compdef {FUNCTION} {COMMANDS}",
}


class Completion(Verb):
    """Print a script that completes verbs, options, configs, sweeps, keys and their values.

    Add to ~/.bashrc or ~/.zshrc: eval "$(stackexp completion bash)", or zsh. The script is argcomplete's; it completes
    `python -m` for every module that supports argcomplete.
    """

    examples = ("completion bash >> ~/.bash_completion",)

    def add_arguments(self, parser: Parser) -> None:
        parser.add_argument("shell", choices=list(REGISTER), metavar="SHELL", help="bash or zsh")

    def run(self, args: Namespace) -> int:
        import argcomplete

        script = Path(argcomplete.__file__).parent / "bash_completion.d" / "_python-argcomplete"
        print(script.read_text(encoding="utf-8"))
        print(REGISTER[args.shell])
        return 0


def complete(verbs: Mapping[str, str]) -> None:
    """Write the completions of the command line in COMP_LINE for the script, and exit."""
    import argcomplete

    typed = os.environ["COMP_LINE"].encode()[: int(os.environ["COMP_POINT"])].decode(errors="ignore")
    words = typed.split()[int(os.environ["_ARGCOMPLETE"]) :]
    argcomplete.autocomplete(_build_parser(words, verbs), always_complete_options="long")


def _build_parser(words: list[str], verbs: Mapping[str, str]) -> argparse.ArgumentParser:
    """Return one parser for all verbs. Only the verb that the words begin with has its options."""
    root = argparse.ArgumentParser(add_help=False)
    groups = {"": root.add_subparsers()}
    for name, description in verbs.items():
        group, _, word = name.rpartition(" ")
        if group not in groups:
            groups[group] = groups[""].add_parser(group, add_help=False).add_subparsers()
        parents = [load_verb(name)[1]] if name == find_verb(words, verbs) else []
        parser = groups[group].add_parser(
            word, parents=parents, help=description, add_help=False, conflict_handler="resolve", allow_abbrev=False
        )
        if parents and parents[0].accepts_overrides:
            parser.add_argument("overrides", nargs="*").completer = _list_overrides  # type: ignore[attr-defined]
    return root


def _list_overrides(prefix: str, **_: object) -> list[str]:
    """Return `KEY=` for all keys, or `KEY=VALUE` for the choices of the key in the prefix."""
    import stackexp.config.compose  # noqa: F401  (registers the kinds)
    from stackexp.config.layers import list_catalog
    from stackexp.config.reference import list_keys

    found = [name for kind, name, _ in list_catalog() if kind == "choice"]
    for key in list_keys():
        found.append(f"{key.name}=")
        if prefix.startswith(f"{key.name}="):
            words = key.type.removesuffix(" or null").removeprefix("one of ").replace(" or ", ", ").split(", ")
            is_choice = key.type.startswith(("one of ", "true or false"))
            found += [f"{key.name}={word}" for word in words] if is_choice else []
    return found
