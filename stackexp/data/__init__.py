"""Datasets: preparation, storage, evaluation sets and downloads."""
