"""Prompts and metrics of the tasks in tasks/ that a template cannot express. The protocol: docs/benchmarks.md."""

import re
import string
from typing import Any

Document = dict[str, Any]

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_GSM8K_ANSWER = re.compile(r"#### (-?[0-9.,]+)")


def _clean_wikihow(text: str) -> str:
    """Remove the markup of HellaSwag's WikiHow part: [title] ends a sentence, other brackets are dropped."""
    return re.sub(r"\[.*?\]", "", text.replace(" [title]", ". ")).replace("  ", " ")


def write_hellaswag_context(document: Document) -> str:
    """Return the activity and the text before the ending, with a space at the end."""
    context = f"{document['activity_label']}: {document['ctx_a']} {document['ctx_b'].capitalize()} "
    return _clean_wikihow(context)


def list_hellaswag_endings(document: Document) -> list[str]:
    """Return the four endings."""
    return [_clean_wikihow(ending) for ending in document["endings"]]


def write_winogrande_context(document: Document) -> str:
    """Return the sentence before the blank."""
    return document["sentence"].split("_")[0]


def list_winogrande_endings(document: Document) -> list[str]:
    """Return the rest of the sentence with each of the two options in the blank."""
    rest = document["sentence"].split("_")[1].strip()
    return [f"{document[option]} {rest}" for option in ("option1", "option2")]


def score_trivia_qa(document: Document, answers: list[str]) -> dict[str, float]:
    """Return 1 if the answer is an alias, without case and punctuation.

    As in the protocol, an alias that begins with another one does not count.
    """
    aliases: list[str] = []
    for alias in sorted(document["answer"]["aliases"]):
        if not aliases or not alias.startswith(aliases[-1]):
            aliases.append(alias)
    return {"exact_match": float(_normalize(answers[0]) in map(_normalize, aliases))}


def _normalize(text: str) -> str:
    return text.strip().lower().translate(_NO_PUNCTUATION)


def score_gsm8k(document: Document, answers: list[str]) -> dict[str, float]:
    """Return 1 if the number after the first #### is that of the solution, without commas."""
    found, expected = (_GSM8K_ANSWER.search(text) for text in (answers[0], document["answer"]))
    is_right = found and expected and found[1].replace(",", "") == expected[1].replace(",", "")
    return {"exact_match": float(bool(is_right))}
