"""A training run: the loop, its processes, callbacks and objectives."""
