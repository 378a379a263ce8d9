"""The program with fake trials: `python sweep_program.py sweep run ...`.

A fake trial holds its folder, saves when stopped and resumes, like fit, but is fast. `behavior.json` in the root of the
sweeps maps the start of a trial's name to the seconds it takes (for 10 steps), its validation loss, that of averaged
weights, speed and host, and what its first attempts do instead: "error" (with the text `error`), "kill" or "save". A
trial with "wait" waits after two steps for the file `go` in the root. Each attempt that holds the folder adds a line to
`attempts`.
"""

import fcntl
import hashlib
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

STEPS = 10


def run_trial(folder: Path) -> int:
    """Run a trial and return the exit code of fit."""
    if (folder / "result.json").exists():
        return 0
    stopped: list[bool] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: stopped.append(True))
    if int(os.environ.get("SLURM_PROCID", 0)):
        return wait_for_first_rank(folder, stopped)
    lock = open(folder / ".lock", "w")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 74
    behaviors = json.loads((folder.parent.parent / "behavior.json").read_text())
    behavior = next((b for name, b in behaviors.items() if folder.name.startswith(name)), {})
    with open(folder / "attempts", "a") as file:
        names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "SLURM_JOB_ID")
        file.write(f"{os.getpid()} {' '.join(os.environ.get(name, '-') for name in names)}\n")
    attempt = len((folder / "attempts").read_text().splitlines())
    (folder / "environment.json").write_text(json.dumps([{"host": behavior.get("host", "a"), "gpus": ["card"]}]))
    metrics = folder / "metrics.jsonl"
    done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
    print(f"from step {done}", flush=True)
    instead = (behavior.get("first", []) + [None] * attempt)[attempt - 1]
    for step in range(done + 1, STEPS + 1):
        time.sleep(behavior.get("seconds", 0.1) / STEPS)
        line = {"step": step, "tokens": step, "time": time.time(), "train/loss": 5 - step / 10}
        line |= {
            "val/loss/average": behavior.get("loss", 4.0),
            "train/tokens_per_second": behavior.get("speed", 2560.0),
        }
        with open(metrics, "a") as file:
            file.write(json.dumps(line) + "\n")
        while step == 2 and behavior.get("wait") and not stopped and not (folder.parent.parent / "go").exists():
            time.sleep(0.05)
        if step == done + 2 and instead == "error":
            print(f"error: {behavior.get('error', 'non-finite loss in batch 3')}", flush=True)
            return 1
        if step == done + 2 and instead == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if (stopped and not behavior.get("stubborn")) or (step == done + 2 and instead == "save"):
            return 75
    steps = int(re.search(r"max_steps: (\d+)", (folder / "config.yaml").read_text())[1])
    result = {"version": 1, "steps": steps, "parameters": 1000, "memory_parameters": 10}
    result |= {"train_loss": {"last_20_steps": 4.0}, "average": {"loss": behavior.get("loss", 4.0)}}
    if "ema" in behavior:
        result["ema"] = {"average": {"loss": behavior["ema"]}}
    result["sha256"] = hashlib.sha256(json.dumps(result).encode()).hexdigest()
    (folder / ".result").write_text(json.dumps(result))
    os.replace(folder / ".result", folder / "result.json")  # atomic: workers read it at any time
    return 0


def wait_for_first_rank(folder: Path, stopped: list[bool]) -> int:
    """Run another process of a trial on several nodes."""
    (folder / f"rank{os.environ['SLURM_PROCID']}").touch()
    while not (folder / "result.json").exists():
        if stopped:
            return 75
        time.sleep(0.05)
    return 0


def main() -> int:
    """Run a verb; the program that it starts is this file."""
    from stackexp import cli
    from stackexp.sweeps import slurm, trials, worker

    trials.PROGRAM[:] = [sys.executable, __file__]
    worker.POLL_SECONDS, worker.RECHECK_SECONDS, worker.GRACE_SECONDS = 0.1, 0.5, 5
    slurm.REQUEUE_SECONDS = 0.5
    return cli.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(run_trial(Path(sys.argv[3])) if sys.argv[1] == "fit" else main())
