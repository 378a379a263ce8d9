"""The formal-language tasks of Deletang et al. 2023, "Neural Networks and the Chomsky Hierarchy".

    batch = TASKS["reverse_string"].sample(np.random.default_rng(0), batch_size=128, length=40)

To add a task, write one decorated function in the module of its Chomsky class; configs and reports find it in `TASKS`.
Configs are composed without numpy, so those modules import it inside the functions that need it.
"""

from stackexp.tasks.task import TASKS, Batch, Task

# These modules register their tasks; the order here is the order of TASKS.
from stackexp.tasks import regular, context_free, context_sensitive  # noqa: F401  # isort: skip

__all__ = ["TASKS", "Batch", "Task"]
