"""Recordings of stacks and interventions on them."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from browser import CHROMIUM, Browser, poll
from small_models import make_model
from stack_memories import decoder_config
from tokenizers import processors
from torch.nn.functional import cross_entropy

from stackexp.config.memory import (
    AttentionResidualConfig,
    HyperConnectionsConfig,
    ResidualStackConfig,
    ValueSkipConfig,
)
from stackexp.data.tokenizer import train_tokenizer
from stackexp.datamodules.formal_language import LengthSet, build_string_batch
from stackexp.errors import ConfigError, RunError
from stackexp.inspection.inspect import average_values, draw_maps, format_means, format_page, open_text
from stackexp.inspection.interventions import (
    Intervention,
    check_heads,
    clear,
    compute_losses,
    format_changes,
    intervene,
    list_interventions,
    measure_interventions,
    measure_summary,
)
from stackexp.models.memories.base import Memory
from stackexp.models.memories.residual_stack import ResidualStackOutput
from stackexp.models.memories.stack import IMPOSSIBLE_LOGIT, PUSH
from stackexp.models.stack_recording import (
    ACTIONS,
    MEASUREMENTS,
    Recording,
    _measure_residual_stack,
    compute_occupied_weights,
    record_memories,
    wrap_method,
)
from stackexp.models.transformer import Transformer
from stackexp.stack import use_implementation
from stackexp.tasks import TASKS

TOKENS = torch.tensor([[1, 2, 3, 4, 5, 6], [6, 7, 8, 9, 10, 1]])
BATCHES = [{"tokens": TOKENS, "length": torch.tensor([6, 4])}]


def build_model(seed=0, **memory):
    torch.manual_seed(seed)
    model = Transformer(decoder_config(num_layers=3, **memory)).double().eval()
    for stack in model.memories:
        for parameter in (stack.up, stack.actions):
            if parameter is not None:
                parameter.data.mul_(3)
    return model


def record(model):
    """Return the recordings of TOKENS."""
    with record_memories(model) as recordings:
        model(TOKENS)
    return recordings


class Trace(Memory):
    """A memory of a plugin: a decaying sum of the hidden states below, which is added to h."""

    reports: ClassVar = {"push": "norm of the pushed vector", "read_share": "norm of the read / that of h"}

    def empty_state(self, h):
        return torch.zeros_like(h)

    def forward(self, h, state, previous=None, probe=False):
        state = 0.5 * state + h
        self.report(push=h.norm(dim=-1), read_share=(state.norm(dim=-1) / h.norm(dim=-1)).unsqueeze(-1))
        return h + 0.1 * state, state, {}


def build_traced_model():
    model = build_model()
    for layer, block in enumerate(model.layers):
        block.memory = Trace(None, model.config, layer)
    return model


def test_a_memory_of_a_plugin_is_recorded_and_changed():
    model = build_traced_model()
    plain = model(TOKENS).logits
    recordings = record(model)
    assert [recording.layer for recording in recordings] == [0, 1, 2]
    assert {name: value.shape for name, value in recordings[0].values.items()} == dict.fromkeys(
        Trace.reports, (2, 6, 1)
    )
    assert all(memory.reporter is None for memory in model.memories)
    names = [change["intervention"] for change in measure_interventions(model, BATCHES, heads=False)]
    assert names == [
        "none",
        "outputs dropped",
        *(f"output of layer {layer} dropped" for layer in range(3)),
        *(f"state cleared before layer {layer}" for layer in (1, 2)),
    ]
    with intervene(model, find(model, "outputs dropped")):
        dropped = model(TOKENS).logits
    cleared = [find(model, f"state cleared before layer {layer}") for layer in (1, 2)]
    with intervene(model, cleared[0]), intervene(model, cleared[1]):
        without_past = model(TOKENS).logits
    torch.testing.assert_close(model(TOKENS).logits, plain, rtol=0, atol=0)
    for scale, expected in ((0.0, dropped), (0.1, without_past)):
        with wrap_method(
            "forward", {m: lambda _, f, h, s, scale=scale, **o: (h + scale * h, s, {}) for m in model.memories}
        ):
            torch.testing.assert_close(model(TOKENS).logits, expected)
    means = [replace(r, values=average_values([r.values])) for r in recordings]
    assert "read_share" in format_means(means)
    assert draw_maps(means).axes[0].get_title() == "push"
    assert "norm of the read" in format_page("text", list("abcdef"), recordings)


def test_undeclared_and_missing_reports_are_errors():
    model = build_traced_model()
    for reports, message in (
        ({"push": ""}, "read_share: not in Trace.reports"),
        (Trace.reports | {"depth": ""}, "reports no depth"),
    ):
        for memory in model.memories:
            memory.reports = reports
        with pytest.raises(RunError, match=message):
            record(model)


@pytest.mark.parametrize(
    "memory", [{}, {"axis": "time"}, {"axis": "time", "discipline": "queue", "feedback": True}, {"axis": "token_major"}]
)
def test_recording_changes_nothing_and_agrees_with_the_probes(memory):
    model = build_model(**memory)
    expected = model(TOKENS, probe=True)
    with record_memories(model) as recordings:
        torch.testing.assert_close(model(TOKENS).logits, expected.logits)
    torch.testing.assert_close(model(TOKENS).logits, expected.logits, msg="the model is as before")
    for recording, probes in zip(recordings, expected.probes, strict=True):
        assert set(recording.values) == set(MEASUREMENTS)
        for name in ("push", "pop", "no_op", "entropy", "occupancy"):
            assert recording.values[name].shape == (2, 6, 2)
            assert recording.values[name].mean().item() == pytest.approx(probes[name].item(), rel=1e-5)
        spread = average_values([recording.values])["action_spread"]
        assert spread.shape == (2,)
        if "action_spread" in probes:
            assert spread.mean().item() == pytest.approx(probes["action_spread"].item(), rel=1e-5)
        else:
            assert memory == {"axis": "token_major"}, "one token at a time has no spread"
            assert spread.min() > 0


@pytest.mark.parametrize(("read", "read_mask"), [("global", "multiply"), ("global", "log"), ("top", "multiply")])
def test_read_weights_reproduce_the_read(read, read_mask):
    model = build_model(read=read, read_mask=read_mask)
    with use_implementation("eager"):
        h, memory = model.embedding(TOKENS), model.memories[0]
        state = memory.empty_state(h)
        for stack in model.memories:
            output, state = stack.update(state, *stack.project(h), h)
            weights = compute_occupied_weights(stack, state)
            torch.testing.assert_close((weights.unsqueeze(-1) * state.slots).sum(-2), output.read)


def test_values_are_over_occupied_slots():
    """Then layer 0 pushes, the others do nothing: the top is the only occupied slot."""
    for recording in record(build_model(num_slots=24)):
        assert recording.values["read_slot"].max() <= recording.layer
        assert recording.values["read_sharpness"].max() < 0.5, "empty slots take a share"
    model = build_model(num_slots=24)
    for memory in model.memories:
        logits = (
            torch.eye(3)[PUSH if memory.layer == 0 else 2].double().sub(1).mul(-IMPOSSIBLE_LOGIT).expand(2, 6, 2, 3)
        )
        memory.project = lambda h, x=memory.project_down, logits=logits: (x(h), logits)
    values = [recording.values for recording in record(model)]
    assert [torch.cat([v[n] for v in values]).unique().item() for n in ("occupancy", "read_slot")] == [1, 0]
    overflow = [r.values["overflow"].mean().item() for r in record(build_model(num_slots=2, discipline="push_only"))]
    assert overflow == pytest.approx([0, 0, 1]), "the mass pushed past the last slot"


@pytest.mark.parametrize("residual_gate", ["hidden", "read"])
def test_the_share_of_a_single_head_is_that_of_its_memory(residual_gate):
    model = build_model(num_heads=1, residual_gate=residual_gate)
    for memory in model.memories:
        torch.nn.init.constant_(memory.gate, 0.5)
    expected = model(TOKENS, probe=True).probes
    for recording, probes in zip(record(model), expected, strict=True):
        assert recording.values["read_share"].mean().item() == pytest.approx(probes["read_share"].item(), rel=1e-5)


def get_change(model, intervention):
    before, counts = compute_losses(model, BATCHES)
    with intervene(model, intervention):
        after, _ = compute_losses(model, BATCHES)
    assert counts.tolist() == [5, 3], "padding is not scored"
    again, _ = compute_losses(model, BATCHES)
    assert (again == before).all(), "the model is as before"
    return after - before


def find(model, name):
    return next(i for i in list_interventions(model, BATCHES, heads=True) if i.name == name)


def compute_changed(change, **memory):
    """Return the change of the loss when `change` modifies the weights of each memory."""
    model = build_model(**memory)
    before, _ = compute_losses(model, BATCHES)
    for stack in model.memories:
        with torch.no_grad():
            change(stack)
    after, _ = compute_losses(model, BATCHES)
    return after - before


def test_dropped_reads_equal_a_memory_without_output():
    model = build_model()
    change = get_change(model, find(model, "reads dropped"))
    assert abs(change).min() > 1e-6
    assert change == pytest.approx(compute_changed(lambda stack: stack.up.zero_()), abs=1e-12)
    first = get_change(model, find(model, "read of layer 0 dropped"))
    assert first == pytest.approx(compute_changed(lambda s: s.up.zero_() if s.layer == 0 else None), abs=1e-12)
    head = get_change(model, find(model, "read of layer 1, head 1 dropped"))
    assert head == pytest.approx(compute_changed(lambda s: s.up[:, 3:].zero_() if s.layer == 1 else None), abs=1e-12)


@pytest.mark.parametrize("kind", [AttentionResidualConfig, ValueSkipConfig, HyperConnectionsConfig])
def test_a_memory_with_its_output_dropped_is_the_plain_transformer(kind):
    """The backbone is drawn first, so the seed gives the same with and without a memory."""
    torch.manual_seed(0)
    plain = Transformer(replace(build_model().config, memory=None)).double()
    torch.manual_seed(0)
    model = Transformer(replace(build_model().config, memory=kind())).double()
    with torch.no_grad():
        for memory in model.memories:
            for parameter in memory.parameters():
                parameter.normal_()
    change = measure_summary(model, BATCHES)
    losses, counts = compute_losses(model, BATCHES)
    dropped, _ = compute_losses(plain, BATCHES)
    assert change == {"dropped output": pytest.approx((dropped - losses).sum() / counts.sum(), abs=1e-12)}
    assert abs(change["dropped output"]) > 1e-6


def test_frozen_actions_are_means_over_the_tokens_of_all_batches():
    model, tokens = build_model(), torch.randint(11, (9, 6), generator=torch.Generator().manual_seed(0))
    whole = [{"tokens": tokens, "length": torch.full((9,), 6)}]
    rows = [{"tokens": row[None], "length": torch.tensor([6])} for row in tokens]
    assert measure_summary(model, rows) == pytest.approx(measure_summary(model, whole), abs=1e-9)
    frozen = "actions frozen at their mean"
    change, parts = ({c["intervention"]: c for c in measure_interventions(model, b, False)} for b in (whole, rows))
    assert parts[frozen]["change"] == pytest.approx(change[frozen]["change"], abs=1e-9)
    mixed = [{"tokens": tokens[:1, :3], "length": torch.tensor([3])}, whole[0]]  # strings of two lengths
    (intervention,) = (i for i in list_interventions(model, mixed) if i.name == frozen)
    with record_memories(model) as recordings:
        model(tokens[:1, :3])
        sums = recordings[0].values["push"].sum((0, 1))
        model(tokens)
        sums += recordings[0].values["push"].sum((0, 1))
    logits = intervention.logits(model.memories[0], torch.zeros(1, 1, 2, 3).double())
    torch.testing.assert_close(logits.exp()[0, 0, :, PUSH], (sums / (3 + 54)).double(), rtol=1e-6, atol=0)


def test_positions_without_a_target_do_not_count():
    """Most positions of MQAR have none."""
    task = TASKS["mqar_4"]
    batch = build_string_batch(LengthSet(task, "validate", 64, 2).sample(), task)
    model = make_model(vocab_size=task.vocab_size, output_vocab_size=task.num_answer_symbols)
    losses, counts = compute_losses(model, [batch])
    assert counts.tolist() == [4.0, 4.0]
    with torch.no_grad():
        logits = model(batch["tokens"]).logits[:, -batch["targets"].shape[1] :]
    own = [
        cross_entropy(row[row_targets >= 0], row_targets[row_targets >= 0]).item()
        for row, row_targets in zip(logits, batch["targets"], strict=True)
    ]
    assert losses / counts == pytest.approx(own, rel=1e-6)


def test_forced_actions_equal_push_only_and_hardened_actions_large_logits():
    """A push forced to 1 is the discipline push_only with the same weights."""
    model = build_model()
    change = get_change(model, find(model, "push = 1"))
    other = build_model(discipline="push_only")
    other.load_state_dict({k: v for k, v in model.state_dict().items() if "actions" not in k})
    before, _ = compute_losses(model, BATCHES)
    after, _ = compute_losses(other, BATCHES)
    assert change == pytest.approx(after - before, abs=1e-12)
    change = get_change(model, find(model, "actions hardened"))
    assert change == pytest.approx(compute_changed(lambda stack: stack.actions.mul_(1e9)), abs=1e-9)


def test_frozen_actions_are_the_same_for_all_tokens():
    model = build_model()
    intervention = find(model, "actions frozen at their mean")
    mean = record(model)[0].values["push"].mean((0, 1))
    with intervene(model, intervention), record_memories(model):
        pass
    with record_memories(model) as recordings, intervene(model, intervention):
        model(TOKENS)
    frozen = recordings[0].values["push"]
    torch.testing.assert_close(frozen, mean.expand_as(frozen))


def test_a_cleared_stack_reads_only_later_pushes():
    model = build_model(num_slots=4)
    with record_memories(model) as recordings, intervene(model, find(model, "stack cleared before layer 2")):
        model(TOKENS)
    push = recordings[2].values["push"]
    torch.testing.assert_close(recordings[2].values["occupancy"], push)
    assert abs(get_change(model, Intervention("x", state=lambda _, state: clear(state), layer=2))).min() > 0


def test_only_independent_strings_have_intervals_over_few_sequences():
    model = build_model()
    chunks = measure_interventions(model, BATCHES, heads=False)
    assert all(change["low"] is None and change["high"] is None for change in chunks[1:])
    assert format_changes(chunks).count("too few chunks") == len(chunks) - 1
    strings = measure_interventions(model, [{"tokens": TOKENS, "targets": TOKENS[:, -2:]}], heads=False)
    assert all(change["low"] <= change["change"] <= change["high"] for change in strings[1:])


def test_interventions_depend_on_the_memory():
    """push_only has no actions. With feedback, actions are only forced, and a dropped read is still fed back."""
    names = {}
    for memory in ({"discipline": "push_only"}, {"axis": "time", "feedback": True}):
        model = build_model(**memory)
        names[next(iter(memory))] = [i.name for i in list_interventions(model, BATCHES, heads=True)]
    assert not any("push" in name or "actions" in name for name in names["discipline"])
    assert "reads dropped" in names["discipline"]
    assert "push = 0" in names["axis"]
    assert not any("actions" in name for name in names["axis"])
    assert all(name.endswith(", but fed back") for name in names["axis"] if "dropped" in name)


def build_residual_stack(**options):
    torch.manual_seed(0)
    config = decoder_config(num_layers=3)
    config.memory = ResidualStackConfig(num_slots=3, **options)
    model = Transformer(config).double().eval()
    for memory in model.memories:
        for parameter in memory.parameters():
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("update", ["stack", "none"])
def test_recordings_of_a_residual_stack_agree_with_the_probes(update):
    model = build_residual_stack(update=update)
    expected = model(TOKENS, probe=True)
    with record_memories(model) as recordings:
        torch.testing.assert_close(model(TOKENS).logits, expected.logits)
    for recording, probes in zip(recordings, expected.probes, strict=True):
        assert {name: value.shape for name, value in recording.values.items()} == dict.fromkeys(MEASUREMENTS, (2, 6, 1))
        means = average_values([recording.values])
        for name in ("push", "pop", "no_op", "action_spread", "read_share") if update == "stack" else ("read_share",):
            assert means[name].item() == pytest.approx(probes[name].item(), rel=1e-5)
        total = sum(recording.values[action] for action in ACTIONS)
        torch.testing.assert_close(total, torch.ones_like(total))


def test_measurements_of_residual_streams_are_on_one_device():
    output = ResidualStackOutput(torch.empty(1, 2, 3, device="meta"), None)
    values = _measure_residual_stack(output, torch.empty(1, 2, 3, 4, device="meta"))
    assert {value.device.type for value in values.values()} == {"meta"}


def never_push(memory):
    memory.actions[0], memory.action_bias[0] = 0, -1e4


def ignore_lower_slots(memory):
    memory.read[1:], memory.maps[-2:] = 0, 0


@pytest.mark.parametrize(
    ("name", "change_weights", "layers"),
    [
        ("push = 0", never_push, (0, 1, 2)),
        ("reads dropped", ignore_lower_slots, (0, 1, 2)),
        ("read of layer 1 dropped", ignore_lower_slots, (1,)),
    ],
)
def test_interventions_on_a_residual_stack_equal_changed_weights(name, change_weights, layers):
    model = build_residual_stack()
    change = get_change(model, find(model, name))
    before, _ = compute_losses(model, BATCHES)
    with torch.no_grad():
        for memory in model.memories:
            if memory.layer in layers:
                change_weights(memory)
    after, _ = compute_losses(model, BATCHES)
    assert abs(change).min() > 1e-6
    assert change == pytest.approx(after - before, abs=1e-9)


def test_a_cleared_residual_stack_keeps_its_top():
    model = build_residual_stack(update="none")
    slots = torch.randn(1, 2, 3, 4)
    cleared = clear(slots)
    torch.testing.assert_close(cleared[..., 0, :], slots[..., 0, :])
    assert not cleared[..., 1:, :].any()
    assert abs(get_change(model, find(model, "stack cleared before layer 2"))).min() > 1e-6
    names = [i.name for i in list_interventions(model, BATCHES, heads=True)]
    assert not any("push" in name or "actions" in name or "head" in name for name in names)


def test_heads_require_several_heads():
    check_heads(build_model())
    for model, found in (
        (build_residual_stack(), "ResidualStack has no heads"),
        (build_model(num_heads=1), "the stacks have one head"),
    ):
        with pytest.raises(ConfigError, match=f"^inspect: --heads: {found}; omit --heads$"):
            check_heads(model)


def test_losses_are_those_of_the_tokens():
    model = build_model()
    losses, counts = compute_losses(model, [{"tokens": TOKENS[:1], "length": torch.tensor([6])}])
    log_p = model(TOKENS[:1]).logits.log_softmax(-1)[0, :-1]
    assert losses[0] == pytest.approx(-log_p[torch.arange(5), TOKENS[0, 1:]].sum().item(), rel=1e-6)
    assert counts[0] == 5


ODD_TOKENS = ["</script><b>", "<!--<script>", '"', "\u2028", "é", "x"]


def test_a_text_gets_the_tokens_of_training_without_special_ones():
    """Training data is encoded without the <s> that a post-processor adds."""
    tokenizer = train_tokenizer(["a b c"], 300)
    ids = tokenizer.encode("a b").ids
    tokenizer.add_special_tokens(["<s>"])
    start = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[start])
    data = SimpleNamespace(objective="language_modeling", context_length=8)
    inputs = open_text(SimpleNamespace(tokenizer=tokenizer, config=SimpleNamespace(data=data)), "a b")
    assert inputs.batches[0]["tokens"].tolist() == [ids]
    assert "".join(inputs.labels) == "a b"


def test_measurements_with_and_without_heads_share_a_page_and_means():
    """A plugin may report some per head and some per token; its `push` may be a norm above 1."""
    values = {"push": torch.full((1, 2, 1), 3.0), "mine": torch.arange(4.0).reshape(1, 2, 2)}
    recording = Recording(0, "after_block", {"push": "its norm", "mine": "another"})
    for token in range(2):
        recording.add({"push": values["push"][:, token : token + 1]})
        recording.add({"mine": values["mine"][:, token : token + 1]})
    torch.testing.assert_close(recording.values, values)
    page = format_page("text", ["a", "b"], [recording])
    (stack,) = json.loads(page.partition("const data = ")[2].partition(";\n")[0])["stacks"]
    assert stack["values"] == {"push": [[3, 3], [3, 3]], "mine": [[0, 1], [2, 3]]}
    means = replace(recording, values=average_values([recording.values]))
    assert draw_maps([means]).axes[0].images[0].get_clim() == (0, 3)


def test_page_embeds_any_token():
    page = format_page("a <b> & {DATA}", ODD_TOKENS, record(build_model()))
    assert page.count("</script>") == page.count("<script>") == 1
    assert "<!--" not in page
    assert "<title>Stacks: a &lt;b&gt; &amp; {DATA}</title>" in page
    data = json.loads(page.partition("const data = ")[2].partition(";\n")[0])
    assert data["tokens"] == ODD_TOKENS
    assert [len(stack["values"]["push"]) for stack in data["stacks"]] == [6, 6, 6]
    assert sum(data["stacks"][0]["values"][action][0][0] for action in ACTIONS) == pytest.approx(1, abs=1e-3)


@pytest.mark.process
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_page_shows_every_token_in_a_browser(tmp_path):
    (tmp_path / "tokens.html").write_text(format_page("text", ODD_TOKENS, record(build_model())), encoding="utf-8")
    with Browser(tmp_path / "profile") as browser:
        browser.open((tmp_path / "tokens.html").as_uri())
        assert poll(lambda: browser.evaluate("document.querySelectorAll('#text span').length"), 6, seconds=10) == 6
        shown = "JSON.stringify([...document.querySelectorAll('#text span')].map(span => span.textContent))"
        assert json.loads(browser.evaluate(shown)) == ODD_TOKENS


def test_maps_label_each_row_with_its_layer():
    values = {name: torch.full((2,), 0.5) for name in MEASUREMENTS}
    sites = [(layer, site) for layer in range(2) for site in ("after_attention", "after_block")]
    figure = draw_maps([Recording(layer, site, values=values) for layer, site in sites])
    figure.draw_without_rendering()
    assert figure.axes[0].get_ylabel() == "layer"
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["0, after_attention", "0", "1, after_attention", "1"]
