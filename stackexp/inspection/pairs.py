"""Measure the interventions of a verdict on the memories of its pairs, once for each run."""

import statistics

from stackexp.evaluation.loading import load_run
from stackexp.files import hold_lock, write_hashed_json
from stackexp.inspection.inspect import load_batches, open_run_data
from stackexp.inspection.interventions import measure_summary
from stackexp.reports.interventions import FILE, VERSION, get_identity, list_unmeasured
from stackexp.sweeps.verdict import Question


def measure_pairs(verdict: Question) -> None:
    """Measure the finished runs of the pairs that have a memory and the checkpoint of their last step.

    A change of the loss is the mean over the validation sets. Other processes wait. Damaged files are written again.
    """
    with hold_lock(verdict.folder / ".interventions.lock", "the interventions"):
        missing = list_unmeasured(verdict)
        if missing:
            print(f"measuring interventions on {len(missing)} runs", flush=True)
        for folder in missing:
            identity = get_identity(verdict, folder)
            run = load_run(folder.path, identity["weights"])
            data = open_run_data(run, None)
            data.eval_limit = identity["chunks"]
            sets = [measure_summary(run.model, load_batches(run, data, opened)) for opened in data.sets("validate")]
            changes = {name: statistics.fmean(values[name] for values in sets) for name in sets[0]}
            write_hashed_json(folder.path / FILE, identity | VERSION | {"changes": changes})
