"""Checkpoints: from a model id, a folder or a demo to local files, the layers with an operator, and the model."""
