"""Sweeps: several runs of one study. Their run folders are the only record."""
