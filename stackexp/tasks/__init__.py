"""The tasks of Deletang et al. 2023, "Neural Networks and the Chomsky Hierarchy": strings with exact answers.

    batch = TASKS["reverse_string"].sample(np.random.default_rng(0), batch_size=128, length=40)

A model sees the symbols of `batch.inputs`, then the empty token, id `task.inputs`, as often as the answer has symbols.
"""

from stackexp.config.formal_language import TASKS as SIZES
from stackexp.tasks import arithmetic, expressions, regular, strings
from stackexp.tasks.task import Batch, Task

__all__ = ["TASKS", "Batch", "Task"]

_BY_NAME = {task.name: task for file in (regular, expressions, strings, arithmetic) for task in file.TASKS}
TASKS: dict[str, Task] = {name: _BY_NAME[name] for name in SIZES}
