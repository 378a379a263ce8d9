"""Average the weights of the newest checkpoints of a run, and write them to one safetensors file.

The mean of the last checkpoints often has a lower loss than any of them. Validate it with `validate --config NAME
--ckpt_path average.safetensors`. A run keeps trainer.keep_checkpoints checkpoints.
"""

from argparse import Namespace
from pathlib import Path

from stackexp.errors import RunError
from stackexp.verbs.parser import Parser, at_least

USAGE = "--run FOLDER --last N --to FILE.safetensors"
EXAMPLES = ("checkpoint average --run runs/quickstart/ID --last 3 --to average.safetensors",)


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--run", metavar="FOLDER", required=True, help="run folder")
    last = "number of checkpoints, the newest ones"
    parser.add_argument("--last", metavar="N", required=True, type=at_least(2), help=last)
    parser.add_argument("--to", metavar="FILE.safetensors", required=True, type=Path)


def run(args: Namespace) -> int:
    args.parser.check_output("--to", args.to, [".safetensors"])
    from stackexp import runs
    from stackexp.config import compose
    from stackexp.models import weight_files

    folder = runs.open_run(args.run)
    config = compose.load_config(folder.config)
    found = folder.list_checkpoints()[-args.last :]
    count = min(len(found), config.trainer.keep_checkpoints)  # older ones, such as the best, have gaps between them
    if args.last > count:
        raise RunError(f"{folder.checkpoints}: --last {args.last}, but it has {count}; see trainer.keep_checkpoints")
    tensors = weight_files.average_checkpoints(found, args.to, config)
    steps = ", ".join(str(int(path.name)) for path in found)
    print(f"steps {steps} -> {args.to}: {tensors} tensors, {args.to.stat().st_size:,} bytes")
    return 0
