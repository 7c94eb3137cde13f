"""Compilation of a start's Triton kernels by a child process, while the worker loads its libraries and the weights.

The child runs the rehearsal on tensors without memory, records which kernels it would launch, and compiles them on all
processors into Triton's cache. The worker finds them there. The child needs no GPU memory and does not use the device.
"""
