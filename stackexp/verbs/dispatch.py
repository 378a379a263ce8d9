"""Find the verb that a command line names, run it, and report errors in one line.

The verb `data prepare` is the class `Prepare` in the module `stackexp.verbs.data`, and `fit` is `Fit` in
`stackexp.verbs.fit`; MODULES has the exceptions. A verb imports nothing heavy before `run` has checked the command
line and the config.
"""

import errno
import importlib
import inspect
import os
import sys
import time
from collections.abc import Collection
from pathlib import Path

import stackexp
from stackexp.errors import ConfigError, escape, first_line, mask_secrets, shorten, suggest_name
from stackexp.startup import hide_optional_packages
from stackexp.verbs.parser import Parser, Verb

EPILOG = """
examples:
  python -m stackexp fit --config quickstart
  python -m stackexp fit --config quickstart model.memory=queue
  python -m stackexp fit --config quickstart --ckpt_path last
  python -m stackexp validate --run runs/quickstart/ID
  python -m stackexp VERB --help

exit codes: 0 success, 1 the run failed, 2 a mistake in the config or the
command line, 74 another process uses the run folder, 75 stopped by SIGTERM,
SIGUSR1 or max_time with a checkpoint (rerun the command to resume), 130
interrupted
"""

MODULES = {"match": "plan", "test": "validate"}
"""Modules of the single verbs that share one with another verb."""
TRUST_FLAG = "--trust-plugins"
EXHAUSTED = {  # errno -> what is wrong, and what to do
    errno.ENOSPC: ("no space left on the disk", "free some space"),
    errno.EDQUOT: ("disk quota exceeded", "free some space"),
    errno.EFBIG: ("file size limit exceeded", "raise it (ulimit -f)"),
    errno.EMFILE: ("too many open files", "raise the limit (ulimit -n)"),
}
NO_MEMORY = "free memory, raise the limit (ulimit -v) or use a smaller batch"


def dispatch(verbs: dict[str, str], argv: list[str] | None = None) -> int:
    """Run a verb and return the exit code; `verbs` maps each name to its line in the help text."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is loaded: its warnings are stack traces
    hide_optional_packages()
    if "_ARGCOMPLETE" in os.environ:
        from stackexp.verbs.completion import complete

        complete(verbs)
    argv = sys.argv[1:] if argv is None else argv
    if TRUST_FLAG in argv:
        from stackexp.config.registry import TRUST_VARIABLE

        os.environ[TRUST_VARIABLE] = "1"  # child processes inherit it
        argv = [word for word in argv if word != TRUST_FLAG]
    try:
        code = _run(verbs, argv)
        sys.stdout.flush()
        return code
    except (Exception, KeyboardInterrupt) as error:
        if os.environ.get("STACKEXP_TRACEBACK") == "1":
            raise
        return _report(error)


def _run(verbs: dict[str, str], argv: list[str]) -> int:
    if argv == ["--version"]:
        print(f"stackexp {stackexp.__version__}")
        return 0
    if argv[:1] == ["help"]:
        argv = [*argv[1:], "--help"]
    name = find_verb(argv, verbs)
    if name is None:
        return _print_help(verbs, argv)
    verb, parser = load_verb(name)
    return verb.run(parser.parse(argv[len(name.split()) :]))


def find_verb(words: list[str], verbs: Collection[str]) -> str | None:
    """Return the verb that a command line begins with, such as `fit` or `data prepare`, or None."""
    return next((name for name in (" ".join(words[:2]), *words[:1]) if name in verbs), None)


def load_verb(name: str) -> tuple[Verb, Parser]:
    """Return a verb and its parser."""
    group, _, word = name.rpartition(" ")
    module = importlib.import_module(f"stackexp.verbs.{group or MODULES.get(word, word)}")
    verb = getattr(module, word.capitalize())()
    description, _, notes = inspect.cleandoc(verb.__doc__).partition("\n\n")
    parser = Parser(name, description, verb.examples, notes)
    verb.add_arguments(parser)
    return verb, parser


def _print_help(verbs: dict[str, str], argv: list[str]) -> int:
    """Print the verbs, or those of a group such as `data`. Raises ConfigError for an unknown verb."""
    group = argv[0] if argv else ""
    members = {name: text for name, text in verbs.items() if name.startswith(f"{group} ")}
    if members:
        if len(argv) > 1 and argv[1] not in ("-h", "--help"):
            raise _unknown_verb(f"{group}: ", argv[1], [name.split()[1] for name in members])
        print(f"usage: python -m stackexp {group} VERB [OPTIONS]\n\n{_format_verbs(members)}")
        return 0
    if argv and group not in ("-h", "--help"):
        names = [name for name in verbs if name.split() == argv[1::-1]]  # `list runs`
        names = names or [name for name in verbs if name.endswith(f" {group}")]  # `prepare`
        names = names or [name for name, text in verbs.items() if text.startswith(f"{group} the model")]  # `train`
        if names:
            raise ConfigError(f"unknown verb {group!r}; did you mean {' or '.join(map(repr, names))}?")
        raise _unknown_verb("", group, list(dict.fromkeys(name.split()[0] for name in verbs)))
    print(f"usage: python -m stackexp VERB [OPTIONS] [KEY=VALUE ...]\n\n{_format_verbs(verbs)}\n{EPILOG}", end="")
    return 0


def _format_verbs(verbs: dict[str, str]) -> str:
    width = max(map(len, verbs))
    return "\n".join(f"  {name:{width}}  {text}" for name, text in verbs.items())


def _unknown_verb(prefix: str, word: str, choices: list[str]) -> ConfigError:
    if word.startswith("-"):
        return ConfigError(f"{prefix}expected a verb before {word}; choose {', '.join(choices)}")
    hint = suggest_name(word, choices) or f"; choose {', '.join(choices)}"
    return ConfigError(f"{prefix}unknown verb {word!r}{hint}")


def _report(error: BaseException) -> int:
    """Print one line on standard error and return the exit code."""
    if isinstance(error, BrokenPipeError):  # the reader has closed our output, as in `configs list | head -3`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    code, line = _explain(error)
    line = shorten(mask_secrets(escape(line)))
    rank = os.environ.get("RANK", "0")  # set once the processes of a run are connected
    if rank == "0":
        print(line if code in (75, 130) else f"error: {line}", file=sys.stderr)
    elif code == 1 and not getattr(error, "is_reported", False):  # rank 0 reports errors that all ranks share
        print(f"error: rank {rank}: {line}", file=sys.stderr)
    return code


def _explain(error: BaseException) -> tuple[int, str]:
    """Return the exit code and the error line (where, problem, remedy). Reraise errors that are bugs."""
    advice = getattr(error, "__notes__", ["rerun the command"])[0]  # a run adds the command that resumes it
    if isinstance(error, KeyboardInterrupt):
        return 130, f"interrupted: {error}" if str(error) else "interrupted"
    if code := getattr(error, "exit_code", None):
        return code, str(error)
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("stackexp"):
        package = error.name.partition(".")[0]
        return 1, f"the Python module {package} is not installed; install it, or stackexp with all its dependencies"
    if isinstance(error, OSError):
        path = error.filename2 or error.filename
        if error.errno in EXHAUSTED:
            problem, remedy = EXHAUSTED[error.errno]
            return 1, f"{problem}{f' at {path}' if path else ''}; {remedy}, then {advice}"
        if path:
            return 1, f"{path}: {error.strerror}; check the path and its permissions"
    if isinstance(error, MemoryError):
        problem = first_line(error) if str(error) else "an allocation failed"
        return 1, f"out of memory: {problem}; {NO_MEMORY}, then {advice}"
    if "failed to map segment" in str(error):  # dlopen fails with an ImportError or OSError that has no errno
        return 1, f"out of memory while loading {first_line(error).split(':')[0]}; {NO_MEMORY}, then {advice}"
    raise error


CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # kept if the user has set them
CPU_TIMES = Path("/proc/stat")
SAMPLE_SECONDS = 0.1


def choose_wait_policy() -> None:
    """Make OpenMP threads sleep at barriers if other processes keep CPUs busy; otherwise they spin.

    Spinning is faster if every thread has its own CPU. On a shared CPU, a spinning thread takes CPU time from the
    thread that it waits for (docs/performance.md). Does nothing if /proc/stat is missing.
    """
    if any(name in os.environ for name in CHOICES):
        return
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    requested = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # a list has a number for each nesting level
    threads = min(available, int(requested)) if requested.isdecimal() and int(requested) else available
    if threads > 1 and count_idle_cpus() < threads - 0.5:
        os.environ["GOMP_SPINCOUNT"] = "0"
        print("note: other processes keep CPUs busy; threads sleep while they wait (GOMP_SPINCOUNT=0)", file=sys.stderr)


def count_idle_cpus() -> float:
    """Return how many CPUs are idle on average over SAMPLE_SECONDS; infinity if that cannot be measured."""
    first = _read_idle_seconds()
    time.sleep(SAMPLE_SECONDS)
    last = _read_idle_seconds()
    return float("inf") if first is None or last is None else (last - first) / SAMPLE_SECONDS


def _read_idle_seconds() -> float | None:
    """Return the idle time of all CPUs together since the machine started."""
    try:
        idle, waiting = CPU_TIMES.read_text().split("\n")[0].split()[4:6]
        return (int(idle) + int(waiting)) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None
