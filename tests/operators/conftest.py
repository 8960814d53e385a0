"""Inputs of every kind, drawn as in the comparator's tests."""

from measure.conftest import make_inputs

__all__ = ["make_inputs"]
