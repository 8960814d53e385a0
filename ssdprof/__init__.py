"""What a fused kernel would do to your Mamba-2 or Gated-DeltaNet model on your GPU."""

__version__ = "0.1.0"
