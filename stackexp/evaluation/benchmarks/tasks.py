"""Find and load lm-eval's tasks, and those of the folder tasks/."""

import importlib.util
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from stackexp.errors import ConfigError, RunError, first_line, suggest_name
from stackexp.files import read_json_lines

FOLDER = Path(__file__).with_name("tasks")
SPLITS = ("fewshot_split", "training_split", "validation_split", "test_split")
"""The keys of a task's splits. lm-eval draws the shots from the first one that the task has."""


def check_installed(*packages: str) -> None:
    """Raise ConfigError unless lm-eval and `packages` are installed."""
    for package in ("lm_eval", *packages):
        if importlib.util.find_spec(package) is None:
            name = package.replace("_", "-")
            raise ConfigError(f"{name}: not installed; benchmarks require pip install 'stackexp[eval]'")


class TaskLoader:
    """Loads tasks by name. `datasets` is a folder of local copies: <task>/<split>.jsonl; None downloads them."""

    def __init__(self, datasets: Path | None = None, num_fewshot: int | None = None):
        check_installed()
        for library in ("lm_eval", "huggingface_hub"):
            logging.getLogger(library).setLevel(logging.ERROR)  # hints, and every retry without a network
        self._datasets, self._num_fewshot = datasets, num_fewshot

    @cached_property
    def _shipped(self) -> Any:
        from lm_eval.tasks import TaskManager

        return TaskManager(include_path=str(FOLDER), include_defaults=False)

    @cached_property
    def _all(self) -> Any:
        from lm_eval.tasks import TaskManager

        return TaskManager(include_path=str(FOLDER))  # takes seconds: it reads thousands of files

    def expand(self, names: Sequence[str]) -> list[str]:
        """Return the tasks of all names, which may be groups or tags. Raises ConfigError for an unknown name."""
        return list(dict.fromkeys(task for name in names for task in self._expand(name)))

    def _find_manager(self, name: str) -> Any:
        return self._shipped if name in self._shipped.all_tasks else self._all

    def _expand(self, name: str) -> Iterator[str]:
        manager = self._find_manager(name)
        entry = manager.task_index.get(name)
        if entry is None:
            hint = suggest_name(name, manager.all_tasks) or "; `lm-eval ls tasks` lists all"
            raise ConfigError(f"tasks: unknown task {name!r}{hint}")
        if entry.kind.name == "TAG":
            yield from sorted(entry.tags)
        elif entry.kind.name == "GROUP":
            for member in entry.cfg["task"]:
                if not isinstance(member, str):
                    raise ConfigError(f"tasks: the group {name!r} changes its members; name its tasks instead")
                yield from self._expand(member)
        else:
            yield name

    def load(self, name: str) -> Any:
        """Return a task with its dataset. Raises RunError if the dataset cannot be read or has too few examples."""
        manager = self._find_manager(name)
        config = manager.task_index[name].cfg or {}
        changes: dict[str, Any] = {} if self._num_fewshot is None else {"num_fewshot": self._num_fewshot}
        if self._datasets is not None:
            changes |= self._use_local_dataset(name, config)
        try:
            task = manager.load({"group": "requested", "task": [{"task": name, **changes}]})["tasks"][name]
        except (RunError, MemoryError):
            raise
        except Exception as error:  # lm-eval and its dataset library raise many types
            where = f"{self._datasets / name}" if self._datasets else f"dataset {config.get('dataset_path', name)!r}"
            file = f"{name}/{config.get(find_evaluated_split(config), 'test')}.jsonl"
            remedy = f"connect to it, or give --datasets FOLDER with FOLDER/{file}"
            remedy = "correct the files" if self._datasets else remedy
            raise RunError(f"{name}: cannot load {where} ({first_line(error)}); {remedy}") from None
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        _exclude_scored_documents(task)
        _check_shots(task)
        return task

    def _use_local_dataset(self, name: str, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return changes to a task's config that read the local files, and ignore splits without a file."""
        assert self._datasets is not None
        folder = self._datasets / name
        files = {path.stem: path for path in sorted(folder.glob("*.jsonl"))}
        missing = {key: None for key in SPLITS if config.get(key) and config[key] not in files}
        shots = config.get("num_fewshot") if self._num_fewshot is None else self._num_fewshot
        needed = [find_evaluated_split(config)]
        if shots and "samples" not in (config.get("fewshot_config") or {}):
            needed += [split for split in SPLITS if config.get(split)][:1]
        for split in needed:
            if split in missing:  # without the split of the shots, lm-eval would draw them from another one
                file = folder / f"{config[split]}.jsonl"
                raise RunError(f"{name}: no {file}; write one line for each document of {config['dataset_path']!r}")
        return {"custom_dataset": lambda **_: read_dataset(files), "dataset_path": str(folder), **missing}


def _exclude_scored_documents(task: Any) -> None:
    """Name the split of the shots if it is that of the test; else lm-eval may show a document as its own example."""
    shots, config = task.fewshot_cfg, task.config
    split = config.training_split or config.validation_split or config.test_split
    if shots.split is None and shots.samples is None and split == config.test_split:
        shots.split = split


def _check_shots(task: Any) -> None:
    """Raise RunError if there are fewer examples than shots. lm-eval draws one more if they are also scored."""
    shots = task.get_config("num_fewshot")
    is_scored = task.fewshot_cfg.split == task.get_config("test_split")
    needed = shots + is_scored if shots else 0
    count = sum(1 for _ in itertools.islice(task.fewshot_docs(), needed)) if needed else 0
    if count < needed:
        name = task.get_config("task")
        raise RunError(
            f"{name}: {shots} shots require {needed} examples, found {count}; add some or lower --num_fewshot"
        )


def find_evaluated_split(config: Mapping[str, Any]) -> str:
    """Return the key of the split that lm-eval scores: that of test documents, if there are any."""
    return "test_split" if config.get("test_split") else "validation_split"


def read_dataset(files: Mapping[str, Path]) -> Any:
    """Return the splits of a dataset from JSON Lines files. Raises RunError for a file without documents."""
    from datasets import Dataset

    splits = {}
    for split, path in files.items():
        documents = list(read_json_lines(path, is_log=False))
        if not documents:
            raise RunError(f"{path}: no documents; write one JSON object per line")
        splits[split] = Dataset.from_list(documents)
    return splits
