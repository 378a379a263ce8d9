"""What 64 ranks would hold, built on one machine: torch's fake process group, the meta device, no weights anywhere."""

import json
import math
import os
import subprocess
import sys

import pytest

from stackexp.config.compose import compose
from stackexp.planning.cost import build_meta_model, make_plan

BUILD = """
import json, sys
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from stackexp.config.compose import compose
from stackexp.planning.cost import build_meta_model
from stackexp.models.sharding import build_mesh, shard_model

def held(tensor):
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return [list(local.shape), local.nbytes]

def rank(number):
    dist.init_process_group("fake", store=FakeStore(), rank=number, world_size=64)
    model = build_meta_model(config)
    shard_model(model, build_mesh("cpu", config.trainer), config.trainer)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    dist.destroy_process_group()
    return {
        "weights": {name: held(p) for name, p in model.named_parameters()},
        "gradients": {name: held(p.grad) for name, p in model.named_parameters()},
        "optimizer": [held(value) for state in optimizer.state.values() for value in state.values()],
    }

config = compose(["pretrain/stacktrans-7b"], sys.argv[1:])
print(json.dumps([rank(0), rank(63)]))
"""


def first_and_last(overrides: list[str]) -> list[dict]:
    """What ranks 0 and 63 hold, from a process of its own: no process group is left behind in this one."""
    command = [sys.executable, "-c", BUILD, *overrides]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


@pytest.mark.parametrize(
    ("strategy", "ranks"), [("fsdp", 64), pytest.param("hsdp", 8, marks=pytest.mark.slow)]
)  # 8 x 8 devices
def test_a_rank_of_64_holds_what_the_plan_says(strategy, ranks):
    overrides = [f"trainer={strategy}", "trainer.num_nodes=8"]
    config = compose(["pretrain/stacktrans-7b"], overrides)
    first, last = first_and_last(overrides)
    whole = {name: list(p.shape) for name, p in build_meta_model(config).named_parameters()}
    assert first["weights"].keys() == last["weights"].keys() == whole.keys()
    for name, shape in whole.items():
        rows = math.ceil(shape[0] / ranks)
        expected = [[rows, *shape[1:]], 4 * math.prod([rows, *shape[1:]])]
        assert first["weights"][name] == first["gradients"][name] == expected, name
        assert last["weights"][name][1] <= expected[1], name
    memory = make_plan(config).training
    assert memory.weights == sum(size for _, size in first["weights"].values())
    assert memory.gradients == sum(size for _, size in first["gradients"].values())
    assert memory.optimizer == sum(size for _, size in first["optimizer"])
    assert sum(math.prod(shape) for shape in whole.values()) == 6_895_710_240
    assert memory.weights == pytest.approx(4 * 6_895_710_240 / ranks, rel=1e-4)


MEASURE = """
import sys
import torch, torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
from stackexp.config.compose import compose
from stackexp.planning import memory_tracker as allocations
from stackexp.planning.cost import build_meta_model
from stackexp.models.cross_entropy import NextTokenLoss
from stackexp.models.sharding import build_mesh, shard_model

config = compose(["pretrain/stacktrans-360m"], sys.argv[1:])
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
mesh, model = build_mesh("cpu", config.trainer), build_meta_model(config)
allocations._fuse_norms(model)
with FakeTensorMode(allow_non_fake_inputs=True):
    shard_model(model, mesh, config.trainer)
    tracker = FSDPMemTracker(model.to_empty(device="cpu"))
    tracker.track_inputs((torch.zeros(1),))
    with tracker:
        for _ in range(2):  # the second with the gradients of the first
            tracker.reset_mod_stats()
            tokens = torch.zeros(config.data.micro_batch_size, config.data.context_length, dtype=torch.int64)
            with torch.autocast("cpu", torch.bfloat16):
                loss = allocations._loss(model, tokens, NextTokenLoss())
            loss.backward()
print(sum(kinds["Total"] for kinds in tracker.get_tracker_snapshot("peak").values()))
"""


@pytest.mark.slow  # the plan of 64 ranks is exact without it
@pytest.mark.parametrize("overrides", [[], ["trainer.activation_checkpointing=true"]])
def test_fsdp_itself_takes_no_more(overrides):
    """torch's own account of the passes of a rank of 4: the plan adds up what is not all held at the same moment."""
    overrides = [
        *("trainer.strategy=fsdp", "trainer.devices=4", "model.num_layers=6"),
        *("data.context_length=1024", "data.micro_batch_size=4", "data.global_batch_tokens=16384", *overrides),
    ]
    memory = make_plan(compose(["pretrain/stacktrans-360m"], overrides)).training
    command = [sys.executable, "-c", MEASURE, *overrides]
    process = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert process.returncode == 0, process.stderr
    measured = int(process.stdout)
    assert measured <= memory.peak - memory.optimizer <= 1.2 * measured
