"""The decoder as a language model of lm-eval: batches, windows, answers and generation."""

import math

import pytest
import torch

pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance

from stackexp.config.memory import StackAttentionConfig, StackMemoryConfig
from stackexp.config.model import TransformerConfig
from stackexp.data.tokenizer import train_tokenizer
from stackexp.errors import RunError
from stackexp.evaluation.benchmarks.models import RunModel, limit_new_tokens
from stackexp.models.generation import generate
from stackexp.models.transformer import Transformer

LENGTH = 24
MEMORIES = {
    "none": None,
    "depth": StackMemoryConfig(axis="depth", num_heads=2, head_dim=4, num_slots=3),
    "time": StackMemoryConfig(axis="time", num_heads=2, head_dim=4, num_slots=3),
    "token_major": StackMemoryConfig(axis="token_major", num_heads=2, head_dim=4, num_slots=3),
    "stack_attention": StackAttentionConfig(),
}
PAIRS = [
    *(("a long question about a cab. ", answer) for answer in ("bed", "a", "a dead bee", "cab")),
    ("", "face"),
    *(("bag ", answer) for answer in ("ace", "a decade of cabbage")),
    ("a very long context that exceeds the window", " dad"),
    ("b", "a continuation of more than the window's tokens"),
]


def build_model(memory="none", *, batch_size=4, tokenizer=None, **options) -> RunModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 259, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1}
    model = Transformer(TransformerConfig(**sizes, intermediate_size=24, memory=MEMORIES[memory])).double()
    with torch.no_grad():
        model.embedding.weight.mul_(10)  # far from uniform predictions
    tokenizer = tokenizer or train_tokenizer([], 257)  # tokens are bytes
    return RunModel(model, tokenizer, LENGTH, batch_size=batch_size, **options)


def ask(kind, *arguments) -> Instance:
    return Instance(kind, {}, arguments, 0, ("task", 0, 1))


def score_alone(lm: RunModel, context: str, continuation: str) -> float:
    """Return the log-likelihood by one plain forward pass for each part of LENGTH tokens of the continuation."""
    before, rest, total = lm.tok_encode(context) or [0], lm.tok_encode(continuation), 0.0
    while rest:
        after, rest = rest[:LENGTH], rest[LENGTH:]
        tokens = torch.tensor([[*before, *after]])[:, -(LENGTH + 1) :]
        scores = lm.model.eval()(tokens[:, :-1]).logits[0].log_softmax(-1)
        total += sum(scores[-len(after) + i, token].item() for i, token in enumerate(after))
        before += after
    return total


@pytest.mark.parametrize("memory", MEMORIES)
def test_scores_do_not_depend_on_the_batch(memory):
    requests = [ask("loglikelihood", *pair) for pair in PAIRS]
    alone = build_model(memory, batch_size=1).loglikelihood(requests)
    lm = build_model(memory, batch_size=4)
    together = lm.loglikelihood(requests)
    assert [score for score, _ in together] == pytest.approx([score for score, _ in alone], abs=1e-8)
    assert [greedy for _, greedy in together] == [greedy for _, greedy in alone]
    contexts = [(context.rstrip(), " " * context.endswith(" ") + answer) for context, answer in PAIRS]
    assert [score for score, _ in together] == pytest.approx([score_alone(lm, *pair) for pair in contexts], abs=1e-8)


def test_an_answer_whose_first_token_begins_in_the_prompt_is_scored_as_a_whole():
    """lm-eval itself would score an empty answer with log-probability 0, which wins."""
    lm = build_model(tokenizer=train_tokenizer(["ab ab ab 日本 日本"], 259))
    assert len(lm.tok_encode("ab")) == 1
    pairs = [("xa", "b"), ("xa", "bc"), ("日"[:1], "本")]
    scores = [score for score, _ in lm.loglikelihood([ask("loglikelihood", *pair) for pair in pairs])]
    assert scores == pytest.approx([score_alone(lm, *pair) for pair in pairs], abs=1e-8)
    assert max(scores) < 0
    for prompt in ("a question", ""):
        with pytest.raises(RunError, match="task: document 0: the answer '' has no token; remove the document"):
            lm.loglikelihood([ask("loglikelihood", prompt, "")])


def test_greedy_continuations_are_marked():
    lm = build_model()
    prompt = lm.tok_encode("abc")
    text = lm._tokenizer.decode(generate(lm.model, torch.tensor([prompt]), 3, temperature=0)[0, 3:].tolist())
    tokens = lm.tok_encode(text)
    assert len(tokens) == 3, "the model generates text that encodes to the same tokens"
    answers = lm.loglikelihood([ask("loglikelihood", "abc", text), ask("loglikelihood", "abc", "x")])
    assert [greedy for _, greedy in answers] == [True, False]


def test_rolling_scores_use_every_token_once():
    lm = build_model()
    text = "a text that is longer than the window of twenty-four tokens, by far"
    score, empty = lm.loglikelihood_rolling([ask("loglikelihood_rolling", text), ask("loglikelihood_rolling", "")])
    tokens, expected = [0, *lm.tok_encode(text)], 0.0
    for first in range(0, len(tokens) - 1, LENGTH):
        last = min(first + LENGTH, len(tokens) - 1)
        window = torch.tensor([tokens[max(0, last - LENGTH) : last]])
        logits = lm.model.eval()(window).logits[0].log_softmax(-1)
        count = last - first
        expected += logits[-count:].gather(1, torch.tensor(tokens[first + 1 : last + 1])[:, None]).sum().item()
    assert score == pytest.approx(expected, abs=1e-8)
    assert empty == 0


@pytest.mark.parametrize("memory", ["none", "depth", "time", "token_major"])
def test_generation_does_not_depend_on_the_batch(memory):
    prompts = ["ab", "a cab", "", "cd", "ef", "a longer prompt than all others, and than the window"]
    requests = [ask("generate_until", prompt, {"until": ["\n\n"], "max_gen_toks": 6}) for prompt in prompts]
    alone, together = (build_model(memory, batch_size=size).generate_until(requests) for size in (1, 4))
    assert alone == together
    assert len(set(together)) > 1


def test_generation_stops_before_the_first_stop_string_or_at_the_limit():
    lm = build_model()
    (free,) = lm.generate_until([ask("generate_until", "ab", {"max_gen_toks": 8})])
    stop = free[3:5]
    (text,) = lm.generate_until([ask("generate_until", "ab", {"until": ["never seen", stop], "max_gen_toks": 8})])
    assert text == free[: free.index(stop)]
    with torch.no_grad():
        lm.model.norm.weight.fill_(math.nan)
    assert lm.generate_until([ask("generate_until", "ab", {"max_gen_toks": 8})]) == [""], "a diverged model"
    assert limit_new_tokens({}, 1024) == 256
    assert limit_new_tokens({"max_new_tokens": 150, "max_gen_toks": None}, 1024) == 150
    assert limit_new_tokens({"max_tokens": 150}, 200) == 100


def test_unsupported_generation_is_refused():
    sampled = ask("generate_until", "a", {"do_sample": True, "temperature": 0.7})
    with pytest.raises(RunError, match="task: samples its answers; only greedy decoding is supported"):
        build_model().generate_until([sampled])
    with pytest.raises(RunError, match="not supported for sharded weights"):
        build_model(is_sharded=True).generate_until([ask("generate_until", "a", {})])
