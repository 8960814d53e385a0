"""Capture: runs a model on a prompt, and takes the inputs of its layers when they call their
operator.
"""
