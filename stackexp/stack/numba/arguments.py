"""The arguments of the scan kernels: plain integers, and the addresses of tensors in a fixed order.

In Python, `Tensors` and `Scratch` hold tensors or None. In numba they hold flat arrays, and a missing tensor has the
address 0. Tensors are contiguous. Sizes: B sequences, T tokens, n occupied slots at the start and N at the end, C saved
states, m feedback units, i hidden feedback units (i = 2 m with gates, else m).
"""

from typing import Any, NamedTuple


class Sizes(NamedTuple):
    """The sizes and options of one scan."""

    batch: int  # B
    tokens: int  # T
    heads: int
    head_dim: int
    num_actions: int  # 3, or 2 without pop
    first_slots: int  # n
    last_slots: int  # N = min(n + T, S)
    num_slots: int  # S
    read: int  # equations.TOP, MULTIPLY, LOG or ADDITIVE
    is_queue: int
    has_mask_grad: int  # backward: whether the mask has a gradient
    activation: int  # feedback.IDENTITY, TANH or GATED
    units: int  # m
    inner: int  # i
    save_every: int  # tokens between two saved states; T: none are saved


class Tensors(NamedTuple):
    """The tensors of a scan and of its gradients. Matrix rows of the feedback maps are padded."""

    slots: Any  # [B, H, n, D]
    mask: Any  # [B, H, n]
    pushed: Any  # x [B, T, H, D]; with feedback x + P u, an output of the forward pass
    query: Any  # [H, D]; missing for `read: top`
    feedback: Any  # P and Q side by side [m, H*D + H*3]; backward: transposed; missing without feedback
    from_read: Any  # V, transposed [H*D, i]; backward: V; missing without a hidden layer
    given: Any  # c [B, T, i]
    read: Any  # [B, T, H, D], as the next five an output of the forward pass
    action: Any  # [B, T, H, 3]
    entropy: Any  # [B, T, H]
    first_read: Any  # R_{-1} [B, H, D]; missing without feedback
    saved_slots: Any  # [B, H, C, N, D]
    saved_mask: Any  # [B, H, C, N]
    x: Any = None  # [B, T, H, D]; this and the next four are only used forward, the last three are outputs
    logits: Any = None  # [B, T, H, 3 or 2]
    occupancy: Any = None  # [B, T, H]
    last_slots: Any = None  # [B, H, N, D]
    last_mask: Any = None  # [B, H, N]
    fed: Any = None  # the result of `feedback.activate` [B, T, i]; below are the tensors of the backward pass
    grad_read: Any = None  # incoming gradients, each of which may be missing
    grad_action: Any = None
    grad_entropy: Any = None
    grad_last_slots: Any = None
    grad_last_mask: Any = None
    grad_slots: Any = None  # outputs, the first two missing if not needed
    grad_mask: Any = None
    grad_x: Any = None
    grad_logits: Any = None
    grad_query: Any = None  # 0 at the start [B, H, D]: one part for each sequence
    grad_given: Any = None


class Scratch(NamedTuple):
    """The scratch memory of one part of the batch, initially 0. A group is one head, or all heads with feedback."""

    slots: Any  # rows: for each head of a group two; backward: the k + 1 states of a segment, then two gradients
    mask: Any
    weights: Any  # of a read [N], as are the next two; see `equations`
    contents: Any
    grads: Any
    inner: Any  # c + V R, or its gradient [i, padded]
    fed: Any  # u or both factors of the gated feedback, or the gradient of u [i, padded]
    mixed: Any  # x and logits with feedback, or the gradient of R_{t-1} [H*D + H*3, padded]
    grad_read: Any  # of R of one head [D]


class Scan(NamedTuple):
    """The arguments of the functions of a kernel."""

    sizes: Any
    tensors: Any
    scratch: Any
