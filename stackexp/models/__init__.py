"""Decoders, recurrent baselines and memories in plain PyTorch."""
