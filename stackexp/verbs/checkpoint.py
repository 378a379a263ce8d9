"""Average, export, consolidate and import weights."""

from argparse import Namespace
from pathlib import Path

from stackexp.errors import RunError
from stackexp.verbs.parser import Parser, Verb, count

COMMENT = "# The model of"


class Average(Verb):
    """Average the weights of the newest checkpoints of a run, and write them to one safetensors file.

    The mean of the last checkpoints often has a lower loss than any of them. Validate it with `validate --config NAME
    --ckpt_path average.safetensors`. A run keeps trainer.keep_checkpoints checkpoints.
    """

    examples = ("checkpoint average --run runs/quickstart/ID --last 2 --to average.safetensors",)

    def add_arguments(self, parser: Parser) -> None:
        parser.add_argument("--run", metavar="FOLDER", required=True, help="run folder")
        parser.add_argument("--last", required=True, **count(2, "number of checkpoints, the newest ones"))
        parser.add_argument("--to", metavar="FILE.safetensors", required=True, type=Path)

    def run(self, args: Namespace) -> int:
        args.parser.check_output("--to", args.to, [".safetensors"])
        args.parser.check_run_folder(args.run)
        from stackexp import runs
        from stackexp.config import compose
        from stackexp.models import checkpoints

        folder = runs.open_run(args.run)
        config = compose.load_config(folder.config)
        found = folder.list_checkpoints()[-args.last :]
        count = min(len(found), config.trainer.keep_checkpoints)  # older ones, such as the best, have gaps between them
        if args.last > count:
            raise RunError(
                f"{folder.checkpoints}: --last {args.last}, but it has {count}; see trainer.keep_checkpoints"
            )
        tensors = checkpoints.average_checkpoints(found, args.to, config)
        steps = ", ".join(str(int(path.name)) for path in found)
        print(f"steps {steps} -> {args.to}: {tensors} tensors, {args.to.stat().st_size:,} bytes")
        return 0


class Export(Verb):
    """Write a checkpoint as a Hugging Face folder, which works without stackexp.

    A model without a memory becomes a LlamaForCausalLM. A model with stacks has its code in the folder, so load it with
    trust_remote_code=True. The model card (README.md) holds the training data's hash, the scores and the command.
    """

    examples = (
        "checkpoint export --run runs/quickstart/ID --to my-model",
        "checkpoint export --run runs/quickstart/ID --ckpt_path best --to my-model --dtype bfloat16 --license mit",
    )

    def add_arguments(self, parser: Parser) -> None:
        parser.add_checkpoint()
        parser.add_argument("--to", metavar="FOLDER", required=True, type=Path, help="new folder")
        parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: float32")
        parser.add_argument("--license", metavar="NAME", default="unknown", help="license in the model card")

    def run(self, args: Namespace) -> int:
        if args.to.exists():
            args.parser.error(f"--to {args.to}: already exists; remove it or choose another folder")
        args.parser.check_run(args)
        from stackexp.export.huggingface import export_run

        checkpoint = export_run(args.run, args.ckpt_path, args.to, args.dtype, args.license)
        files = sorted(args.to.iterdir())
        print(f"{checkpoint} -> {args.to}: {sum(path.stat().st_size for path in files):,} bytes")
        print("\n".join(f"  {path.name}" for path in files))
        trust = ", trust_remote_code=True" if (args.to / "modeling_stacktrans.py").exists() else ""
        print(f'load it with: AutoModelForCausalLM.from_pretrained("{args.to}"{trust})')
        return 0


class Consolidate(Verb):
    """Write the weights of a checkpoint to one safetensors file.

    Validate the file with `validate --config NAME --ckpt_path model.safetensors`, or read it with any safetensors
    reader. Its metadata holds the config of the run.
    """

    examples = (
        "checkpoint consolidate --run runs/quickstart/ID --to model.safetensors",
        "checkpoint consolidate --run runs/quickstart/ID --ckpt_path best --to model.safetensors",
    )

    def add_arguments(self, parser: Parser) -> None:
        parser.add_checkpoint()
        parser.add_argument("--to", metavar="FILE.safetensors", required=True, type=Path)

    def run(self, args: Namespace) -> int:
        args.parser.check_output("--to", args.to, [".safetensors"])
        args.parser.check_run(args)
        import yaml

        from stackexp import runs
        from stackexp.models import checkpoints

        folder = runs.open_run(args.run)
        path = checkpoints.find_checkpoint(folder, args.ckpt_path)
        config = yaml.safe_dump(checkpoints.read_config(path), sort_keys=False)
        tensors = checkpoints.write_weights(checkpoints.read_weights(path), args.to, config)
        print(f"{path} -> {args.to}: {tensors} tensors, {args.to.stat().st_size:,} bytes")
        return 0


class Import(Verb):
    """Import the weights of a Llama-family model from a Hugging Face folder: SmolLM, TinyLlama, Llama, Qwen2.5.

    Writes one safetensors file, from which `warm_start.weights` starts a run, and next to it the model section as YAML.
    With --config, checks instead that the model of this config is the same, and names the keys that differ.
    """

    examples = (
        "checkpoint import --from SmolLM2-360M --to smollm2.safetensors",
        "checkpoint import --from SmolLM2-360M --to smollm2.safetensors --config pretrain/stacktrans-360m",
    )

    def add_arguments(self, parser: Parser) -> None:
        folder = "folder with config.json and model.safetensors, or its shards and their index"
        parser.add_argument("--from", dest="folder", metavar="FOLDER", required=True, type=Path, help=folder)
        parser.add_argument("--to", metavar="FILE.safetensors", required=True, type=Path)
        parser.add_config()

    def run(self, args: Namespace) -> int:
        args.parser.check_output("--to", args.to, [".safetensors"])
        if args.overrides and not args.config:
            args.parser.error(f"{args.overrides[0]}: an override requires --config")
        from stackexp.config import compose

        model = compose.compose(args.config, args.overrides).model if args.config else None
        import yaml

        from stackexp.files import write_atomically
        from stackexp.models import checkpoints, llama_import

        section_path = args.to.with_suffix(".yaml")
        if model is None and section_path.exists() and not section_path.read_text(encoding="utf-8").startswith(COMMENT):
            args.parser.error(
                f"{section_path} exists and is not from `checkpoint import`; choose another name for --to"
            )
        options = llama_import.read_model_options(args.folder)
        if model is not None and model.kind != "transformer":
            raise RunError(f"{' '.join(args.config)}: not the model of {args.folder}; set model.kind=transformer")
        differing = [key for key, value in options.items() if model is not None and getattr(model, key, None) != value]
        if differing:
            changes = " ".join(f"model.{key}={'null' if options[key] is None else options[key]}" for key in differing)
            raise RunError(f"{' '.join(args.config)}: not the model of {args.folder}; set {changes}")
        tensors = llama_import.read_tensors(args.folder, options)
        section = yaml.safe_dump({"model": {"kind": "transformer"} | options}, sort_keys=False)
        count = checkpoints.write_weights(tensors, args.to, section)
        parameters = sum(tensor.numel() for tensor in tensors.values())
        print(
            f"{args.folder} -> {args.to}: {count} tensors, {parameters:,} parameters, {args.to.stat().st_size:,} bytes"
        )
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
    print(f"  python -m stackexp fit {named} data.path=DATA warm_start.weights={weights} warm_start.memory=identity")
