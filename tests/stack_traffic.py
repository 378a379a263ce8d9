"""The bytes that the depth axis must move and store for each token: a lower bound for the Triton kernels."""

from typing import NamedTuple


class Traffic(NamedTuple):
    """Bytes per token of one layer's step. Each tensor counts once."""

    forward: int  # read and written
    backward: int
    stored: int  # from the forward pass for the backward pass


def compute_traffic(
    layer: int,
    *,
    num_heads: int,
    head_dim: int,
    num_slots: int,
    segment: int,
    num_actions: int = 3,
    state_bytes: int = 2,
    x_bytes: int = 2,
    logits_bytes: int = 2,
) -> Traffic:
    """Return the traffic of layer 0, 1, ... with a global read and the mask `multiply` or `log`.

    R and the entropy have gradients. `state_bytes` is the size of an element of the slots, `x_bytes` of x and R, and
    `logits_bytes` of the logits; all other elements have 4 bytes.
    """
    vector, row = num_heads * head_dim, 4 * num_heads
    slot = vector * state_bytes + row  # contents and M
    since_stored = layer % segment
    num_stored, num_old, num_new = (min(updates, num_slots) for updates in (layer - since_stored, layer, layer + 1))
    layer_inputs = vector * x_bytes + num_heads * num_actions * logits_bytes
    rebuilt = num_stored * slot + (since_stored + 1) * layer_inputs
    read = vector * x_bytes * (2 if x_bytes < 4 else 1) + row  # R, its rounding error, and the softmax total
    state = num_new * slot if since_stored + 1 == segment else 0
    forward = rebuilt + read + (3 + 1 + 1) * row + state  # a, its entropy, occupancy
    backward = rebuilt + read + vector * x_bytes + row + (num_new + num_old) * slot + layer_inputs
    return Traffic(forward, backward, layer_inputs + read + state)
