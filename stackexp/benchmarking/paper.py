"""The efficiency table of the StackTrans paper (arXiv 2507.15343)."""

PAPER = {"stacktrans": (1.16, 1.09, 1.12), "single_head": (1.03, 1.04, 1.00), "full_dim": (3.78, 3.30, 1.73)}
"""Training, inference and memory in multiples of the paper's Transformer, on its GPUs."""
