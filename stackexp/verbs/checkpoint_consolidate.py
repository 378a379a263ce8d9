"""Write the weights of a checkpoint to one safetensors file.

Validate the file with `validate --config NAME --ckpt_path model.safetensors`, or read it with any safetensors reader.
Its metadata holds the config of the run.
"""

from argparse import Namespace
from pathlib import Path

from stackexp.verbs.parser import Parser

USAGE = "--run FOLDER [--ckpt_path best|last|ema|PATH] --to FILE.safetensors"
EXAMPLES = (
    "checkpoint consolidate --run runs/quickstart/ID --to model.safetensors",
    "checkpoint consolidate --run runs/quickstart/ID --ckpt_path best --to model.safetensors",
)


def add_arguments(parser: Parser) -> None:
    parser.add_checkpoint()
    parser.add_argument("--to", metavar="FILE.safetensors", required=True, type=Path)


def run(args: Namespace) -> int:
    args.parser.check_output("--to", args.to, [".safetensors"])
    import yaml

    from stackexp import runs
    from stackexp.models import checkpoints, weight_files

    folder = runs.open_run(args.run)
    path = checkpoints.find_checkpoint(folder, args.ckpt_path)
    config = yaml.safe_dump(weight_files.read_config(path), sort_keys=False)
    tensors = weight_files.write_weights(checkpoints.read_weights(path), args.to, config)
    print(f"{path} -> {args.to}: {tensors} tensors, {args.to.stat().st_size:,} bytes")
    return 0
