"""The command line. Nothing heavy is imported before the config has been composed and checked."""

import errno
import importlib
import os
import sys
from pathlib import Path
from typing import Any

from stackexp.config.suggestions import nearest
from stackexp.errors import ConfigError, FolderBusy, RunError, Stopped
from stackexp.verbs.parser import Parser

USAGE = """\
usage: python -m stackexp VERB [OPTIONS] [KEY=VALUE ...]

  fit        train the model of a config
  validate   loss, perplexity and bits per byte on the validation sets; of formal languages accuracy by length
  test       the same on the test sets; of formal languages up to the longest strings, as a table and a curve
  generate   continue a text with a trained model
  configs    list | show NAME: the shipped configs and the choices for their sections
  data       prepare | fetch | retokenize | inspect: text into token shards, validation sets, a look inside
  plan       memory, time and cost of a training run, before it is paid for
  sweep      run | status | stop | results: many runs of one study
  report     compare | formal: runs side by side, the paper's table of formal languages
  bench      efficiency | stack: what the memory costs, in whole models and alone
  checkpoint consolidate: the weights of a checkpoint as one safetensors file

examples:
  python -m stackexp fit --config quickstart
  python -m stackexp fit --config quickstart model.memory=queue trainer.max_steps=100
  python -m stackexp fit --config quickstart --ckpt_path last
  python -m stackexp fit --config formal/quick
  python -m stackexp validate --run runs/quickstart/ID
  python -m stackexp VERB --help

exit codes: 0 done, 1 a run failed, 2 a mistake in config or command line, 74 another process works in the run
folder, 75 stopped by SIGTERM, SIGUSR1 or max_time after saving (the same command goes on), 130 interrupted
"""

CONFIG_HELP = """\
--config takes a shipped name (`configs list`) or the path of a YAML file, and may stand several times.
Overrides are spelled KEY=VALUE, --KEY=VALUE or --KEY VALUE. A section given a name is a choice of file:
model=transformer-360m, model.memory=queue; model.memory=null switches the memory off, beside=null the runs that
`fit` trains beside a config's own.
"""

NO_SPACE = {errno.ENOSPC: "no space left on the disk", errno.EDQUOT: "no space left in the disk quota"}


def fit(argv: list[str]) -> int:
    examples = [
        "fit --config quickstart",
        "fit --config quickstart model.memory.num_slots=32 --seed 1",
        "fit --config quickstart --ckpt_path last",
        "fit --run runs/quickstart/ID",
        "fit --config formal/quick",
    ]
    usage = "(--config NAME_OR_PATH | --run FOLDER) [OPTIONS] [KEY=VALUE ...]"
    purpose = "Train the model of a config, on tokens or on strings of a formal language. The record is the run folder."
    parser = Parser("fit", purpose, examples, usage, CONFIG_HELP)
    parser.add_argument("--config", action="append", metavar="NAME_OR_PATH")
    parser.add_argument("--ckpt_path", metavar="last|PATH", help="resume the newest unfinished run, or a checkpoint")
    place = "the run folder: start there, or go on where it is, without --config by its own config; what stands "
    place += "`beside` as NAME goes to FOLDER-NAME"
    parser.add_argument("--run", metavar="FOLDER", help=place)
    parser.add_argument("--print-config", action="store_true", help="print the resolved config and exit")
    options, overrides = parser.split(argv)
    if not (options.config or options.run):
        parser.error("--config NAME_OR_PATH is missing; `configs list` shows the names")
    if options.run and options.ckpt_path:
        parser.error("give --run, which goes on from the folder's newest checkpoint, or --ckpt_path, not both")
    from stackexp.config import compose

    configs = options.config or [str(_run_config(parser, options.run))]
    config = compose.compose(configs, overrides)
    if options.print_config:
        print(compose.to_yaml(config), end="")
        return 0
    beside = {name: _beside(config, configs, overrides, name) for name in config.beside or {}}
    config.beside = {}
    from stackexp.training import loop as verb

    return verb.run(config, options.ckpt_path, options.run, beside)


def _beside(config: Any, configs: list[str], overrides: list[str], name: str) -> Any:
    """The config that `beside` names, under a name of its own."""
    from stackexp.config import compose

    try:
        own = [*config.beside[name], f"name={config.name}-{name}"]
        other = compose.compose(configs, overrides, on_top=own)
    except ConfigError as error:
        raise ConfigError(f"beside.{name}: {error}") from None
    other.beside = {}
    return other


def evaluate(stage: Any, argv: list[str]) -> int:
    examples = [f"{stage} --run runs/quickstart/ID", f"{stage} --config quickstart --ckpt_path model.safetensors"]
    examples += [f"{stage} --run RUN --sets v2,v3", f"{stage} --run RUN --sets mine=texts/,books=books.npy"]
    usage = "(--run FOLDER | --config NAME_OR_PATH --ckpt_path PATH) [OPTIONS] [KEY=VALUE ...]"
    section = "validation" if stage == "validate" else "test"
    lengths = "validation" if stage == "validate" else "eval"
    about = f"The figures of a model on every set of data.{section}, or on --sets; of formal languages the accuracy at "
    about += f"every length up to data.{lengths}_max_length."
    parser = Parser(stage, about, examples, usage, CONFIG_HELP)
    parser.add_argument(
        "--run",
        metavar="FOLDER",
        help="a run folder: its config and its newest checkpoint (of formal languages its best)",
    )
    parser.add_argument("--config", action="append", default=[], metavar="NAME_OR_PATH")
    parser.add_argument("--ckpt_path", metavar="best|PATH", help="a checkpoint to take instead, or for --config")
    names = f"sets of data.{section}, v2 and v3 (`data fetch`), NAME=PATH of a set or a folder of sets"
    parser.add_argument("--sets", action="append", default=[], metavar="NAME,...", help=names)
    parser.add_argument("--keep-remainder", action="store_true", help="score every token, not whole chunks alone")
    parser.add_argument(
        "--out", metavar="FILE.json", help=f"instead of RUN/{stage}.json; a table of sets goes beside it, as .md"
    )
    options, overrides = parser.split(argv)
    if bool(options.run) == bool(options.config):
        parser.error("give either --run, or --config and --ckpt_path")
    if options.config and not options.ckpt_path:
        parser.error("--config needs --ckpt_path, the checkpoint to evaluate")
    if options.out and not options.out.endswith(".json"):
        parser.error(f"--out: expected a name that ends in .json, found {options.out}")
    from stackexp.config import compose

    configs = [str(_run_config(parser, options.run))] if options.run else options.config
    config = compose.compose(configs, overrides, trains=False)
    if options.keep_remainder:
        if config.data.objective != "language_modeling":
            parser.error(f"--keep-remainder is of sets of text, but the data are strings of {config.data.task}")
        overrides.append("data.keep_remainder=true")
        config = compose.compose(configs, overrides, trains=False)
    from stackexp.evaluation import evaluate as verb

    sets = [name.strip() for names in options.sets for name in names.split(",")]
    return verb.run(stage, options.run, config, options.ckpt_path, sets, options.out, overrides)


def generate(argv: list[str]) -> int:
    examples = ["generate --run runs/quickstart/ID --prompt 'def main('", "generate --run RUN --temperature 0"]
    parser = Parser("generate", "Continue a text with the model of a run.", examples, "--run FOLDER [OPTIONS]")
    parser.add_argument("--run", metavar="FOLDER", required=True, help="a run folder")
    parser.add_argument("--ckpt_path", metavar="best|PATH", help="a checkpoint instead of the run's newest")
    parser.add_argument("--prompt", default="", help="text to continue (default: none)")
    parser.add_argument("--max_new_tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)")
    parser.add_argument("--top_p", type=float, default=0.95, help="sample from this mass of tokens (default: 0.95)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse(argv)
    if options.max_new_tokens < 1:
        parser.error(f"--max_new_tokens: expected an integer >= 1, found {options.max_new_tokens}")
    if not 0 <= options.temperature < float("inf"):
        parser.error(f"--temperature: expected a number >= 0, found {options.temperature}")
    if not 0 < options.top_p <= 1:
        parser.error(f"--top_p: expected a number above 0, up to 1, found {options.top_p}")
    _run_config(parser, options.run)
    from stackexp.evaluation import generation as verb

    return verb.run(**vars(options))


def _run_config(parser: Parser, run: str) -> Path:
    path = Path(run, "config.yaml")
    if not path.is_file():
        parser.error(f"--run {run} is no run folder: there is no {path}")
    return path


def configs(argv: list[str]) -> int:
    examples = ["configs list", "configs show pretrain/stacktrans-360m", "configs show ablation/queue --seed 1"]
    usage = "list | show NAME_OR_PATH [KEY=VALUE ...]"
    parser = Parser("configs", "Browse the shipped configs and the choices for their sections.", examples, usage)
    options, rest = parser.split(argv)
    del options
    if rest == ["list"]:
        from stackexp.verbs import configs as verb

        return verb.show_list()
    if len(rest) >= 2 and rest[0] == "show":
        from stackexp.config import compose

        config = compose.compose(rest[1:2], rest[2:])
        from stackexp.verbs import configs as verb

        return verb.show(config)
    hint = nearest(rest[0], ["list", "show"]) if rest else ""
    parser.error(f"expected list, or show NAME{hint}")


def data(argv: list[str]) -> int:
    parser = Parser("data", "Prepare data.", [f"data {name} --help" for name in DATA], f"{'|'.join(DATA)} [OPTIONS]")
    if argv[:1] and argv[0] in DATA:
        verb = importlib.import_module(f"stackexp.verbs.data_{argv[0]}")
        return verb.main(argv[1:])
    parser.split(argv)
    parser.error(f"expected {', '.join(DATA)}{nearest(argv[0], DATA) if argv else ''}")


def plan(argv: list[str]) -> int:
    from stackexp.verbs import plan as verb

    return verb.main(argv)


def sweep(argv: list[str]) -> int:
    from stackexp.verbs import sweep as verb

    return verb.main(argv)


def report(argv: list[str]) -> int:
    from stackexp.verbs import report as verb

    return verb.main(argv)


def bench(argv: list[str]) -> int:
    from stackexp.verbs import bench as verb

    return verb.main(argv)


def checkpoint(argv: list[str]) -> int:
    from stackexp.verbs import checkpoint as verb

    return verb.main(argv)


DATA = ("prepare", "fetch", "retokenize", "inspect")
VERBS = {
    "fit": fit,
    "validate": lambda argv: evaluate("validate", argv),
    "test": lambda argv: evaluate("test", argv),
    "generate": generate,
    "configs": configs,
    "data": data,
    "plan": plan,
    "sweep": sweep,
    "report": report,
    "bench": bench,
    "checkpoint": checkpoint,
}


def main(argv: list[str] | None = None) -> int:
    """Run a verb. Returns 0, 1 for a RunError, 2 for a ConfigError, 130 when interrupted."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is loaded: its warnings are stack traces
    argv = sys.argv[1:] if argv is None else argv
    try:
        code = _dispatch(argv)
        sys.stdout.flush()
        return code
    except (ConfigError, RunError, Stopped, OSError, KeyboardInterrupt) as error:
        if os.environ.get("STACKEXP_TRACEBACK") == "1":
            raise
        return _report(error, "resume with --ckpt_path last" if argv[:1] == ["fit"] else "give the command again")


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if argv[0].startswith("-"):
        raise ConfigError(f"expected a verb before {argv[0]}: {', '.join(VERBS)}")
    if argv[0] not in VERBS:
        hint = nearest(argv[0], list(VERBS)) or f"; there are {', '.join(VERBS)}"
        raise ConfigError(f"unknown verb {argv[0]!r}{hint}")
    return VERBS[argv[0]](argv[1:])


def _report(error: BaseException, go_on: str) -> int:
    """Print what ended the program, in one line on standard error; the exit code. Raises what is a mistake of ours."""
    if isinstance(error, BrokenPipeError):  # the reader of our output has gone, as in `configs list | head -3`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    code, line = _explain(error, go_on)
    rank = os.environ.get("RANK", "0")  # set once the processes of a run have met
    if rank == "0":
        print(line if code in (75, 130) else f"error: {line}", file=sys.stderr)
    elif code == 1 and not getattr(error, "said", False):  # rank 0 says those that are the same in every process
        print(f"error: rank {rank}: {line}", file=sys.stderr)
    return code


def _explain(error: BaseException, go_on: str) -> tuple[int, str]:
    """Exit code, and what happened, where, and what to do."""
    if isinstance(error, KeyboardInterrupt):
        return 130, f"interrupted: {error}" if str(error) else "interrupted"
    for kind, code in {ConfigError: 2, Stopped: 75, FolderBusy: 74, RunError: 1}.items():
        if isinstance(error, kind):
            return code, " ".join(str(error).splitlines())
    if isinstance(error, OSError):
        path = error.filename2 or error.filename
        if error.errno in NO_SPACE:
            where = f" while writing {path}" if path else ""
            return 1, f"{NO_SPACE[error.errno]}{where}; free some, then {go_on}"
        if path:
            return 1, f"{path}: {error.strerror}; mend the path or its permissions, or name another place"
    raise error
