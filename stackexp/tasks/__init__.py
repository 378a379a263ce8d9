"""The formal-language tasks: those of Deletang et al. 2023, and other families, one file each.

    batch = TASKS["reverse_string"].sample(np.random.default_rng(0), batch_size=128, length=40)

To add a task, write one function with the decorator `task`, in the module of its family or in a plugin file;
configs and reports find it in `TASKS`. Configs are composed without numpy, so `definition.np` imports it at first use.
"""

from stackexp.tasks.definition import NO_TARGET, TASKS, Task, TaskBatch, task

# These modules register their tasks; the order here is the order of TASKS.
from stackexp.tasks import regular, context_free, context_sensitive  # noqa: F401  # isort: skip

CHOMSKY_TASKS = dict(TASKS)
"""The tasks of "Neural Networks and the Chomsky Hierarchy" (Deletang et al. 2023)."""

from stackexp.tasks import groups, recognition, generation, recall, repl  # noqa: E402, F401  # isort: skip

__all__ = ["CHOMSKY_TASKS", "NO_TARGET", "TASKS", "Task", "TaskBatch", "task"]
