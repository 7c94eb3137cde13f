"""Compilation of a start's Triton kernels by a child process, while the worker loads the weights.

The child runs the rehearsal on tensors without memory, notes which kernels it would launch, and compiles them on all
processors into Triton's cache, where the worker finds them. It needs no GPU memory and does not touch the device.
"""
