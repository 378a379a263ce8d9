"""What the depth axis moves and keeps for each token: the floor under the times of `triton_depth`."""

from typing import NamedTuple


class Traffic(NamedTuple):
    """Bytes per token of one layer's step, each tensor counted once."""

    forward: int  # read and written
    backward: int
    kept: int  # from the forward for the backward pass


def traffic(
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
    """Of layer 0, 1 ... with a global read and the mask `multiply` or `log`, R and entropy having gradients.

    The last three are the sizes of a number of the state's contents, of x and R, and of the logits; all others have 4.
    """
    vector, row = num_heads * head_dim, 4 * num_heads
    slot = vector * state_bytes + row  # its contents and M
    earlier = layer % segment  # layers since the kept state
    num_kept, num_old, num_new = (min(updates, num_slots) for updates in (layer - earlier, layer, layer + 1))
    layer_inputs = vector * x_bytes + num_heads * num_actions * logits_bytes
    rebuilt = num_kept * slot + (earlier + 1) * layer_inputs
    read = vector * x_bytes * (2 if x_bytes < 4 else 1) + row  # R, what it lost in rounding, and the softmax's sum
    state = num_new * slot if earlier + 1 == segment else 0
    forward = rebuilt + read + (3 + 1 + 1) * row + state  # a, its entropy, occupancy
    backward = rebuilt + read + vector * x_bytes + row + (num_new + num_old) * slot + layer_inputs
    return Traffic(forward, backward, layer_inputs + read + state)
