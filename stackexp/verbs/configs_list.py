"""List the shipped configs, the recipes, and the choices for each section."""

import json
from argparse import Namespace

from stackexp.config.layers import list_catalog
from stackexp.tables import format_table
from stackexp.verbs.parser import Parser

USAGE = "[--json]"
EXAMPLES = ("configs list",)
INTRODUCTIONS = {  # kind of entry -> the line above its table
    "config": "",
    "recipe": "\nRecipes, as in --config mine.yaml --config recipe/smollm:\n\n",
    "choice": "\nSection choices, as in model.memory=queue:\n\n",
}


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print a list of objects: kind, name and purpose")


def run(args: Namespace) -> int:
    entries = list_catalog()
    if args.json:
        objects = [{"kind": kind, "name": name, "purpose": purpose} for kind, name, purpose in entries]
        print(json.dumps(objects, indent=2, ensure_ascii=False))
        return 0
    for kind, introduction in INTRODUCTIONS.items():
        rows = [(name, purpose) for other, name, purpose in entries if other == kind]
        print(introduction + format_table(rows, header=(kind, "purpose")))
    print("\n`configs show NAME` prints a resolved config with its size and cost.")
    return 0
