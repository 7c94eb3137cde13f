"""Limits of a request's parameters over HTTP and gRPC, far above any use, to protect other requests."""

MAX_STOP_TOKENS = 4096

# Entries of logit_bias, of one sample and of all samples of a request. Each sample is sent to the worker with its own
# copy.
MAX_BIASES = 2**18
MAX_BIAS_COPIES = 2**20
