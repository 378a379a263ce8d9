"""Loss spikes: a loss far above those of the steps before."""

import math
import statistics
from collections import deque


class SpikeDetector:
    """How far each loss lies above the mean of the last `window` ones, in their standard deviations."""

    def __init__(self, window: int = 128, least: int = 32):
        self.losses: deque[float] = deque(maxlen=window)
        self._least = least

    def deviations(self, loss: float) -> float:
        """Of this loss, which does not join the window by that; 0.0 while fewer than `least` are known."""
        if len(self.losses) < self._least:
            return 0.0
        mean, spread = self._window()
        return (loss - mean) / spread if spread else 0.0

    def add(self, loss: float, most: float = math.inf) -> None:
        """Into the window, as no more than `most` deviations: so it learns of a loss that stays higher, in time."""
        if most < math.inf and self.deviations(loss) > most:
            mean, spread = self._window()
            loss = mean + most * spread
        self.losses.append(loss)

    def _window(self) -> tuple[float, float]:
        """Mean and standard deviation."""
        return statistics.fmean(self.losses), statistics.pstdev(self.losses)
