"""`stackexp checkpoint consolidate`: the weights of a checkpoint as one safetensors file."""

from pathlib import Path

from stackexp.verbs.parser import Parser

EXAMPLES = [
    "checkpoint consolidate --run runs/quickstart/ID --to model.safetensors",
    "checkpoint consolidate --run runs/quickstart/ID --ckpt_path best --to model.safetensors",
]
ABOUT = """\
The file can be validated (`validate --config NAME --ckpt_path model.safetensors`) and read by any safetensors reader;
its metadata holds the run's config.
"""


def main(argv: list[str]) -> int:
    """Run the verb. Raises ConfigError for a mistake on the command line, RunError for what goes wrong later."""
    usage = "consolidate --run FOLDER [--ckpt_path best|PATH] --to FILE.safetensors"
    parser = Parser("checkpoint", "The weights of a checkpoint as one file.", EXAMPLES, usage, ABOUT)
    parser.add_argument("what", metavar="consolidate", choices=["consolidate"])
    parser.add_argument("--run", metavar="FOLDER", required=True, help="a run folder")
    parser.add_argument("--ckpt_path", metavar="best|PATH", help="a checkpoint instead of the run's newest")
    parser.add_argument("--to", metavar="FILE.safetensors", required=True, type=Path)
    options = parser.parse(argv)
    if options.to.suffix != ".safetensors":
        parser.error(f"--to: expected a name that ends in .safetensors, found {options.to}")
    from stackexp import runs
    from stackexp.config import compose
    from stackexp.models import checkpoints

    folder = runs.at(options.run)
    path = checkpoints.choose(folder, options.ckpt_path)
    tensors = checkpoints.consolidate(path, options.to, compose.load(folder.config))
    print(f"{path} -> {options.to}: {tensors} tensors, {options.to.stat().st_size:,} bytes")
    return 0
