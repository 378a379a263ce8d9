"""Load numba and the kernels of the stack in float32, which takes a second that forked processes then save."""

import numpy as np

from stackexp.stack.numba.launch import load_kernel

for is_backward in (False, True):
    load_kernel(np.float32, is_backward)
