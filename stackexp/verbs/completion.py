"""Shell completion."""

import os
from argparse import Namespace
from collections.abc import Collection, Iterable

from stackexp.config.layers import list_catalog, list_config_names
from stackexp.verbs.dispatch import find_verb, load_verb
from stackexp.verbs.parser import Parser, Verb

LINE = "STACKEXP_COMPLETION_LINE"  # the command line up to the cursor, without `stackexp`
SCRIPTS = {
    # bash splits words at = and : too, and replaces the last part only.
    "bash": f"""_stackexp() {{
    local line="${{COMP_LINE:0:COMP_POINT}}" word IFS=$'\\n'
    word="${{line##* }}"
    COMPREPLY=($({LINE}="${{line#* }}" stackexp completion words 2>/dev/null))
    COMPREPLY=("${{COMPREPLY[@]#"${{word%"${{word##*[=:]}}"}}"}}")
    [[ "${{COMPREPLY[0]}}" == *= ]] && compopt -o nospace
}}
complete -o default -F _stackexp stackexp
""",
    "zsh": f"""_stackexp() {{
    local -a found
    found=(${{(f)"$({LINE}="${{(j: :)words[2,CURRENT]}}" stackexp completion words 2>/dev/null)"}})
    (( $#found )) && compadd -S '' -- $found || _files
}}
compdef _stackexp stackexp
""",
}


class Completion(Verb):
    """Print a script that completes verbs, options, configs and keys of the `stackexp` command.

    Add to ~/.bashrc or ~/.zshrc: eval "$(stackexp completion bash)", or zsh.
    """

    usage = "bash | zsh"
    examples = ("completion bash >> ~/.bash_completion",)

    def add_arguments(self, parser: Parser) -> None:
        choices = [*SCRIPTS, "words"]  # "words" is for the scripts
        parser.add_argument("shell", choices=choices, metavar="SHELL", help="bash or zsh")

    def run(self, args: Namespace) -> int:
        """Print the script, or the completions of the last word of a command line."""
        if args.shell == "words":
            print("\n".join(complete(os.environ.get(LINE, ""), args.verbs)))
        else:
            print(SCRIPTS[args.shell], end="")
        return 0


def complete(line: str, verbs: Collection[str]) -> list[str]:
    """Return the completions of the last word of a command line without `stackexp`; none for the name of a file."""
    *words, last = line.split(" ")
    words = [word for word in words if word]
    if (name := find_verb(words, verbs)) is not None:
        found = _list_arguments(name, words[len(name.split()) :], last)
    elif words:
        found = [verb.split()[1] for verb in verbs if verb.startswith(f"{words[0]} ")] if len(words) == 1 else []
    else:
        found = [verb.split()[0] for verb in verbs]
    return sorted({word for word in found if word.startswith(last)})


def _list_arguments(name: str, words: list[str], last: str) -> Iterable[str]:
    """Return the options, names and keys that can follow `words`, the arguments of a verb."""
    _, parser = load_verb(name)
    flags = {flag: action for action in parser._actions for flag in action.option_strings}
    if last.startswith("-"):
        return flags
    previous = flags.get(words[-1]) if words else None
    if previous is not None and previous.nargs != 0:  # the value of an option
        return list_config_names() if "--config" in previous.option_strings else []
    if not words and name.startswith("sweep "):
        from stackexp.sweeps.shipped import list_shipped

        return list_shipped()
    if not words and name == "configs show":
        return list_config_names()
    if name != "configs explain" and not parser.accepts_overrides:
        return []
    import stackexp.config.compose  # noqa: F401  (registers the kinds)
    from stackexp.config.reference import list_keys

    keys = {key.name for key in list_keys()}
    if name == "configs explain":
        return keys
    return [*(f"{key}=" for key in keys), *(entry for kind, entry, _ in list_catalog() if kind == "choice")]
