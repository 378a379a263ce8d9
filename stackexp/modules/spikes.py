"""Loss spikes: a loss far above those of the steps before."""

import statistics
from collections import deque


class SpikeDetector:
    """How far each loss lies above the mean of the last `window` ones, in their standard deviations."""

    def __init__(self, window: int = 128, least: int = 32):
        self.losses: deque[float] = deque(maxlen=window)
        self._least = least

    def deviations(self, loss: float) -> float:
        """Of this loss, which then joins the window; 0.0 while fewer than `least` are known."""
        known = list(self.losses)
        self.losses.append(loss)
        if len(known) < self._least:
            return 0.0
        spread = statistics.pstdev(known)
        return (loss - statistics.fmean(known)) / spread if spread else 0.0
