"""Paired measurements of what a memory costs."""
