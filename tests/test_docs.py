"""The commands in README.md, docs/ and messages parse, and the configs they name compose."""

import ast
import itertools
import json
import re
import shlex
import shutil
import signal
from pathlib import Path

import pytest
from benchmark_files import write_datasets
from config_files import build_sweep, finish_trial
from processes import ENDLESS, Program, kill, read_to_end, wait_until
from records import has_checkpoint, only_run

from stackexp import cli
from stackexp.config.compose import compose
from stackexp.data.olmo import NAMES
from stackexp.data.token_files import get_record_path
from stackexp.reports.publish import update_document
from stackexp.sweeps.sweep import load_sweep
from stackexp.verbs.dispatch import find_verb, load_verb

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PREFIX = "python -m stackexp "
SHOWN_MISTAKE = "model.memory.num_slot=8"


def find_commands(page: Path) -> list[list[str]]:
    """Return the argument lists of all complete stackexp commands of a page."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.partition(PREFIX)[2] for line in text.splitlines() if PREFIX in line]
    cells = [cell for line in text.splitlines() if line.startswith("|") for cell in re.findall(r"`([^`]+)`", line)]
    verbs = {name.split()[0] for name in cli.VERBS}
    lines += [cell for cell in cells if " " in cell and cell.split()[0] in verbs and cell not in cli.VERBS]
    lines = [line.replace("$SLURM_ARRAY_TASK_ID", "1") for line in lines]
    commands = [shlex.split(re.split(r"`| && |; do|; \w+$|\|| -->", line)[0], comments=True) for line in lines]
    return [command for command in commands if command and not {"VERB", "...", "$v"} & set(command)]


COMMANDS = [(page.name, command) for page in PAGES for command in find_commands(page)]


def test_the_tables_of_the_results_are_current(monkeypatch, tmp_path):
    """If this fails: python -m stackexp report all --update docs/results.md."""
    monkeypatch.chdir(ROOT)
    page = ROOT / "docs" / "results.md"
    copy = tmp_path / "results.md"
    copy.write_bytes(page.read_bytes())
    assert update_document(copy)
    assert copy.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")


def test_commands_are_found():
    assert len(COMMANDS) > 60


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=lambda value: " ".join(value) if value else None)
def test_command_parses_and_its_config_composes(page, command, monkeypatch):
    monkeypatch.chdir(ROOT)
    name = find_verb(command, cli.VERBS)
    arguments = command[len(name.split()) :]
    if arguments == ["--help"]:
        return
    args = load_verb(name)[1].parse(arguments)
    configs = getattr(args, "config", None) or []
    is_placeholder = re.compile(r"[A-Z]{2,}|\.yaml$")
    if SHOWN_MISTAKE in args.overrides or any(is_placeholder.search(word) for word in [*configs, *args.overrides]):
        return
    if isinstance(configs, list) and configs and name in ("fit", "plan"):
        assert compose(configs, args.overrides)


def find_messages(path: Path) -> list[str]:
    """Return the strings of a source file, with X for each value that is filled in."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    filled = [node for node in nodes if isinstance(node, ast.JoinedStr)]
    parts = {id(part) for node in filled for part in ast.walk(node)}
    texts = [
        "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values) for node in filled
    ]
    plain = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in parts]
    return [*texts, *plain]


@pytest.mark.parametrize("folder", ["export", "models", "planning", "reports", "sweeps", "verbs"])
def test_commands_in_messages_parse(folder):
    for path in sorted((ROOT / "stackexp" / folder).rglob("*.py")):
        for text in find_messages(path):
            for found in re.findall(rf"{PREFIX}([a-z][^`;)\n]*)", text):
                command = shlex.split(found)
                if "[" not in found and {"--help", "..."}.isdisjoint(command):
                    name = find_verb(command, cli.VERBS)
                    assert name in cli.VERBS, f"{path}: {found}"
                    load_verb(name)[1].parse(command[len(name.split()) :])  # raises an error for an invalid one


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_point_to_files(page):
    targets = re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)", page.read_text(encoding="utf-8"))
    for target, heading in targets:
        file = page.parent / target if target else page
        assert file.exists(), target
        assert not heading or heading in list_anchors(file), f"{target}#{heading}"


def list_anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of the headings of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", "\n".join(re.findall(r"^#+ (.+)$", text, re.MULTILINE)))
    return set(re.sub(r"[^\w\- \n]", "", headings.lower()).replace(" ", "-").split("\n"))


def test_the_example_config_for_own_text_composes(tmp_path):
    text = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(# mine.yaml.*?)```", text, flags=re.DOTALL)
    path = tmp_path / "mine.yaml"
    path.write_text(block)
    config = compose([str(path)])
    assert config.data.validation == {"held-out": "texts/held-out"}
    assert config.model.vocab_size == 8192
    assert config.trainer == compose(["quickstart"]).trainer


def test_the_files_of_olmos_sets_are_named():
    text = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    files = [Path(name) for name in re.findall(r"`data/olmo/(v\d/\w+\.npy)`", text)]
    assert files
    assert all(file.stem in NAMES[file.parent.name] for file in files)
    assert all(f"`data/olmo/{get_record_path(file)}`" in text for file in files)


def test_the_example_sweeps_load(empty_folder):
    text = (ROOT / "docs/sweeps.md").read_text(encoding="utf-8")
    found = {name: block for block, name in re.findall(r"```yaml\n(# (\S+\.yaml): .*?)```", text, flags=re.DOTALL)}
    assert list(found) == ["stack-grid.yaml", "grid.yaml", "search.yaml"]
    for name, block in found.items():
        Path(name).write_text(block)
    assert [len(load_sweep(name).trials) for name in found] == [6, 4, 0]


# Printed output. The command is in the first line of a block, `$ python -m stackexp ...`, or before the block.

BLOCK = re.compile(
    rf"(?:^    {PREFIX}(?P<before>.*)\n\n(?:[^`\n].*\n)*\n?)?```text\n(?P<text>(?:.*\n)*?)```", re.MULTILINE
)


def find_blocks(page: Path) -> dict[str, list[str]]:
    """Return the printed lines of each block of a page by its command."""
    blocks = {}
    for match in BLOCK.finditer(page.read_text(encoding="utf-8")):
        lines = match["text"].splitlines()
        command = lines.pop(0).partition(PREFIX)[2] if lines[0].startswith(f"$ {PREFIX}") else match["before"] or ""
        blocks[command] = lines
    return blocks


def run(command: str, capsys, code: int = 0) -> list[str]:
    """Run a command and return what it prints, standard output or for an error standard error."""
    capsys.readouterr()
    assert cli.main(shlex.split(command)) == code
    printed = capsys.readouterr()
    return (printed.err if code else printed.out).splitlines()


def assert_printed(expected: list[str], printed: list[str]) -> None:
    """Check that the expected lines are printed in this order; other lines may come between."""
    found = iter(printed)
    assert [line for line in expected if line not in ("", "...") and line not in found] == []


@pytest.mark.parametrize(
    ("page", "start", "code"),
    [
        ("README.md", "fit --config quickstart model.memory.num_slot=8", 2),
        ("docs/cluster.md", "plan ", 0),
        ("docs/data.md", "plan ", 0),
        ("docs/memories.md", "match ", 0),
        ("docs/reports.md", "report ablation ", 0),
    ],
)
@pytest.mark.process
def test_printed_output_is_current(page, start, code, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    (command, expected), *_ = [item for item in find_blocks(ROOT / page).items() if item[0].startswith(start)]
    assert_printed(expected, run(command, capsys, code))


@pytest.mark.process
def test_the_printed_import_is_current(capsys, monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/pretrained.md").read_text(encoding="utf-8")
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], {})
    blocks = find_blocks(ROOT / "docs/pretrained.md")
    commands = [command for command in blocks if command.startswith("checkpoint import")]
    assert len(commands) == 2
    for command in commands:
        assert_printed(blocks[command], run(command, capsys, int("error:" in blocks[command][0])))


def find_headers(lines: list[str]) -> list[list[str]]:
    """Return the words of each line above a line of dashes, the header of a table."""
    pairs = itertools.pairwise(lines)
    return [line.split() for line, rule in pairs if rule.startswith("--") and line and line[0] not in "- "]


@pytest.mark.process
def test_printed_tables_of_runs_have_current_columns(trained, capsys, tmp_path):
    """The blocks show larger runs, whose values CI cannot repeat."""
    shown = {
        "README.md": ("", f"validate --run {trained}"),
        "docs/data.md": ("validate --run runs/quickstart/ID --sets mine=texts/", f"validate --run {trained}"),
        "docs/memories.md": ("inspect --run RUN --set stdlib-asyncio", f"inspect --run {trained} --set left"),
        "docs/runs.md": ("runs list", f"runs list {trained.parent}"),
        "docs/export.md": ("checkpoint export ", f"checkpoint export --run {trained} --to {tmp_path}/my-model"),
    }
    for page, (start, command) in shown.items():
        expected = next(lines for key, lines in find_blocks(ROOT / page).items() if key.startswith(start))
        printed = run(command, capsys)
        if page == "docs/export.md":
            assert [line for line in expected if line[0] == " "] == [line for line in printed if line[0] == " "]
        else:
            assert find_headers(expected)[0] == find_headers(printed)[0]


def test_printed_statistics_of_a_set_have_current_rows(corpus, capsys):
    def list_labels(lines: list[str]) -> list[str]:
        return [line.split("  ")[1].strip() for line in itertools.takewhile(str.strip, lines[1:])]

    shown = find_blocks(ROOT / "docs/data.md")["data inspect ~/.cache/stackexp/stdlib-ID/train"]
    assert list_labels(shown) == list_labels(run(f"data inspect {corpus['train']}", capsys))


def test_the_example_of_many_runs_prints_its_output(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs/python-api.md").read_text(encoding="utf-8")
    code, printed = re.search(
        r"```python\n(runs = stackexp.load_runs.*?)```\n\n```\n(.*?)```", text, re.DOTALL
    ).groups()
    exec(f"import stackexp\n{code}", {})
    assert capsys.readouterr().out == printed


def mask(line: str) -> str:
    """Return a line with # in place of each number, run ID and path of a run."""
    line = re.sub(r"\S*/\d{8}-\d{6}-[0-9a-f]{4}", "RUN", line)
    return re.sub(r"\d[\d,]*(\.\d+)?", "#", line)


def assert_same_shape(expected: list[str], printed: list[str]) -> None:
    assert_printed([*map(mask, expected)], [*map(mask, printed)])


def test_the_printed_results_of_a_sweep_have_current_columns(empty_folder, capsys):
    sweep = build_sweep(grid={"model.memory.num_heads": [1, 2]})
    for trial in sweep.trials:
        finish_trial(trial, 3.0, bigrams={"sets": {}, "average": {"loss": 4.0}}, tokens=1024)
    shown = find_blocks(ROOT / "docs/sweeps.md")["sweep results quick_grid"]
    printed = run("sweep results study.yaml", capsys)
    assert find_headers(shown) == find_headers(printed)
    (ours,), (theirs,) = ([line.split() for line in lines if line[:6] == "bigram"] for lines in (shown, printed))
    assert ours == [*theirs[:2], "5.9244", *theirs[3:]]
    assert shown[-2:] == printed[-2:]


def test_the_printed_preparation_has_the_lines_of_today(tmp_path, capsys, corpus):
    texts = [{"text": "a few words " * 40, "int_score": score, "language": "en"} for score in (2, 3, 4, 5)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in texts))
    blocks = find_blocks(ROOT / "docs/data.md")
    (command,) = (command for command in blocks if command.startswith("data prepare fineweb-edu/"))
    command = command.replace("fineweb-edu/ --to data/", f"{tmp_path}/a.jsonl --to {tmp_path}/").replace(
        "tokenizer.json", f"{corpus['train']}/tokenizer.json --context-length 32"
    )
    printed = [line.replace(f"{tmp_path}/", "data/") for line in run(command, capsys)]
    assert_same_shape(blocks[next(c for c in blocks if c.startswith("data prepare fineweb-edu/"))], printed)


@pytest.mark.process
def test_the_printed_stop_and_resume_have_current_lines(tiny, tmp_path):
    """The block on the page has both commands. SIGTERM stops the run after its first checkpoint."""
    text = (ROOT / "docs/runs.md").read_text(encoding="utf-8")
    shown = re.search(r"```text\n(\$ .*?)```", text, re.DOTALL)[1].splitlines()
    process = Program(tmp_path).start("fit", "--config", tiny, *ENDLESS)
    wait_until(lambda: has_checkpoint(tmp_path / "runs"), process)
    process.send_signal(signal.SIGTERM)
    output, _ = read_to_end(process, expect=75)
    assert_same_shape([line for line in shown if "SIGTERM" in line], output.splitlines())
    resumed = Program(tmp_path).start("fit", "--run", only_run(tmp_path / "runs").path)
    wait_until(lambda: (tmp_path / "runs").exists(), resumed)
    assert mask(next(line for line in resumed.stdout if line.startswith("run folder"))) in map(
        mask, (f"{line}\n" for line in shown)
    )
    kill(resumed)


@pytest.mark.process
def test_the_printed_scores_of_benchmarks_have_current_columns(trained, tmp_path, capsys):
    blocks = find_blocks(ROOT / "docs/benchmarks.md")
    run_copy = shutil.copytree(trained, tmp_path / "run")
    names = "smollm2_piqa,smollm2_trivia_qa,smollm2_arc_easy"
    printed = run(f"evaluate --run {run_copy} --tasks {names} --datasets {write_datasets(tmp_path / 'd')}", capsys)
    assert find_headers(blocks["evaluate --run RUN --tasks smollm2"])[0] == find_headers(printed)[0]


@pytest.mark.process
def test_the_printed_losses_by_position_have_current_rows(trained, tmp_path, capsys):
    shown = find_blocks(ROOT / "docs/data.md")["validate --run RUN --by_position"]
    copy = shutil.copytree(trained, tmp_path / "20261127-000000-0000")
    printed = run(f"validate --run {copy} --by_position", capsys)
    context = 256 // 32  # the block is of a context of 256 tokens, the fixture of 32
    ranges = [[int(edge) * context for edge in word.split("-")] for word in find_headers(printed)[0][2:]]
    assert [word.split("-")[0] for word in find_headers(shown)[0][2:]] == [str(begin) for begin, _ in ranges]
    assert_same_shape([shown[0], *shown[-2:]], printed)
