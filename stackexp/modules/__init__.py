"""LightningModules, optimizers, schedules and metrics."""
