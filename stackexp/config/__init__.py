"""The config schema, and the composition of configs from YAML files and overrides. Imports no torch."""
