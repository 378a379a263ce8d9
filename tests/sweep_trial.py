"""A trial that takes no time, for tests of drivers: holds its folder as fit does, saves when told to, goes on after.

`python sweep_trial.py FOLDER`. `behaviour.json` beside the sweep's folder says, by the beginning of the trial's name,
how many seconds it takes (10 steps) and what its first attempts do instead: "error", "kill" or "save".
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
behaviours = json.loads((folder.parent.parent / "behaviour.json").read_text())
behaviour = next((b for name, b in behaviours.items() if folder.name.startswith(name)), {})
with open(folder / "attempts", "a") as file:
    file.write(f"{os.getpid()}\n")
attempt = len((folder / "attempts").read_text().splitlines())
metrics = folder / "metrics.jsonl"
done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
print(f"from step {done}", flush=True)
instead = (behaviour.get("first", []) + [None] * attempt)[attempt - 1]
for step in range(done + 1, STEPS + 1):
    time.sleep(behaviour.get("seconds", 0.1) / STEPS)
    line = {"step": step, "tokens": step, "time": time.time(), "loss/train": 5 - step / 10}
    line |= {"validation/loss/average": behaviour.get("loss", 4.0), "throughput/tokens_per_second": 2560.0}
    with open(metrics, "a") as file:
        file.write(json.dumps(line) + "\n")
    if step == done + 2 and instead == "error":
        sys.exit("error: non-finite loss in batch 3")
    if step == done + 2 and instead == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if stopped or (step == done + 2 and instead == "save"):
        sys.exit(75)
result = {"steps": STEPS, "parameters": 1000, "memory_parameters": 10, "train_loss": {"last_20_steps": 4.0}}
result["average"] = {"loss": behaviour.get("loss", 4.0)}
(folder / ".result").write_text(json.dumps(result))
os.replace(folder / ".result", folder / "result.json")  # whole or not at all, as fit: drivers read it meanwhile
