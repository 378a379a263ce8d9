"""The depth axis on CUDA for long vectors: each slot as a linear combination of the pushed vectors.

    St_l[j] = sum_i C_l[j, i] x_i      C is updated like St, with unit vectors as pushes
    u_l[i]  = w_l . x_i                so the scores are those of w_l . St_l[j] = sum_i C_l[j, i] u_l[i]
    R_l     = sum_i p_l[i] x_i         with p_l[i] = sum_j weight_l[j] C_l[j, i]

A layer reads l + 1 pushed vectors, instead of reading and writing min(l + 1, S) slots. The gradient of a pushed vector
is a sum over its own layer and those above:

    dx_i = sum_{l >= i} p_l[i] dR_l + du_l[i] w_l

So the backward pass reads the gradients of the reads and writes no gradient of a slot. All vectors are in one buffer,
the `History`. The backward pass of a layer is the last that needs its pushed vector, and replaces it by the gradient of
its read. So a forward pass has only one backward pass.

Computation runs in float32, or in float64 if x or the state has it. The history is stored in the dtype given to
`empty`. If that has 16 bits, C, which is in [0, 1], is stored in float16. M has at least float32.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from stackexp.stack.eager import get_empty_score
from stackexp.stack.reference import StackOutput
from stackexp.stack.triton.depth_step import CHECKPOINT_EVERY, load_kernel, round_up_to_power_of_2

TOKENS = 16  # of one program
CHUNK = 8  # rows of the history in a tile
MIN_COLUMNS = 8
MIN_HEAD_DIM = 128


class History:
    """The pushed vectors of all updates, which the backward pass replaces by the gradients of the reads."""

    def __init__(self, rows: Tensor, query_dtype: torch.dtype):
        self.rows = rows  # [L, ..., H, D]
        self.queries = rows.new_empty((len(rows), *rows.shape[-2:]), dtype=query_dtype)  # w_g, from `oldest` on
        self.pairs: Tensor | None = None  # p_l[i] and du_l[i] at [i, l]: [newest + 1, newest + 1, 2, H, tokens]
        self.oldest: int | None = None  # the rows from here to `newest` have gradients
        self.newest = 0

    def start_backward(self, update: int, is_newest: bool) -> None:
        """Prepare for the gradients of an update. Raises RuntimeError if they were computed before."""
        if is_newest and self.oldest is None:
            shape = (update + 1, update + 1, 2, self.rows.shape[-2], self.rows.shape[1:-2].numel())
            self.pairs = self.rows.new_empty(shape)
            self.newest = update
        elif is_newest or self.oldest != update + 1:
            raise RuntimeError(
                "stack: the backward pass runs once for each forward pass, because it overwrites the pushed vectors; "
                "run the forward pass again"
            )
        self.oldest = update


class CoefficientState(NamedTuple):
    """The stacks after some updates; n = min(updates, S) slots, and `...` is [B, T]."""

    coefficients: Tensor  # C [..., H, n, columns], columns >= updates
    mask: Tensor  # M [..., H, n]
    to_coefficients: Tensor  # zeros without storage, which carry the gradient of C
    to_mask: Tensor  # the same for M
    updates: int
    history: History  # filled up to `updates`


class Settings(NamedTuple):
    """The compile-time options of the kernels. Sizes of tiles are powers of two."""

    heads: int
    head_dim: int
    num_actions: int
    tokens: int  # of one program of the read kernels
    stacks: int  # of one program of the update kernels
    chunk: int  # rows of the history in a tile
    slots: int
    padded_dim: int
    old_columns: int  # of C, before and after the update
    new_columns: int
    discipline: str
    read: str
    read_mask: str
    empty_score: float
    tiny: float  # the smallest normal number
    dtype: Any  # of the computation


class UpdateForward(NamedTuple):
    """The tensors of `update_forward`."""

    logits: Any  # [tokens, H, 3 or 2]
    coefficients: Any  # C [tokens, H, num_old, old_columns]
    mask: Any  # M [tokens, H, num_old]
    action: Any  # out [tokens, H, 3]
    entropy: Any  # out [tokens, H]
    occupancy: Any  # out [tokens, H]
    new_coefficients: Any  # out [tokens, H, num_new, new_columns]
    new_mask: Any  # out [tokens, H, num_new]


class ReadForward(NamedTuple):
    """The tensors of `read_forward`. `query` and `u` are None for `read: top`."""

    x: Any  # [tokens, H, D]
    query: Any  # [H, D]
    coefficients: Any  # after the update
    mask: Any
    history: Any  # [L, tokens, H, D]
    u: Any  # out [tokens, H, new_columns]
    combined: Any  # out, p [tokens, H, new_columns]
    read: Any  # out [tokens, H, D]


class ReadBackward(NamedTuple):
    """The tensors of `read_backward`. Each incoming gradient may be None."""

    query: Any
    coefficients: Any  # after the update
    mask: Any
    history: Any
    u: Any
    queries: Any  # [L, H, D]; the query is stored in row `update`
    pairs: Any  # see `History`; those of this update are stored
    to_read: Any
    grad_mask: Any
    dots: Any  # out, dR . x_i [tokens, H, new_columns]
    weight: Any  # out, of the slots in the read [tokens, H, num_new]
    to_content: Any  # out, the gradient of w_g . St [tokens, H, num_new]; None for `read: top`
    to_mask: Any  # out, the gradient of M after the update
    to_u: Any  # out [tokens, H, new_columns], or None
    to_x: Any  # out [tokens, H, D]
    to_query: Any  # out [programs, H, D], to be summed


class UpdateBackward(NamedTuple):
    """The tensors of `update_backward`. Each incoming gradient but that of M may be None."""

    logits: Any
    coefficients: Any  # before the update
    mask: Any
    u: Any
    dots: Any  # from `read_backward`
    weight: Any
    to_content: Any
    grad_mask: Any
    grad_coefficients: Any
    grad_action: Any
    grad_entropy: Any
    to_logits: Any  # out [tokens, H, 3 or 2]
    to_coefficients: Any  # out
    to_mask: Any  # out


def is_cheaper(num_updates: int, num_slots: int, head_dim: int) -> bool:
    """Return True if D >= 128 and this form reads and writes fewer elements per token and head than `depth_step`.

    Shorter vectors leave threads idle. Both counts are of all updates, forward and backward, without x, R and their
    gradients. Update l reads l vectors forward and L rows of the history backward. C is read and written three times
    forward and twice backward, and its gradient twice. `depth_step` stores every k-th stack, reads the last stored one
    and the pushes since then in both passes, and reads and writes the gradient of all slots.
    """
    every, updates = CHECKPOINT_EVERY, range(num_updates)
    occupied = [min(update, num_slots) for update in range(num_updates + 1)]
    slots = sum(occupied[every::every]) + sum(occupied[n] + occupied[n + 1] for n in updates)
    slots += 2 * sum(occupied[n - n % every] + n % every for n in updates)
    coefficients = sum(max(0, n - j) for n in updates for j in range(occupied[n]))  # slot j combines n - j vectors
    vectors = sum(updates) + num_updates**2
    return head_dim >= MIN_HEAD_DIM and vectors * head_dim + 7 * coefficients < slots * head_dim


def empty(
    shape: tuple[int, ...],
    num_slots: int,
    head_dim: int,
    like: Tensor,
    num_updates: int,
    dtype: torch.dtype | None = None,
) -> CoefficientState:
    """Return empty stacks for `num_updates` updates; see `depth_step.empty` for the other arguments."""
    history = like.new_empty((num_updates, *shape, head_dim), dtype=dtype)
    state_dtype = torch.promote_types(torch.promote_types(history.dtype, like.dtype), torch.float32)
    coefficients = history.new_empty((*shape, 0, MIN_COLUMNS), dtype=_coefficient_dtype(history))
    mask = history.new_empty((*shape, 0), dtype=state_dtype)
    return CoefficientState(coefficients, mask, coefficients, mask, 0, History(history, state_dtype))


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
    """Update, then read; see `reference.step`. Inputs may have any dtype; the read has that of x."""
    assert state.updates < len(state.history.rows), "more updates than `empty` was given"
    options = {"num_slots": num_slots, "discipline": discipline, "read": read, "read_mask": read_mask}
    query = query if read == "global" else None
    outputs = _Step.apply(state.history, state.updates, options, x, logits, query, *state[:4])
    return StackOutput(*outputs[:4]), CoefficientState(*outputs[4:], updates=state.updates + 1, history=state.history)


class _Step(torch.autograd.Function):
    """The step with gradients of x, logits, query, to_coefficients and to_mask."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        history: History,
        update: int,
        options: dict[str, Any],
        x: Tensor,
        logits: Tensor,
        query: Tensor | None,
        coefficients: Tensor,
        mask: Tensor,
        to_coefficients: Tensor,
        to_mask: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return R, a, its entropy, occupancy, and the new coefficients, mask, to_coefficients and to_mask."""
        stacks, num_new, columns = x.shape[:-1], min(update + 1, options["num_slots"]), _count_columns(update + 1)
        new_coefficients = coefficients.new_empty((*stacks, num_new, columns))
        new_mask = mask.new_empty((*stacks, num_new))
        u = None if query is None else mask.new_empty((*stacks, columns))
        read = x.new_empty(x.shape)
        action, entropy, occupancy = (mask.new_empty(shape) for shape in ((*stacks, 3), stacks, stacks))
        launch = _Launch(history, update, options, logits.shape[-1])
        outputs = (action, entropy, occupancy, new_coefficients, new_mask)
        launch.update("update_forward", UpdateForward(logits, coefficients, mask, *outputs))
        combined = mask.new_empty((*stacks, columns))
        tensors = ReadForward(x, query, new_coefficients, new_mask, history.rows, u, combined, read)
        launch.read("read_forward", (action[..., 0].numel(),), tensors)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(occupancy, new_coefficients, new_mask)
        ctx.launch, ctx.dtype = launch, x.dtype
        ctx.save_for_backward(logits, query, u, coefficients, mask, new_coefficients, new_mask)
        carriers = (history.rows.new_zeros(()).expand_as(new_coefficients), mask.new_zeros(()).expand_as(new_mask))
        return read, *outputs, *carriers

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, query, u, coefficients, mask, new_coefficients, new_mask = ctx.saved_tensors
        launch: _Launch = ctx.launch
        history, rows = launch.history, launch.history.rows
        to_read, grad_action, grad_entropy, *_, grad_coefficients, grad_mask = grads
        history.start_backward(launch.index, is_newest=grad_mask is None)
        to_x = rows.new_empty(rows.shape[1:], dtype=ctx.dtype)
        to_query = to_content = to_u = None
        if query is not None:
            to_u = torch.empty_like(u)
            to_query = history.queries.new_empty((_count_blocks(rows), *query.shape))
            to_content = torch.empty_like(new_mask)
        dots = new_mask.new_empty((*new_mask.shape[:-1], new_coefficients.shape[-1]))
        weight, to_new_mask = torch.empty_like(new_mask), torch.empty_like(new_mask)
        given = (query, new_coefficients, new_mask, rows, u, history.queries, history.pairs, to_read, grad_mask)
        tensors = ReadBackward(*given, dots, weight, to_content, to_new_mask, to_u, to_x, to_query)
        launch.read("read_backward", (_count_blocks(rows), rows.shape[-2]), tensors, newest=history.newest)
        to_logits = logits.new_empty(logits.shape)
        to_coefficients, to_mask = torch.empty_like(coefficients, dtype=rows.dtype), torch.empty_like(mask)
        saved = (logits, coefficients, mask, u, dots, weight, to_content, to_new_mask)
        through = (grad_coefficients, grad_action, grad_entropy)
        launch.update("update_backward", UpdateBackward(*saved, *through, to_logits, to_coefficients, to_mask))
        if query is not None:
            to_query = to_query.sum(0).to(query.dtype)
        return None, None, None, to_x, to_logits, to_query, None, None, to_coefficients, to_mask


class _Launch(NamedTuple):
    """Launches the kernels of one update."""

    history: History
    index: int  # of the update
    options: dict[str, Any]
    num_actions: int

    def update(self, name: str, tensors: UpdateForward | UpdateBackward) -> None:
        """Run a kernel of `coefficients_update` on all stacks."""
        num_stacks, settings = tensors.logits.shape[:-1].numel(), self._make_settings()
        sizes = {"num_stacks": num_stacks, "num_old": min(self.index, self.options["num_slots"])}
        self._run("coefficients_update", name, (-(-num_stacks // settings.stacks),), tensors, settings, sizes, 0)

    def read(self, name: str, grid: tuple[int, ...], tensors: ReadForward | ReadBackward, **sizes: int) -> None:
        """Run a kernel of `coefficients_read`."""
        sizes |= {"num_tokens": self.history.rows.shape[1:-2].numel(), "num_slots": self.options["num_slots"]}
        settings = self._make_settings()
        num_elements = settings.chunk * settings.padded_dim
        self._run("coefficients_read", name, grid, tensors, settings, sizes, num_elements)

    def _run(
        self,
        module: str,
        name: str,
        grid: tuple[int, ...],
        tensors: Any,
        settings: Settings,
        sizes: dict[str, int],
        num_elements: int,
    ) -> None:
        """Run a kernel with as many warps as its tiles need: that of C, and one of `num_elements` vector elements."""
        if 0 in grid:
            return
        kernel = load_kernel(module, name, self.history.rows.device)
        with torch.cuda.device_of(self.history.rows):
            kernel[grid](
                type(tensors)(*(tensor if tensor is None else tensor.contiguous() for tensor in tensors)),
                update=self.index,
                num_new=min(self.index + 1, self.options["num_slots"]),
                **sizes,
                settings=settings,
                num_warps=min(16, max(1, num_elements // 2048, settings.slots * settings.new_columns // 1024)),
            )

    def _make_settings(self) -> Settings:
        import triton.language as tl

        options, (heads, head_dim), dtype = self.options, self.history.rows.shape[-2:], self.history.queries.dtype
        slots = max(MIN_COLUMNS, round_up_to_power_of_2(min(self.index + 1, options["num_slots"])))
        columns = _count_columns(self.index + 1)
        return Settings(
            heads=heads,
            head_dim=head_dim,
            num_actions=self.num_actions,
            tokens=TOKENS,
            stacks=max(1, 512 // (slots * columns)),
            chunk=CHUNK,
            slots=slots,
            padded_dim=round_up_to_power_of_2(head_dim),
            old_columns=_count_columns(self.index),
            new_columns=columns,
            discipline=options["discipline"],
            read=options["read"],
            read_mask=options["read_mask"],
            empty_score=get_empty_score(options["read_mask"], dtype),
            tiny=torch.finfo(dtype).tiny,
            dtype=tl.float64 if dtype == torch.float64 else tl.float32,
        )


def _count_blocks(rows: Tensor) -> int:
    """Return the programs along the tokens of a history [L, ..., H, D]."""
    return -(-rows.shape[1:-2].numel() // TOKENS)


def _count_columns(updates: int) -> int:
    """Return the columns of C in memory after some updates."""
    return max(MIN_COLUMNS, round_up_to_power_of_2(updates))


def _coefficient_dtype(history: Tensor) -> torch.dtype:
    return torch.float16 if history.itemsize == 2 else history.dtype
