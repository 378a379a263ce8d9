"""The two errors a user sees. The command line prints each as one line, without a traceback."""


class ConfigError(ValueError):
    """A mistake in a config, an override or the command line. Exit code 2; nothing has been written."""


class RunError(RuntimeError):
    """Something went wrong while working: data, checkpoint, disk, diverged loss. Exit code 1."""
