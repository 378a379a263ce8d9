"""Import the weights of a Llama-family model from a Hugging Face folder: SmolLM, TinyLlama, Llama, Qwen2.5.

Writes one safetensors file, from which `init.weights` starts a run, and next to it the model section as YAML.
With --config, checks instead that the model of this config is the same, and names the keys that differ.
"""

from argparse import Namespace
from pathlib import Path

from stackexp.errors import RunError
from stackexp.verbs.parser import Parser

USAGE = "--from FOLDER --to FILE.safetensors [--config NAME_OR_PATH] [KEY=VALUE ...]"
EXAMPLES = (
    "checkpoint import --from SmolLM2-360M --to smollm2.safetensors",
    "checkpoint import --from SmolLM2-360M --to smollm2.safetensors --config pretrain/stacktrans-360m",
)
COMMENT = "# The model of"


def add_arguments(parser: Parser) -> None:
    folder = "folder with config.json and model.safetensors, or its shards and their index"
    parser.add_argument("--from", dest="folder", metavar="FOLDER", required=True, type=Path, help=folder)
    parser.add_argument("--to", metavar="FILE.safetensors", required=True, type=Path)
    parser.add_config()


def run(args: Namespace) -> int:
    """Write the weights and the model section, and print the next commands."""
    args.parser.check_output("--to", args.to, [".safetensors"])
    if args.overrides and not args.config:
        args.parser.error(f"{args.overrides[0]}: an override requires --config")
    from stackexp.config import compose

    model = compose.compose(args.config, args.overrides).model if args.config else None
    import yaml

    from stackexp.files import write_atomically
    from stackexp.models import llama_import, weight_files

    section_path = args.to.with_suffix(".yaml")
    if model is None and section_path.exists() and not section_path.read_text(encoding="utf-8").startswith(COMMENT):
        args.parser.error(f"{section_path} exists and is not from `checkpoint import`; choose another name for --to")
    options = llama_import.read_model_options(args.folder)
    if model is not None and model.kind != "transformer":
        raise RunError(f"{' '.join(args.config)}: not the model of {args.folder}; set model.kind=transformer")
    differing = [key for key, value in options.items() if model is not None and getattr(model, key, None) != value]
    if differing:
        changes = " ".join(f"model.{key}={'null' if options[key] is None else options[key]}" for key in differing)
        raise RunError(f"{' '.join(args.config)}: not the model of {args.folder}; set {changes}")
    tensors = llama_import.read_tensors(args.folder, options)
    section = yaml.safe_dump({"model": {"kind": "transformer"} | options}, sort_keys=False)
    count = weight_files.write_weights(tensors, args.to, section)
    parameters = sum(tensor.numel() for tensor in tensors.values())
    print(f"{args.folder} -> {args.to}: {count} tensors, {parameters:,} parameters, {args.to.stat().st_size:,} bytes")
    configs = args.config
    if not configs:
        write_atomically(section_path, f"{COMMENT} {args.folder.resolve().name} (checkpoint import).\n{section}")
        print(f"model section: {section_path}")
        configs = ["NAME", str(section_path)]
    _print_next_commands(args.folder / "tokenizer.json", args.to, configs)
    return 0


def _print_next_commands(tokenizer: Path, weights: Path, configs: list[str]) -> None:
    named = " ".join(f"--config {config}" for config in configs)
    print("\nnext:")
    if tokenizer.is_file():
        print(f"  python -m stackexp data prepare TEXTS --to DATA --tokenizer {tokenizer}")
        print(f"  python -m stackexp data retokenize TOKENS --to DATA --from OLD.json --tokenizer {tokenizer}")
    else:
        print(f"  put its tokenizer.json into {tokenizer.parent}, for `data prepare --tokenizer`")
    print(f"  python -m stackexp fit {named} data.path=DATA init.weights={weights} init.memory=identity")
