"""Optimizers with their parameter groups, learning rate schedules, and the average of the weights."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stackexp.config.experiment import AdamWConfig, MuonConfig, ScheduleConfig
from stackexp.errors import RunError
from stackexp.stack import widen


def build_adamw(config: AdamWConfig, model: nn.Module) -> torch.optim.AdamW:
    """Build AdamW with two groups: matrices decay; embeddings, norms, biases, gates and other scalars do not.

    With `memory_lr`, the parameters of memories form two more groups.
    """
    groups = group_parameters(config, model, [p for p in model.parameters() if p.requires_grad])
    return _build_adamw(config, groups)


def build_muon(config: MuonConfig, model: nn.Module) -> "MuonAdamW":
    """Build Muon for the matrices between embedding and output projection, and AdamW for everything else.

    Matrices of memories count if they map from hidden states or to one (`Memory.fans`); a single row or column is a
    vector. Raises RunError if a memory does not state the fans of its weights, or if a layer has a matrix that is not
    the weight of an nn.Linear, as recurrent models do.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    fans = _find_fans(model, is_required=True)
    excluded = _find_undecayed(model)
    matrices = {
        p
        for p in parameters
        if p.ndim == 2 and min(p.shape) > 1 and fans.get(p) in MUON_EXPONENTS and p not in excluded
    }
    for i, layer in enumerate(getattr(model, "layers", ())):
        for name, p in layer.named_parameters():
            if p.requires_grad and p.ndim == 2 and min(p.shape) > 1 and p not in fans:
                raise RunError(f"optimizer.kind: muon: layers.{i}.{name} is no weight of an nn.Linear; use adamw")
    if not matrices:
        raise RunError("optimizer.kind: muon: the model has no matrix between embedding and output; use adamw")
    others = [p for p in parameters if p not in matrices]
    muon = torch.optim.Muon(
        group_parameters(config, model, [p for p in parameters if p in matrices], MUON_EXPONENTS),
        lr=config.lr,
        momentum=config.momentum,
        adjust_lr_fn="match_rms_adamw",  # updates as large as AdamW's, so that lr and weight_decay keep their meaning
    )
    return MuonAdamW(muon, _build_adamw(config, group_parameters(config, model, others)))


# With muP, the learning rate of a weight is proportional to d^-e. These are the exponents e by fan; others have 0.
ADAMW_EXPONENTS = {"in": 1.0, "both": 1.0, "vectors": 1.0}
MUON_EXPONENTS = {"in": 1.0, "both": 0.5, "out": 0.0}
"""The exponents of Muon.

An update [m, n] should change each output equally at every d. An update of AdamW and an input of n elements of size 1
change an output in proportion to n. One of Muon has the spectral norm 0.2 sqrt(max(m, n)), and the input the norm
sqrt(n), so it changes an output in proportion to sqrt(max(m, n) n / m).
"""


def group_parameters(
    config: AdamWConfig,
    model: nn.Module,
    parameters: list[nn.Parameter],
    exponents: Mapping[str, float] = ADAMW_EXPONENTS,
) -> list[dict[str, Any]]:
    """Return one group for each pair of learning rate and weight decay.

    With muP, the learning rate of a weight is lr (mup_base_size / d)^exponent, with the exponent of its fan.
    """
    options = getattr(model, "config", None)
    base = getattr(options, "mup_base_size", None)
    width_scale = 1.0 if options is None or base is None else base / options.hidden_size
    fans = _find_fans(model, is_required=base is not None)
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    undecayed = embeddings | _find_undecayed(model)
    in_memories = {p for memory in getattr(model, "memories", ()) for p in memory.parameters()}
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for p in parameters:
        lr = config.memory_lr if config.memory_lr and p in in_memories else config.lr
        lr *= width_scale ** exponents.get(fans.get(p, "none"), 0.0)
        decay = config.weight_decay if p.ndim >= 2 and p not in undecayed else 0.0
        groups.setdefault((lr, decay), []).append(p)
    return [{"params": members, "lr": lr, "weight_decay": decay} for (lr, decay), members in groups.items()]


def _find_fans(model: nn.Module, is_required: bool) -> dict[Tensor, str]:
    """Return the fan of each weight between embedding and output projection; see `memories.base.Fan`.

    Raises RunError if a memory does not state that of a weight and it `is_required`.
    """
    fans: dict[Tensor, str] = {}
    for memory in getattr(model, "memories", ()):
        for name, parameter in memory.named_parameters():
            if name in memory.fans:
                fans[parameter] = memory.fans[name]
            elif parameter.ndim > 1 and is_required:
                raise RunError(
                    f"{type(memory).__name__}: muP and Muon require the fan of {name} {list(parameter.shape)}; add it "
                    "to the class attribute `fans`, see stackexp/models/memories/base.py"
                )
    in_memories = {p for memory in getattr(model, "memories", ()) for p in memory.parameters()}
    linears = {m.weight for layer in getattr(model, "layers", ()) for m in layer.modules() if isinstance(m, nn.Linear)}
    return fans | dict.fromkeys(linears - in_memories, "both")


def _find_undecayed(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that memories name in `no_decay`, without those that an option removed (None).

    Raises RunError for another name.
    """
    found = set()
    for memory in getattr(model, "memories", ()):
        parameters = dict(memory.named_parameters())
        for name in memory.no_decay:
            if name in parameters:
                found.add(parameters[name])
            elif getattr(memory, name, "") is not None:
                raise RunError(f"{type(memory).__name__}.no_decay: the memory has no parameter {name}")
    return found


def _build_adamw(config: AdamWConfig, groups: list[dict[str, Any]]) -> torch.optim.AdamW:
    has_fused_kernel = all(p.device.type in ("cpu", "cuda") for group in groups for p in group["params"])
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=has_fused_kernel)


class MuonAdamW(torch.optim.Optimizer):
    """Muon for some parameter groups and AdamW for the others, as one optimizer with one state."""

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW) -> None:
        self._muon, self._adamw = muon, adamw
        self._num_muon_groups = len(muon.param_groups)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Make both optimizers use the groups and the state of this one."""
        self._muon.param_groups = self.param_groups[: self._num_muon_groups]
        self._adamw.param_groups = self.param_groups[self._num_muon_groups :]
        self._muon.state = self._adamw.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the groups and the state of both."""
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Tensor | None:
        """Update all parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._muon.step()
        self._adamw.step()
        return loss


# Schedules: the factor of the learning rate at a step, counted from 1

DECAYS: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "one_minus_sqrt": lambda progress: 1 - math.sqrt(progress),
}


def build_schedule(config: ScheduleConfig, max_steps: int) -> Callable[[int], float]:
    """Build linear warmup from 0 to 1, then a constant 1, then a decay over the last steps.

    The decay is final_fraction + (1 - final_fraction) * shape, with a shape of DECAYS and a progress from 0 to 1.
    """
    decay_steps, shape = config.count_decay_steps(max_steps), DECAYS[getattr(config, "decay", config.kind)]

    def compute_factor(step: int) -> float:
        if step < config.warmup_steps:
            return step / config.warmup_steps
        if step <= max_steps - decay_steps or decay_steps == 0:  # Lightning also asks for step max_steps + 1
            return 1.0
        progress = min(1.0, (step - (max_steps - decay_steps)) / decay_steps)
        return config.final_fraction + (1 - config.final_fraction) * shape(progress)

    return compute_factor


class WeightAverage:
    """The exponential moving average (EMA) of a model's weights, in float32 or wider.

    After step n the average becomes d x average + (1 - d) x weights, with d = min(decay, (1 + n) / (10 + n)), the
    schedule of TensorFlow's ExponentialMovingAverage: early averages do not keep the initial weights for long. Each
    rank averages its own shards.

    Attributes:
        tensors: The averages by weight name, sharded like the weights. Checkpoints save and load them in place.
    """

    def __init__(self, model: nn.Module, decay: float):
        self._model, self._decay = model, decay
        self.tensors = {name: widen(weight.detach()).clone() for name, weight in model.state_dict().items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Include the weights after optimizer step `step`, counted from 1."""
        decay = min(self._decay, (1 + step) / (10 + step))
        weights = self._model.state_dict()
        averages = [_get_local(average) for average in self.tensors.values()]
        torch._foreach_lerp_(averages, [widen(_get_local(weights[name]).detach()) for name in self.tensors], 1 - decay)


def _get_local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
