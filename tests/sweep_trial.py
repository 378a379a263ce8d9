"""A fast trial for tests of drivers: holds its folder, saves when stopped and resumes, like fit.

`python sweep_trial.py FOLDER`. `behavior.json` next to the sweep's folder maps the start of a trial's name to the
seconds it takes (for 10 steps), its validation loss, and what its first attempts do instead: "error", "kill" or "save".
Each attempt that holds the folder adds a line to `attempts`.
"""

import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path

STEPS = 10
folder = Path(sys.argv[1])
if (folder / "result.json").exists():
    sys.exit(0)
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
lock = open(folder / ".lock", "w")  # noqa: SIM115
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit(74)
behaviors = json.loads((folder.parent.parent / "behavior.json").read_text())
behavior = next((b for name, b in behaviors.items() if folder.name.startswith(name)), {})
with open(folder / "attempts", "a") as file:
    file.write(f"{os.getpid()}\n")
attempt = len((folder / "attempts").read_text().splitlines())
metrics = folder / "metrics.jsonl"
done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
print(f"from step {done}", flush=True)
instead = (behavior.get("first", []) + [None] * attempt)[attempt - 1]
for step in range(done + 1, STEPS + 1):
    time.sleep(behavior.get("seconds", 0.1) / STEPS)
    line = {"step": step, "tokens": step, "time": time.time(), "train/loss": 5 - step / 10}
    line |= {"val/loss/average": behavior.get("loss", 4.0), "train/tokens_per_second": 2560.0}
    with open(metrics, "a") as file:
        file.write(json.dumps(line) + "\n")
    if step == done + 2 and instead == "error":
        sys.exit("error: non-finite loss in batch 3")
    if step == done + 2 and instead == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if stopped or (step == done + 2 and instead == "save"):
        sys.exit(75)
result = {"steps": STEPS, "parameters": 1000, "memory_parameters": 10, "train_loss": {"last_20_steps": 4.0}}
result["average"] = {"loss": behavior.get("loss", 4.0)}
(folder / ".result").write_text(json.dumps(result))
os.replace(folder / ".result", folder / "result.json")  # atomic: drivers read it at any time
