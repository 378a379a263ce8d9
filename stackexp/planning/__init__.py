"""Estimates of memory, time and cost before a run."""
