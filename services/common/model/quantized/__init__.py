"""Quantized checkpoints: how weights are stored by ``config.json``, and which tensors store them. No torch."""
