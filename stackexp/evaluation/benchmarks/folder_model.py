"""A Hugging Face folder as a language model of lm-eval."""

import dataclasses
from typing import Any

from lm_eval.models.huggingface import HFLM

from stackexp.evaluation.benchmarks.batching import limit_new_tokens


class FolderModel(HFLM):
    """lm-eval's class for Hugging Face models, also for answers that are longer than the model's context.

    lm-eval stops at such an answer with an assertion. Here they are cut as in RunModel: of a given answer the last
    `max_length` tokens count, and a generated one has at most half as many.
    """

    def _loglikelihood_tokens(self, requests: list[Any], **options: Any) -> list[tuple[float, bool]]:
        cut = [(texts, context, answer[-self.max_length :]) for texts, context, answer in requests]
        return super()._loglikelihood_tokens(cut, **options)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each prompt."""
        shortened = []
        for request in requests:
            prompt, options = request.args
            options = {**options, "max_gen_toks": limit_new_tokens(options, self.max_length)}
            shortened.append(dataclasses.replace(request, arguments=(prompt, options)))
        return super().generate_until(shortened, disable_tqdm=disable_tqdm)
