"""Holds for every test: no example of a property test is held against a clock, which a busy machine would fail."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("cutlayer", deadline=None)
settings.load_profile("cutlayer")
