"""Write a checkpoint as a Hugging Face folder, which works without stackexp.

A model without a memory becomes a LlamaForCausalLM. A model with stacks has its code in the folder, so load it with
trust_remote_code=True. The model card (README.md) holds the training data's hash, the scores and the command.
"""

from argparse import Namespace
from pathlib import Path

from stackexp.verbs.parser import Parser

USAGE = "--run FOLDER [--ckpt_path best|last|ema|PATH] --to FOLDER [--dtype float32|bfloat16] [--license NAME]"
EXAMPLES = (
    "checkpoint export --run runs/quickstart/ID --to my-model",
    "checkpoint export --run runs/quickstart/ID --ckpt_path best --to my-model --dtype bfloat16 --license apache-2.0",
)


def add_arguments(parser: Parser) -> None:
    parser.add_checkpoint()
    parser.add_argument("--to", metavar="FOLDER", required=True, type=Path, help="new folder")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: float32")
    parser.add_argument("--license", metavar="NAME", default="unknown", help="license in the model card")


def run(args: Namespace) -> int:
    if args.to.exists():
        args.parser.error(f"--to {args.to}: already exists; remove it or choose another folder")
    from stackexp.export.huggingface import export_run

    checkpoint = export_run(args.run, args.ckpt_path, args.to, args.dtype, args.license)
    files = sorted(args.to.iterdir())
    print(f"{checkpoint} -> {args.to}: {sum(path.stat().st_size for path in files):,} bytes")
    print("\n".join(f"  {path.name}" for path in files))
    trust = ", trust_remote_code=True" if (args.to / "modeling_stacktrans.py").exists() else ""
    print(f'load it with: AutoModelForCausalLM.from_pretrained("{args.to}"{trust})')
    return 0
