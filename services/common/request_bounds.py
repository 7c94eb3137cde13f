"""What one request may ask for at most, over HTTP as over gRPC. Far beyond any use: they bound what it costs others."""

MAX_STOP_TOKENS = 4096

# Entries of logit_bias: of one sample, and of all samples of a request, each of which has a copy on its way to the
# worker.
MAX_BIASES = 2**18
MAX_BIAS_COPIES = 2**20
