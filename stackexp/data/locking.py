"""Temporary, until its importers use `stackexp.files.hold_lock`."""

from stackexp.files import hold_lock as locked

__all__ = ["locked"]
