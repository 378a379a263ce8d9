"""Detection of loss spikes."""

import math
import statistics
from collections import deque

WINDOW = 128  # losses
MIN_LOSSES = 32


class SpikeDetector:
    """A window of recent losses; it measures by how many standard deviations a new loss exceeds their mean."""

    def __init__(self) -> None:
        self.losses: deque[float] = deque(maxlen=WINDOW)

    def measure_deviation(self, loss: float) -> float:
        """Return (loss - mean) / standard deviation; 0.0 while there are fewer than MIN_LOSSES."""
        if len(self.losses) < MIN_LOSSES:
            return 0.0
        mean, spread = statistics.fmean(self.losses), statistics.pstdev(self.losses)
        return (loss - mean) / spread if spread else 0.0

    def add(self, loss: float, max_deviations: float = math.inf) -> None:
        """Add a loss, clipped to `max_deviations`, so that the window adapts to a loss that stays higher."""
        if self.measure_deviation(loss) > max_deviations:
            loss = statistics.fmean(self.losses) + max_deviations * statistics.pstdev(self.losses)
        self.losses.append(loss)
