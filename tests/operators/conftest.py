"""Inputs of every kind, as the comparator's tests draw them."""

from measure.conftest import make_inputs

__all__ = ["make_inputs"]
