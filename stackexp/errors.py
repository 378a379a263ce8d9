"""What ends a verb early. The command line prints each as one line, without a traceback."""


def first_line(error: BaseException) -> str:
    """What another library's error says, short enough for our one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


class ConfigError(ValueError):
    """A mistake in a config, an override or the command line. Exit code 2; nothing has been written."""


class RunError(RuntimeError):
    """Something went wrong while working: data, checkpoint, disk, diverged loss. Exit code 1."""


class FolderBusyError(RunError):
    """Another process works in the run folder. Exit code 74; nothing was changed."""


class Stopped(Exception):
    """Told to stop (SIGTERM, SIGUSR1, max_time) and saved. Exit code 75: the same command goes on from there."""
