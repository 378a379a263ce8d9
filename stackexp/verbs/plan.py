"""`stackexp plan`: memory, time and cost of a training run, before it is paid for."""

import json

from stackexp.config.suggestions import suggest_name
from stackexp.errors import RunError
from stackexp.planning.devices import DEVICES, HEADROOM
from stackexp.verbs.parser import Parser

EXAMPLES = [
    "plan --config pretrain/stacktrans-7b trainer=fsdp trainer.num_nodes=8",
    "plan --config pretrain/stacktrans-360m --device a100 --mfu 0.35 --json",
]
ABOUT = f"""\
Memory is of one rank, counted on tensors without numbers; what CUDA, NCCL and cuBLAS take for themselves and what the
allocator cannot use is not in it: {HEADROOM:.0%} of the device is kept free for that. Exits with 1 if it does not fit.
"""


def main(argv: list[str]) -> int:
    """Print the plan of a config. Raises ConfigError for the command line, RunError if it does not fit."""
    parser = Parser(
        "plan", "What a training run will take.", EXAMPLES, "--config NAME_OR_PATH [OPTIONS] [KEY=VALUE ...]", ABOUT
    )
    parser.add_argument("--config", action="append", metavar="NAME_OR_PATH")
    parser.add_argument("--device", default="h100", metavar="NAME", help=f"{', '.join(DEVICES)}; default: %(default)s")
    parser.add_argument("--mfu", type=float, default=0.4, help="model FLOPs utilisation (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    options, overrides = parser.split(argv)
    if not options.config:
        parser.error("--config NAME_OR_PATH is missing; `configs list` shows the names")
    if options.device not in DEVICES:
        known = ", ".join(DEVICES)
        parser.error(
            f"--device: expected one of {known}, found {options.device!r}{suggest_name(options.device, DEVICES)}"
        )
    if not 0 < options.mfu <= 1:
        parser.error(f"--mfu: expected a number above 0, up to 1, found {options.mfu}")
    from stackexp.config.compose import compose

    config = compose(options.config, overrides)
    from stackexp.planning.cost import plan, readable
    from stackexp.planning.suggestions import remedies
    from stackexp.planning.tables import as_dict, report

    planned = plan(config, options.device, options.mfu)
    print(json.dumps(as_dict(planned), indent=2) if options.json else report(planned), flush=True)
    if not planned.fits:
        raise RunError(
            f"plan: {readable(planned.peak)} on each {options.device} are {readable(planned.peak - planned.room)} more "
            f"than fit into its {readable(planned.room)}; {remedies(planned)}"
        )
    return 0
