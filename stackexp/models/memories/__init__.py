"""Memories between layers. A plugin subclasses `Memory`."""

from stackexp.models.memories.base import Memory

__all__ = ["Memory"]
