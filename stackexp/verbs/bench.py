"""`stackexp bench`: what the memory between layers costs, in whole models and alone."""

import json
from pathlib import Path
from typing import Any

from stackexp.config.suggestions import nearest
from stackexp.errors import ConfigError
from stackexp.tables import table
from stackexp.verbs.parser import Parser

EXAMPLES = [
    "bench efficiency",
    "bench efficiency --config pretrain/stacktrans-360m data.micro_batch_size=8 --out efficiency.json",
    "bench stack --config pretrain/stacktrans-360m --out stack.json",
]
PAPER_COSTS = {
    "stacktrans": {"train": 1.16, "inference": 1.09, "memory": 1.12},
    "single_head": {"train": 1.03, "inference": 1.04, "memory": 1.00},
    "full_dim": {"train": 3.78, "inference": 3.30, "memory": 1.73},
}
"""The paper's efficiency table, in multiples of its Transformer (arXiv 2507.15343): its code, its hardware."""
KINDS = ("efficiency", "stack")


def main(argv: list[str]) -> int:
    """Dispatch `bench efficiency` and `bench stack`. Raises ConfigError for a mistake in the command line."""
    parser = Parser("bench", "What the memory costs.", EXAMPLES, f"{'|'.join(KINDS)} [OPTIONS] [KEY=VALUE ...]")
    if argv[:1] == ["efficiency"]:
        return efficiency(argv[1:])
    if argv[:1] == ["stack"]:
        return stack(argv[1:])
    parser.split(argv)
    parser.error(f"expected {' or '.join(KINDS)}{nearest(argv[0], KINDS) if argv else ''}")


def _parser(kind: str, purpose: str) -> Parser:
    examples = [example for example in EXAMPLES if example.startswith(f"bench {kind}")]
    parser = Parser(f"bench {kind}", purpose, examples, "[OPTIONS] [KEY=VALUE ...]")
    parser.add_argument("--config", action="append", metavar="NAME_OR_PATH", help="default: quickstart")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="timed turns (default: %(default)s)")
    parser.add_argument("--out", metavar="FILE.json", help="write hardware, versions and all figures there as well")
    return parser


def _options(parser: Parser, argv: list[str]) -> tuple[Any, list[str], list[str]]:
    """The options, the configs and the overrides, checked as far as can be before torch is imported."""
    options, overrides = parser.split(argv)
    if options.steps < 1:
        parser.error(f"--steps: expected an integer >= 1, found {options.steps}")
    if options.out and not options.out.endswith(".json"):
        parser.error(f"--out: expected a name that ends in .json, found {options.out}")
    if options.out and not Path(options.out).absolute().parent.is_dir():
        parser.error(f"--out: there is no folder {Path(options.out).parent}; make it first")
    return options, options.config or ["quickstart"], overrides


def _device() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def efficiency(argv: list[str]) -> int:
    """Whole models in turns with the Transformer."""
    parser = _parser("efficiency", "Training, prefill, decode and memory in multiples of the plain Transformer's.")
    known = "stacktrans, queue, push_only, single_head, full_dim, authors_code"
    parser.add_argument("--only", metavar="MEMORIES", help=f"by commas, of {known}; default: all")
    options, configs, overrides = _options(parser, argv)
    names = known.split(", ")
    wanted = options.only.split(",") if options.only else names
    for name in wanted:
        if name not in names:
            parser.error(f"--only: expected some of {known}, found {name!r}{nearest(name, names)}")
    from stackexp.config.compose import compose

    for name in ("null", *wanted):
        try:
            compose(configs, [*overrides, f"model.memory={name}"])
        except ConfigError as error:
            raise ConfigError(f"bench efficiency: with model.memory={name}: {error}") from None
    from stackexp.benchmarking import efficiency as measuring

    device, rows = _device(), []
    for row in measuring.measure(measuring.rows_of(wanted), configs, overrides, options.steps, device):
        rows.append(row)
        print(f"measured {row['model']} ({row['implementation']})", flush=True)
    print(f"\n{efficiency_table(rows)}\n", flush=True)
    _write(options.out, configs, overrides, rows)
    return 0


def efficiency_table(rows: list[dict[str, Any]]) -> str:
    """Markdown: medians of multiples with their quartiles, tokens/s, MFU where known, and the paper's row."""
    has = [what for what in ("train", "prefill", "decode", "memory") if f"{what}_ratio" in rows[0]]
    header = ["model", "stack", "tokens/s", *(["MFU"] if "mfu" in rows[0] else []), *(f"{what} x" for what in has)]
    header += ["paper: train / inference / memory"]
    lines = [header, ["---", "---", *["---:"] * (len(header) - 2)]]
    for row in rows:
        paper = PAPER_COSTS.get(row["model"], {})
        cells = [row["model"], row["implementation"], f"{row['tokens_per_second']:,.0f}"]
        cells += [f"{row['mfu']:.1%}"] if "mfu" in row else []
        cells += ["{:.3f} ({:.3f}-{:.3f})".format(row[f"{what}_ratio"], *row[f"{what}_spread"]) for what in has]
        lines.append([*cells, " / ".join(f"{value:.2f}" for value in paper.values())])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def stack(argv: list[str]) -> int:
    """The operation of each layer alone, beside its floor."""
    parser = _parser("stack", "One step of the stack of each layer, against the bytes and FLOPs it cannot do without.")
    options, configs, overrides = _options(parser, argv)
    from stackexp.config.compose import compose

    config = compose(configs, overrides)
    memory = config.model.memory
    if getattr(memory, "kind", None) != "stack" or memory.axis != "depth":
        parser.error("measures stacks over the depth; set model.memory=stacktrans, or another choice of that axis")
    from stackexp.benchmarking import stack as stack_bench

    rows = list(stack_bench.measure(config, options.steps, _device()))
    print(stack_table(rows))
    _write(options.out, configs, overrides, rows)
    return 0


def stack_table(rows: list[dict[str, Any]]) -> str:
    """One line for each implementation and pass, all layers together."""
    header = ["stack", "pass", "ms", "GB/s", "of a copy", "GFLOP/s", "floor ms"]
    lines = [
        [
            *(row["implementation"], row["pass"], f"{1e3 * row['seconds']:.3f}", f"{row['gigabytes_per_second']:.1f}"),
            *(f"{row['share_of_copy']:.1%}", f"{row['gigaflops_per_second']:.1f}", f"{1e3 * row['floor_seconds']:.3f}"),
        ]
        for row in rows
    ]
    return table([header, *lines], align="<<>>>>>", rules=(1,))


def _write(out: str | None, configs: list[str], overrides: list[str], rows: list[dict[str, Any]]) -> None:
    if not out:
        return
    from stackexp.runs import environment

    found = environment()
    record = {"hardware": {key: found.pop(key) for key in ("cpu", "gpus", "host")}, "versions": found.pop("versions")}
    record |= {"environment": found, "configs": configs, "overrides": overrides, "rows": rows}
    Path(out).write_text(json.dumps(record, indent=2))
