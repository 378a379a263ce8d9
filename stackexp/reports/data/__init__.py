"""Inspection of datasets."""
