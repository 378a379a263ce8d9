"""Mistakes on the command line end with exit code 2 and one line, and write nothing."""

import shlex
from pathlib import Path

import pytest

from stackexp import cli

VERBS = ", ".join(dict.fromkeys(name.split()[0] for name in cli.VERBS))
MISTAKES = {
    "fti": "unknown verb 'fti'; did you mean 'fit'?",
    "train --config quickstart": "unknown verb 'train'; did you mean 'fit'?",
    "list": "unknown verb 'list'; did you mean 'configs list' or 'runs list'?",
    "list runs": "unknown verb 'list'; did you mean 'runs list'?",
    "fit --config quick_grid": "quick_grid is a sweep; run it with `sweep run quick_grid`",
    "sweep run quickstart": "quickstart is a config; run it with `fit --config quickstart`",
    "fit --config quickstart --resume": "override --resume: not an option of this verb; see --help",
    "fit --config quickstart seed = 3": "override seed: expected KEY=VALUE, without spaces",
    "plan --config quickstart memory=a": "override memory=a: memory: unknown key; did you mean 'model.memory'?",
    "--config quickstart": f"expected a verb before --config; choose {VERBS}",
    "data prepar": "data: unknown verb 'prepar'; did you mean 'prepare'?",
    "bench efficency": "bench: unknown verb 'efficency'; did you mean 'efficiency'?",
    "fit": "fit: --config NAME_OR_PATH is required; `configs list` shows the names",
    "fit tiny.yaml": "override tiny.yaml: expected KEY=VALUE; for a config write --config tiny.yaml",
    "fit --run nowhere": "fit: --run nowhere: not a run folder (no config.yaml)",
    "fit --conf=quickstart": "fit: unknown option --conf; did you mean '--config'?",
    "fit --config quickstat": "unknown config 'quickstat'; did you mean 'quickstart'?",
    "fit --config quickstart --lr 3": "override --lr 3: lr: unknown key; did you mean 'optimizer.lr'?",
    "fit --config quickstart --run x --ckpt_path last": "fit: --run and --ckpt_path exclude each other",
    "checkpoint average --run x --last 1 --to y": "checkpoint average: argument --last: expected an integer >= 2",
    "checkpoint consolidate --run x --to y.pt": "checkpoint consolidate: --to y.pt: must end in .safetensors",
    "checkpoint consolidate --run x --to /none/y.safetensors": "checkpoint consolidate: --to /none/y.safetensors: the",
    "validate --config quickstart --ckpt_path best": "validate: --ckpt_path best requires --run; give the path of a",
    "validate --config quickstart --ckpt_path x --by_position": "validate: --by_position requires --run",
    "test --config quickstart": "test: --config requires --ckpt_path, the checkpoint to evaluate",
    "generate --run nowhere": "generate: --run nowhere: not a run folder (no config.yaml)",
    "generate --run x --tempature 1": "generate: unknown option --tempature; did you mean '--temperature'?",
    "generate --run x seed=1": "generate: unexpected argument seed=1",
    "generate --run x --temperature -1": "generate: --temperature -1.0: must be 0 (greedy) or a number >= 0.001",
    "generate --run x --top_p 0": "generate: --top_p 0.0: must be a number in (0, 1]",
    f"generate --run x --seed {2**63}": f"generate: --seed {2**63}: must be an integer from 0 to 2^63 - 1",
    "generate --run x --prompt \udcff": "generate: --prompt: not valid UTF-8",  # how Python reads the byte 0xff
    "inspect --run x --text a --heads": "inspect: --heads: a single text has no interval; use --set or --task",
    "inspect --run x --text \udcff": "inspect: --text: not valid UTF-8",
    "match --config quickstart": "match: give --config and --to",
    "match --config formal/lstm --to quickstart": "match: --vary intermediate_size: model.kind lstm has",
    "plan --config quickstart --mfu 2": "plan: --mfu: expected a number above 0, up to 1, found 2.0",
    "plan --config quickstart --device h20": "plan: argument --device: invalid choice: 'h20' (choose from 'a100', ",
    "bench efficiency --only stacktran": "bench efficiency: --only: unknown memory 'stacktran'; did you mean",
    "bench efficiency --out x.txt": "bench efficiency: --out x.txt: must end in .json",
    "bench efficiency --out no/x.json": "bench efficiency: --out no/x.json: the folder no does not exist; create",
    "bench efficiency model.hidden_size=7": "bench efficiency: with model.memory=null: ",
    "bench efficiency --config formal/quick": "bench efficiency: data.kind formal_language has no text; use a config",
    "data prepare a --to b --vocab-size 3": "data prepare: argument --vocab-size: expected an integer >= 300, found 3",
    "data prepare a --to b --vocab-size 300 --config quickstart": "data prepare: has no --config",
    "data prepare a --to b --part 3/2": "data prepare: argument --part: expected I/N with 1 <= I <= N, such as",
    "report ablation x --figure a.xyz": "report ablation: --figure a.xyz: must end in .png, .pdf, .svg",
    "report ablation x --csv no/a.CSV": "report ablation: --csv no/a.CSV: the folder no does not exist; create",
    "evaluate --run '' --tasks piqa": "evaluate: an argument is empty; a shell variable in the command may not be set",
    "validate --run=": "validate: an argument is empty",
    "runs list ''": "runs list: an argument is empty",
    "verdict x.yaml --dry-run --markdown": "verdict: --dry-run prints no tables; omit the options of the report",
    "verdict x.yaml --report --launcher slurm": "verdict: --report starts no runs; omit --launcher and --max-parallel",
    "fit --config quickstart trainer.callbacks=[no.py:A]": "override trainer.callbacks=[no.py:A]: no.py: file",
    "fit --config quickstart 'trainer.compile=\"true\"'": 'override trainer.compile="true": trainer.compile: ex',
    "report ablation . --effect nan": "--effect nan: not a difference in nats",
    "report all": "report all: give either FOLDER or --update FILE.md",
    "report all --update b.md": "report all: b.md: no such file",
    "report all none": "report all: none: no such folder; give a folder of runs",
    "report all . --out a.txt": "report all: --out a.txt: must end in .html",
    "report formal x --csv table.txt": "report formal: --csv table.txt: must end in .csv",
    "data fetch v4": "data fetch: argument v2|v3: invalid choice: 'v4'",
    "data fetch v2 --only pyle": "data fetch: --only pyle: not a set of v2; did you mean 'pile'?",
    "data fetch v2 --mirror no-such-folder": "data fetch: --mirror no-such-folder: no such folder",
    "data fetch v2 --mirror s3://bucket": "data fetch: --mirror s3://bucket: expected http://..., https://...",
    "data fetch v2 --mirror http://me:secret@host/x": "data fetch: --mirror: the URL contains a user name or password",
    "plan --config quickstart --effect 0.01 --runs runs": "plan: --effect plans from --runs and has no --config",
    "plan --device a100 --effect 0.01 --runs runs": "plan: --effect plans from --runs and has no --device; omit it",
    "plan seed=1 --effect 0.01 --runs runs": "plan: --effect plans from --runs and has no seed=1; omit it",
    "plan --config quickstart --baseline wide": "plan: --baseline requires --effect and --runs",
    "checkpoint import --from . --to a.bin": "checkpoint import: --to a.bin: must end in .safetensors",
    "checkpoint import --from . --to a.safetensors seed=4": "checkpoint import: seed=4: an override requires --config",
    "report formal x --score 500": "report formal: argument --score: expected a range of lengths such as 41_500, found",
}


@pytest.mark.parametrize(("command", "message"), MISTAKES.items())
def test_a_mistake_is_one_line(command, message, empty_folder, tmp_path, capture):
    output = capture(*shlex.split(command), expect=2)
    assert output.out == ""
    assert output.err.startswith(f"error: {message}")
    assert output.err.count("\n") == 1
    assert "secret" not in output.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "message"),
    {
        "fit --config my": "unknown config 'my'; did you mean 'my.yaml'?",
        "fit --config runs/a/1": "unknown config 'runs/a/1'; did you mean 'runs/a/1/config.yaml'?",
        "validate --run a": "validate: --run a: not a run folder (no config.yaml); did you mean runs/a/1?",
        "validate --run runs/a": "validate: --run runs/a: not a run folder (no config.yaml); did you mean runs/a/1?",
        "fit --config quickstart --ckpt_path a": "a: no such checkpoint; give a folder in a run's checkpoints/, or",
        "runs show a": "a: not a run folder (no config.yaml); did you mean runs/a/1?",
        "sweep run my.yaml": "my.yaml:1: seed: unknown key; a config has it: use `fit --config FILE`",
        "fit --config my-sweep.yaml": "my-sweep.yaml:1: config: unknown key; a sweep has it: use `sweep run FILE`",
    }.items(),
)
def test_a_wrong_name_suggests_a_file_that_exists(command, message, empty_folder, capsys):
    Path("runs/a/1").mkdir(parents=True)
    for path in "my.yaml", "runs/a/1/config.yaml":
        Path(path).write_text("seed: 1\n")
    Path("my-sweep.yaml").write_text("config: quickstart\n")
    assert cli.main(shlex.split(command)) in (1, 2)
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_an_error_in_a_trial_names_the_trial(invoke):
    error = invoke("sweep run formal/quick --dry-run model.memory.num_slots=4", expect=2)
    assert error.endswith("(trial transformer)")
