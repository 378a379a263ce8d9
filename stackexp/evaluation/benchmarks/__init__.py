"""Downstream benchmarks: lm-eval supplies prompts, datasets and metrics, this package the model and the scores."""
