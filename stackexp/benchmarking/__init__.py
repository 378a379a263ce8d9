"""Paired measurements of the cost of a memory."""
