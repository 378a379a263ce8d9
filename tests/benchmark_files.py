"""Small datasets in the format of each shipped task, and a Hugging Face folder with the weights of a run."""

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


def write_datasets(folder: Path, *tasks: str) -> Path:
    """Write the local datasets of these tasks, or of all."""
    for task in tasks or DATASETS:
        (folder / task).mkdir(parents=True)
        for split, documents in DATASETS[task].items():
            lines = "".join(json.dumps(document) + "\n" for document in documents)
            (folder / task / f"{split}.jsonl").write_text(lines)
    return folder


def write_hugging_face_folder(run: Path, folder: Path) -> Path:
    """Convert the newest checkpoint of a run without a memory to a Hugging Face Llama."""
    import torch
    from tokenizers import Tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from stackexp.evaluation.loading import load_run

    loaded = load_run(run, "last")
    ours = loaded.config.model
    config = LlamaConfig(
        vocab_size=ours.vocab_size,
        hidden_size=ours.hidden_size,
        num_hidden_layers=ours.num_layers,
        num_attention_heads=ours.num_heads,
        num_key_value_heads=ours.num_kv_heads,
        intermediate_size=ours.intermediate_size,
        rms_norm_eps=ours.norm_eps,
        rope_theta=ours.rope_theta,
        tie_word_embeddings=ours.tie_embeddings,
        max_position_embeddings=loaded.config.data.context_length,
        bos_token_id=None,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config)
    names = {"embedding": "embed_tokens", "attention": "self_attn", "feed_forward": "mlp"}
    names |= {"attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"}
    state = {
        ".".join(["model", *(names.get(part, part) for part in name.split("."))]): weight
        for name, weight in loaded.model.state_dict().items()
    }
    state["lm_head.weight"] = loaded.model.output_head.weight
    model.load_state_dict(state, strict=True)
    model.to(torch.float32).save_pretrained(folder)
    tokenizer = Tokenizer.from_file(str(loaded.folder.tokenizer))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(folder)
    return folder
