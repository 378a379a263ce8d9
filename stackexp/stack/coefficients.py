"""The stack of the depth axis in coefficient form: no slot is ever stored, only what it is made of.

Notation: one head of one token, after m updates, of which the i-th (from 0) pushed x_i [D]; n = min(m, S) slots.

Forward. The update of `reference` is linear in the slots, with factors that depend on the actions (for a queue: and on
the mask) alone. So St = C X, where row i of X [m, D] is x_i and C [n, m] follows the slots' own recursion, with the
unit vector of x_i in its place:

    C'[j] = a_push C[j-1] + a_pop C[j+1] + a_noop C[j]              C[-1] = e_m,  C[S] = 0         (stack, push_only)
    C'[j] = a_push C[j-1] + (a_noop + a_pop M[j+1] / M[j]) C[j]                                    (queue)

M follows it too, with x = 1: it is the slot contents if every vector pushed is the number 1, hence the sum of C's rows.
It is kept as a column before the first of C, [M | C], and costs no operation of its own. A read needs the pushed
vectors twice, and the slots not at all:

    k = X w_g [m]      w_g . St[j] = (C k)[j]      p = softmax(scores)      R = sum_j p_j St[j] = c X  with c = p C [m]

`top` is c = C[0]. A layer moves 2 m D numbers, and those of C a few times; the state form reads and writes n D, and
reads them once or twice more, and its backward pass again as many.

Backward. With G = dL/dR, and g the gradient that the later layers have for [M | C]:

    dc = X G      dp = C dc      ds = p (dp - p . dp)      de = ds M  (multiply; else ds),  dM by the mask of the read
    dC = g + p dc^T + de k^T     dk = C^T de               dX = c G^T + dk w_g^T       dw_g = X^T dk, of all tokens

then back through the recursion, whose transpose it is: dC[j] = a_push dC'[j+1] + a_pop dC'[j-1] + a_noop dC'[j], and
da_push = sum_j C[j-1] . dC'[j], and so on.

Every layer has a gradient for every vector pushed before it: m (m + 1) / 2 of them for m layers. They are accumulated
in one buffer for each vector, which goes down from layer to layer: `step` hands on each x_i as an output of its own, so
that what it gets back is the sum of all later layers' gradients, to which it adds the two terms of its dX as it makes
them. Autograd would write each term to memory, and then read them all again to add them.

Saved for the backward pass, in numbers for a token, a head and a layer:

    state form          n (D + 1), and as many again for what `update` and `read_slots` keep of their parts
    coefficient form    k [m], a [3], and C [n, m] of every KEEP_EVERY-th layer; the others are updated from it again

Bytes that autograd holds for a token and layer, 32 layers of 360m, float32 (tests/test_coefficients.py counts them):
full-dimension (D=240) 5.5 KB, of which 3.8 are x, against 119 KB for `eager`; low-rank (D=16) 1.7 KB against 9.0.

Operations on C run over N = all tokens of the batch in the last dimension, where numbers are contiguous.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from stackexp.stack import eager
from stackexp.stack.reference import ADDITIVE_PENALTY, StackOutput, ratio

KEEP_EVERY = 4  # layers: the coefficients after these many updates are kept for the backward pass
FEW = 2**18  # numbers, 1 MB: so many cost more to call an operation for than to copy


class CoefficientState(NamedTuple):
    coefficients: Tensor  # [M | C], [n, 1 + m, H, N]
    pushed: list[Tensor]  # x_0 .. x_{m-1} in blocks [1 or more, N, H, D]
    kept: Tensor  # [M | C] before the last len(actions) updates, without gradient
    actions: list[Tensor]  # a [3 or 2, H, N] of these updates, without gradient


def empty(shape: tuple[int, ...], num_slots: int, head_dim: int, like: Tensor) -> CoefficientState:
    """Nothing pushed, for leading dimensions `shape` (heads last); `num_slots` and `head_dim` shape nothing yet."""
    *batch, heads = shape
    nothing = like.new_zeros(0, 1, heads, torch.Size(batch).numel())
    return CoefficientState(nothing, [], nothing, [])


def step(
    state: CoefficientState,
    x: Tensor,
    logits: Tensor,
    query: Tensor | None,
    *,
    num_slots: int,
    discipline: str = "stack",
    read: str = "global",
    read_mask: str = "multiply",
) -> tuple[StackOutput, CoefficientState]:
    """As `reference.step`; float32 or float64 throughout."""
    *batch, heads, size = x.shape
    options = num_slots, discipline, read, read_mask
    query = None if read == "top" else query
    start, earlier = state.kept, state.actions
    if len(earlier) == KEEP_EVERY or state.coefficients.numel() <= FEW:
        start, earlier = state.coefficients.detach(), []
    pushed = _appended(state.pushed, x.reshape(1, -1, heads, size))
    inputs = state.coefficients, logits.reshape(-1, *logits.shape[-2:]).permute(2, 1, 0), query, pushed
    if _by_hand(inputs):
        coefficients, result, entropy, action, *pushed = _Step.apply(
            options, len(earlier), *inputs[:3], start, *earlier, *pushed
        )
    else:
        coefficients, result, entropy, action, _ = _forward(options, *inputs)
    state = CoefficientState(coefficients, pushed, start, [*earlier, action.detach()])
    occupancy = coefficients[:, 0].detach().sum(0)
    if discipline == "push_only":
        action = torch.stack([action[0], torch.zeros_like(action[0]), action[1]])
    action, entropy, occupancy = action.permute(2, 1, 0), entropy.t(), occupancy.t()  # [N, H, ...]
    fields = (field.reshape(*batch, *field.shape[1:]) for field in (result, action, entropy, occupancy))
    return StackOutput(*fields), state


def _appended(blocks: list[Tensor], new: Tensor) -> list[Tensor]:
    """Put a vector [1, N, H, D] into the last block, if that has few numbers, or into one of its own."""
    if blocks and blocks[-1].numel() + new.numel() <= FEW:
        return [*blocks[:-1], torch.cat([blocks[-1], new])]
    return [*blocks, new]


def _by_hand(inputs: tuple[Tensor, Tensor, Tensor | None, list[Tensor]]) -> bool:
    """Whether the backward pass is `_Step`'s: not where torch.compile or torch.func derives it, nor without one."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    coefficients, logits, query, pushed = inputs
    tensors = coefficients, logits, query, *pushed
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _forward(
    options: tuple[int, str, str, str], coefficients: Tensor, logits: Tensor, query: Tensor | None, pushed: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """[M | C], R [N, H, D], entropy [H, N], a [3 or 2, H, N] and k [m, H, N] after the update by logits [3 or 2, H, N].

    `pushed` has the new vector already.
    """
    num_slots, discipline, read, read_mask = options
    logits = logits.contiguous()
    action, log_action = logits.softmax(0), logits.log_softmax(0)
    coefficients = _updated(coefficients, action, discipline, num_slots)
    keys = None if read == "top" else _dots(pushed, query)
    if keys is None:
        weights = coefficients[0, 1:]
    else:
        slot_weights = _slot_weights(coefficients, keys, read_mask, num_slots)[0]
        weights = (coefficients[:, 1:] * slot_weights.unsqueeze(1)).sum(0)
    return coefficients, _combined(pushed, weights), -(action * log_action).sum(0), action, keys


def _updated(coefficients: Tensor, action: Tensor, discipline: str, num_slots: int) -> Tensor:
    """[M | C] [n, 1 + m, H, N] -> [min(n + 1, S), 2 + m, H, N]."""
    num_filled, columns, *rest = coefficients.shape
    num_filled_now = min(num_filled + 1, num_slots)
    push, no_op = action[0], action[-1]
    new = coefficients.new_zeros(num_filled_now, columns + 1, *rest)
    new[0, ::columns] += push  # what is pushed: 1 of the mask and 1 of the new vector
    old = new[:, :columns]
    old[1:].addcmul_(coefficients[: num_filled_now - 1], push)
    if discipline == "queue":
        no_op = (no_op + action[1] * _mask_ratio(coefficients)).unsqueeze(1)
    old[:num_filled].addcmul_(coefficients, no_op)
    if discipline == "stack":
        old[: max(0, num_filled - 1)].addcmul_(coefficients[1:], action[1])
    return new


def _mask_ratio(coefficients: Tensor) -> Tensor:
    """M[j+1] / M[j] [n, H, N]; see `reference.ratio`."""
    mask = coefficients[:, 0]
    return ratio(torch.cat([mask[1:], torch.zeros_like(mask[:1])]), mask)


def _slot_weights(coefficients: Tensor, keys: Tensor, read_mask: str, num_slots: int) -> tuple[Tensor, Tensor]:
    """p = softmax(scores) and w_g . St, each [n, H, N], of the filled slots; the softmax counts the empty ones too."""
    mask = coefficients[:, 0]
    content = (coefficients[:, 1:] * keys).sum(1)
    if read_mask == "multiply":
        scores = content * mask
    elif read_mask == "log":
        scores = content + mask.clamp_min(torch.finfo(mask.dtype).tiny).log()
    else:
        assert read_mask == "additive", read_mask
        scores = content + (1 - mask) * ADDITIVE_PENALTY
    if num_slots > len(mask):
        scores = torch.cat([scores, eager.empty_scores(scores[:1], num_slots - len(mask), read_mask)])
    return scores.softmax(0)[: len(mask)], content


def _dots(blocks: list[Tensor], others: Tensor) -> Tensor:
    """v . o [m, H, N] for each of m vectors v [N, H, D], in blocks; others [N, H, D] or [H, D].

    No matrix product: in float32 that may mean TF32 or bfloat16, by a setting that is not ours.
    """
    return torch.cat([(block * others).sum(-1).transpose(1, 2) for block in blocks])


def _combined(blocks: list[Tensor], weights: Tensor) -> Tensor:
    """sum_i w_i v_i [N, H, D] of m vectors [N, H, D], in blocks, and weights [m, H, N]."""
    total = None
    for block, weight in zip(blocks, _per_block(weights, blocks), strict=True):
        if total is not None and len(block) == 1:
            total.addcmul_(block[0], weight[0])
        else:
            part = (block * weight).sum(0) if len(block) > 1 else block[0] * weight[0]
            total = part if total is None else total.add_(part)
    return total


def _per_block(weights: Tensor, blocks: Sequence[Tensor]) -> Sequence[Tensor]:
    """Weights [m, H, N] -> [b, N, H, 1] for each block of b vectors [N, H, D]."""
    weights = weights.transpose(1, 2).unsqueeze(-1)
    return [weights] if len(blocks) == 1 else weights.split([len(block) for block in blocks])


class _Step(torch.autograd.Function):
    """`_forward`, and its gradients by hand; the vectors pushed go in and out, for their gradients to be added up."""

    @staticmethod
    def forward(
        ctx,
        options: tuple[int, str, str, str],
        num_earlier: int,
        coefficients: Tensor,
        logits: Tensor,
        query: Tensor | None,
        start: Tensor,
        *lists: Tensor,
    ) -> tuple[Tensor, ...]:
        earlier, pushed = lists[:num_earlier], list(lists[num_earlier:])
        *outputs, action, keys = _forward(options, coefficients, logits, query, pushed)
        ctx.options, ctx.num_actions = options, num_earlier + 1
        ctx.save_for_backward(query, keys, start, *earlier, action, *pushed)
        ctx.set_materialize_grads(False)
        return *outputs, action, *(block.view_as(block) for block in pushed)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g_after, g_result, g_entropy, g_action, *g_pushed):
        num_slots, discipline, read, read_mask = ctx.options
        query, keys, before, *lists = ctx.saved_tensors
        (*earlier, action), pushed = lists[: ctx.num_actions], lists[ctx.num_actions :]
        for action_then in earlier:
            before = _updated(before, action_then, discipline, num_slots)
        after = _updated(before, action, discipline, num_slots)
        g_after = torch.zeros_like(after) if g_after is None else g_after.clone()
        g_query, g_pushed = None, list(g_pushed)
        if g_result is not None:
            g_weights = _dots(pushed, g_result)
            if read == "top":
                g_after[0, 1:] += g_weights
                terms = [(g_result, after[0, 1:])]
            else:
                weights, g_keys = _read_backward(after, keys, g_weights, g_after, read_mask, num_slots)
                terms = [(g_result, weights), (query.unsqueeze(0), g_keys)]
                g_query = _combined(pushed, g_keys).sum(0)
            for vectors, weights in terms:
                g_pushed = _accumulated(
                    g_pushed, vectors, _per_block(weights, pushed), in_place=vectors is not g_result
                )
        g_before, g_of_action = _update_backward(before, action, g_after, discipline)
        g_logits = _softmax_backward(action, g_of_action if g_action is None else g_of_action + g_action, g_entropy)
        return None, None, g_before, g_logits, g_query, None, *([None] * len(earlier)), *g_pushed


def _accumulated(
    totals: list[Tensor | None], vectors: Tensor, weights: Sequence[Tensor], in_place: bool
) -> list[Tensor]:
    """Add to the gradient of each block [b, N, H, D], or to none, vectors [N or 1, H, D] * weights [b, N, H, 1]."""
    if in_place:
        return [total.addcmul_(vectors, weight) for total, weight in zip(totals, weights, strict=True)]
    return [
        vectors * weight if total is None else torch.addcmul(total, vectors, weight)
        for total, weight in zip(totals, weights, strict=True)
    ]


def _read_backward(
    after: Tensor, keys: Tensor, g_weights: Tensor, g_after: Tensor, read_mask: str, num_slots: int
) -> tuple[Tensor, Tensor]:
    """c and dk [m, H, N], from dc; what the read has for [M | C] is added to `g_after`."""
    mask, slots = after[:, 0], after[:, 1:]
    slot_weights, content = _slot_weights(after, keys, read_mask, num_slots)
    g_slot_weights = (slots * g_weights).sum(1)  # of an empty slot 0: it reads 0
    g_scores = slot_weights * (g_slot_weights - (slot_weights * g_slot_weights).sum(0))
    g_content = g_scores
    if read_mask == "multiply":
        g_content = g_scores * mask
        g_after[:, 0].addcmul_(g_scores, content)
    elif read_mask == "log":
        tiny = torch.finfo(mask.dtype).tiny
        g_after[:, 0] += torch.where(mask >= tiny, g_scores / mask.clamp_min(tiny), 0)
    else:
        g_after[:, 0].add_(g_scores, alpha=-ADDITIVE_PENALTY)
    g_after[:, 1:].addcmul_(slot_weights.unsqueeze(1), g_weights).addcmul_(g_content.unsqueeze(1), keys)
    weights = (slots * slot_weights.unsqueeze(1)).sum(0)
    return weights, (slots * g_content.unsqueeze(1)).sum(0)


def _update_backward(before: Tensor, action: Tensor, g_after: Tensor, discipline: str) -> tuple[Tensor, Tensor]:
    """The gradients of [M | C] before the update and of a [3 or 2, H, N], from that after it: `_updated` transposed."""
    num_filled, columns = before.shape[:2]
    push, no_op = action[0], action[-1]
    pushed_at = slice(0, len(g_after) - 1)  # the slots whose content went down by one
    g_old = g_after[:, :columns]
    g_stay = g_old[:num_filled] * before
    g_push = (g_old[1:] * before[pushed_at]).sum((0, 1)) + g_after[0, 0] + g_after[0, -1]
    if discipline == "queue":
        quotient, g_stay = _mask_ratio(before), g_stay.sum(1)  # [n, H, N]
        no_op = (no_op + action[1] * quotient).unsqueeze(1)
        g_pop, g_no_op = (g_stay * quotient).sum(0), g_stay.sum(0)
    else:
        g_no_op = g_stay.sum((0, 1))
    g_before = g_old[:num_filled] * no_op
    g_before[pushed_at].addcmul_(g_old[1:], push)
    if discipline == "queue":
        _ratio_backward(before[:, 0], quotient, g_stay * action[1], g_before[:, 0])
    elif discipline == "stack":
        kept_at = slice(0, max(0, num_filled - 1))
        g_pop = (g_old[kept_at] * before[1:]).sum((0, 1))
        g_before[1:].addcmul_(g_old[kept_at], action[1])
    return g_before, torch.stack([g_push, g_no_op] if discipline == "push_only" else [g_push, g_pop, g_no_op])


def _ratio_backward(mask: Tensor, quotient: Tensor, g_quotient: Tensor, g_mask: Tensor) -> None:
    """Add to g_mask [n, H, N] the gradient of M[j+1] / M[j]; none flows where M[j] is 0."""
    tiny = torch.finfo(mask.dtype).tiny
    per_mask = torch.where(mask >= tiny, g_quotient / mask.clamp_min(tiny), 0)
    g_mask.sub_(per_mask * quotient)
    g_mask[1:].add_(per_mask[:-1])


def _softmax_backward(action: Tensor, g_action: Tensor, g_entropy: Tensor | None) -> Tensor:
    """The gradient of the logits [3 or 2, H, N]; of the entropy -sum a log a it is -a (log a - sum a log a)."""
    if g_entropy is not None:  # as if the entropy's gradient were of a: -g log a, and log a = 0 where a = 0
        log_action = action.clamp_min(torch.finfo(action.dtype).tiny).log()
        g_action = g_action - g_entropy * log_action
    return action * (g_action - (action * g_action).sum(0))
