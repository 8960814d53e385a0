"""Capture: run a model on a prompt, and take the inputs of its layers where they call their
operator.
"""
