"""Documents within a sequence: their ids, positions and masks, and their separation in the decoder."""

from types import SimpleNamespace

import pytest
import torch
from attention_models import END, TOKENS
from records import losses, only_run
from small_models import make_model

from stackexp.cli import main
from stackexp.config import compose
from stackexp.data.documents import compute_document_ids, compute_document_positions
from stackexp.data.tokenizer import get_end_of_text_id, load_tokenizer
from stackexp.data.units import write_documents
from stackexp.datamodules.pretraining import PretrainingData
from stackexp.models.generation import generate
from stackexp.models.transformer import Cache
from stackexp.modules.language_modeling import LanguageModeling

DEPTH = {"axis": "depth"}


def test_documents_end_with_their_end_token_and_positions_restart():
    assert compute_document_ids(TOKENS, END).tolist() == [[0, 0, 0, 1, 1, 2, 3, 3, 3], [0, 1, 1, 1, 1, 1, 1, 1, 1]]
    positions = compute_document_positions(compute_document_ids(TOKENS, END))
    assert positions.tolist() == [[0, 1, 2, 0, 1, 0, 0, 1, 2], [0, 0, 1, 2, 3, 4, 5, 6, 7]]


def test_gradients_stay_within_the_document():
    model = make_model(DEPTH)
    embedded = []
    model.embedding.register_forward_hook(lambda _, __, output: embedded.append(output.retain_grad() or output))
    documents = compute_document_ids(TOKENS, END)
    model(TOKENS, documents=documents).logits[0, 4].sum().backward()  # the end of document 1: tokens 3 and 4
    token_gradients = embedded[0].grad.abs().sum(-1)
    assert token_gradients.nonzero().tolist() == [[0, 3], [0, 4]]


def test_no_documents_builds_no_mask_or_positions(monkeypatch):
    masks = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def record_mask(q, k, v, mask=None, **options):
        masks.append((mask, options["is_causal"]))
        return attention(q, k, v, mask, **options)

    monkeypatch.setattr("stackexp.models.attention.F.scaled_dot_product_attention", record_mask)
    monkeypatch.setattr("stackexp.models.attention.build_document_mask", None)
    monkeypatch.setattr("stackexp.models.transformer.compute_document_positions", None)
    make_model(DEPTH)(TOKENS)
    assert masks == [(None, True)] * 3


def test_generation_ignores_document_boundaries():
    model = make_model(DEPTH)
    with pytest.raises(ValueError, match="cache"):
        model(TOKENS, Cache(), documents=compute_document_ids(TOKENS, END))
    prompt = TOKENS[:1, :5]
    tokens = generate(model, prompt, 3, temperature=0)
    for length in (5, 6, 7):
        assert tokens[0, length] == model(tokens[:, :length]).logits[0, -1].argmax()


def test_document_mask_changes_the_training_loss(tiny, corpus, tmp_path):
    """Check that the loss of the first step, from the initial weights, equals the loss over separate documents."""
    texts = [f"{n} of {n * n}\n" for n in range(300)]
    tokenizer = load_tokenizer(corpus["train"] / "tokenizer.json")
    write_documents(tmp_path / "short", texts, tokenizer, 32)
    fit = ["fit", "--config", str(tiny), f"data.path={tmp_path}/short", "trainer.max_steps=1"]
    fit += ["schedule.warmup_steps=0", "trainer.val_check_interval=null", "logging.loggers=[]"]
    found = {}
    for mask in (False, True):
        root = tmp_path / str(mask)
        assert main([*fit, f"data.document_mask={str(mask).lower()}", f"logging.root={root}"]) == 0
        found[mask] = losses(only_run(root))[1]

    config = compose.load_config(str(only_run(tmp_path / "True").config))
    data = PretrainingData(config.data, seed=config.seed)
    data.setup("fit")
    data.trainer = SimpleNamespace(global_rank=0, world_size=1, num_devices=1)
    torch.manual_seed(config.seed)
    model = LanguageModeling(config).model
    alone, together = [], []
    with torch.no_grad():
        for _, batch in zip(range(2), data.train_dataloader(), strict=False):  # two micro-batches of four: the step
            ends = compute_document_ids(batch["tokens"], get_end_of_text_id(tokenizer))
            for row, numbers in zip(batch["tokens"], ends, strict=True):
                logits = [model(row[numbers == number][None]).logits[0] for number in numbers.unique()]
                assert len(logits) > 1
                alone.append(torch.nn.functional.cross_entropy(torch.cat(logits)[:-1], row[1:]))
                together.append(torch.nn.functional.cross_entropy(model(row[None]).logits[0, :-1], row[1:]))
    assert found[True] == pytest.approx(torch.stack(alone).mean().item(), abs=2e-6)
    assert found[False] == pytest.approx(torch.stack(together).mean().item(), abs=2e-6)
    assert abs(found[True] - found[False]) > 1e-5, "the mask must change the loss"
