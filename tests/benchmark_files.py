"""Small datasets in the format of each shipped task."""

import json
from pathlib import Path

QUESTIONS = [
    {"question": "Which animal barks?", "choices": {"text": ["a dog", "a fish", "a stone"], "label": ["A", "B", "C"]}},
    {"question": "What is wet?", "choices": {"text": ["sand", "the sea", "fire and smoke"], "label": ["A", "B", "C"]}},
    {"question": "How many legs has a spider?", "choices": {"text": ["two", "4", "eight"], "label": ["1", "2", "3"]}},
]
ANSWERS = ["A", "B", "3"]
_KEYED = [question | {"answerKey": key} for question, key in zip(QUESTIONS, ANSWERS, strict=True)]

DATASETS = {
    "smollm2_arc_easy": {"test": _KEYED},
    "smollm2_arc_challenge": {"test": _KEYED},
    "smollm2_commonsense_qa": {"validation": _KEYED},
    "smollm2_openbookqa": {
        "validation": [
            {"question_stem": q["question"], "choices": q["choices"], "answerKey": q["answerKey"]} for q in _KEYED
        ]
    },
    "smollm2_piqa": {
        "validation": [
            {"goal": "open a door", "sol1": "turn the handle", "sol2": "eat the handle", "label": 0},
            {"goal": "boil water", "sol1": "freeze it", "sol2": "heat it", "label": 1},
        ]
    },
    "smollm2_mmlu": {
        "test": [{"question": "2 + 2?", "subject": "abstract_algebra", "choices": ["1", "2", "3", "4"], "answer": 3}]
    },
    "smollm2_hellaswag": {
        "validation": [
            {
                "activity_label": "Washing [x] a car",
                "ctx_a": "A man holds a hose.",
                "ctx_b": "he",
                "endings": ["rinses the car. [title] Done", "flies away.", "eats the hose.", "sleeps."],
                "label": "0",
            }
        ]
    },
    "smollm2_winogrande": {
        "validation": [
            {
                "sentence": "The cup fell because the _ was slippery.",
                "option1": "hand",
                "option2": "moon",
                "answer": "1",
            }
        ]
    },
    "smollm2_trivia_qa": {
        "validation": [{"question": "Capital of France?", "answer": {"value": "Paris", "aliases": ["Paris", "City"]}}]
    },
    "smollm2_gsm8k": {
        "train": [{"question": f"{n} plus 1?", "answer": f"It is {n + 1}.\n#### {n + 1}"} for n in range(8)],
        "test": [{"question": "600 plus 600?", "answer": "It is 1,200.\n#### 1,200"}],
    },
}


def write_datasets(folder: Path) -> Path:
    """Write the local datasets of all tasks."""
    for task in DATASETS:
        (folder / task).mkdir(parents=True)
        for split, documents in DATASETS[task].items():
            lines = "".join(json.dumps(document) + "\n" for document in documents)
            (folder / task / f"{split}.jsonl").write_text(lines)
    return folder
