"""Measurements of trained stacks, and interventions on them."""
