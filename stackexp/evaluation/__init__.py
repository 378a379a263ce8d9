"""Scores of trained models on named sets and formal languages, and text generation."""
