"""Estimates of memory, time and cost before a run; the catalog of shipped configs."""
