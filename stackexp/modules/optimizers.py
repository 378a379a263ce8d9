"""Optimizers and their parameter groups."""

from typing import Any

import torch
from torch import Tensor, nn

from stackexp.config.optimizer import AdamWConfig, MuonConfig


def build_adamw(config: AdamWConfig, model: nn.Module) -> torch.optim.AdamW:
    """Build AdamW with two groups: matrices decay; embeddings, norms, biases, gates and other scalars do not.

    With `memory_lr`, the parameters of memories form two more groups.
    """
    groups = group_parameters(config, model, [p for p in model.parameters() if p.requires_grad])
    return _build_adamw(config, groups)


def build_muon(config: MuonConfig, model: nn.Module) -> "MuonAdamW":
    """Build Muon for the matrices between embedding and output projection, and AdamW for everything else.

    Matrices of memories count if they map from hidden states or to one: a query per head is a list of vectors. With
    muP, Muon's learning rates fall as 1/sqrt(d): the spectral norm of an update grows with sqrt(d), not with d as
    AdamW's.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    size = getattr(getattr(model, "config", None), "hidden_size", None)
    excluded = _find_embeddings(model) | _find_named(model, "no_decay")
    excluded |= set(model.head.parameters() if getattr(model, "head", None) else ())
    matrices = {p for p in parameters if p.ndim == 2 and p not in excluded and _is_map(p, size)}
    others = [p for p in parameters if p not in matrices]
    muon = torch.optim.Muon(
        group_parameters(config, model, [p for p in parameters if p in matrices], width_exponent=0.5),
        lr=config.lr,
        momentum=config.momentum,
        adjust_lr_fn="match_rms_adamw",  # updates as large as AdamW's, so that lr and weight_decay keep their meaning
    )
    return MuonAdamW(muon, _build_adamw(config, group_parameters(config, model, others)))


def group_parameters(
    config: AdamWConfig, model: nn.Module, parameters: list[nn.Parameter], width_exponent: float = 1.0
) -> list[dict[str, Any]]:
    """Return one group for each pair of learning rate and weight decay.

    With muP, matrices have the learning rate lr (mup_base_size / d)^width_exponent.
    """
    memories = list(getattr(model, "memories", ()))
    constant = _find_embeddings(model) | _find_named(model, "no_decay")
    in_memories = {p for memory in memories for p in memory.parameters()}
    width_scale, scaled = _find_scaled(model, in_memories)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for p in parameters:
        lr = config.memory_lr if config.memory_lr and p in in_memories else config.lr
        lr *= width_scale**width_exponent if p in scaled else 1
        decay = config.weight_decay if p.ndim >= 2 and p not in constant else 0.0
        groups.setdefault((lr, decay), []).append(p)
    return [{"params": members, "lr": lr, "weight_decay": decay} for (lr, decay), members in groups.items()]


def _is_map(matrix: Tensor, hidden_size: int | None) -> bool:
    """Return True for a matrix to a hidden state, or from one or several; a single row or column is a vector."""
    rows, columns = matrix.shape
    return min(rows, columns) > 1 and (hidden_size is None or rows == hidden_size or columns % hidden_size == 0)


def _find_scaled(model: nn.Module, in_memories: set[nn.Parameter]) -> tuple[float, set[Tensor]]:
    """Return the learning rate factor of `mup_base_size`, and the matrices whose fan-in grows with d."""
    config = getattr(model, "config", None)
    base = getattr(config, "mup_base_size", None)
    if config is None or base is None:
        return 1.0, set()
    head = model.head.weight if model.head else None
    linears = {m.weight for layer in model.layers for m in layer.modules() if isinstance(m, nn.Linear)}
    of_memories = {p for p in in_memories if p.ndim >= 2 and p.shape[-1] % config.hidden_size == 0}
    of_memories |= _find_named(model, "wide_inputs")
    return base / config.hidden_size, (linears - in_memories - {head}) | of_memories


def _find_embeddings(model: nn.Module) -> set[nn.Parameter]:
    return {p for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}


def _find_named(model: nn.Module, attribute: str) -> set[nn.Parameter]:
    """Return the parameters that memories name in an attribute, without those that an option removed."""
    memories = getattr(model, "memories", ())
    named = {getattr(memory, name) for memory in memories for name in getattr(memory, attribute)}
    return named - {None}


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
