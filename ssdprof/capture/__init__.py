"""Capture: run a model on a prompt, and take the inputs of its layers at the door of their operator."""
