"""Limits of a request's parameters over HTTP and gRPC, far above any use, to protect other requests."""

MAX_STOP_TOKENS = 4096

# Entries of logit_bias, of one sample and of all samples of a request. Each sample is sent to the worker with its own
# copy.
MAX_BIASES = 2**18
MAX_BIAS_COPIES = 2**20

# Log-probabilities of the prompt tokens of all samples of a request: about 70 bytes of JSON each.
MAX_PROMPT_LOGPROBS = 2**22

# The process group of a trainer that broadcasts weights.
MAX_GROUP_NAME = 128  # characters
MAX_GROUP_HOST = 255  # characters of the address of the trainer's store
MAX_GROUP_RANKS = 65_536
MAX_GROUP_SECONDS = 86_400  # that a process waits for the others

MAX_TENSOR_VALUES = 4_000_000  # that are read from a tensor at once; in float32 they fit into a message of 16 MiB

MAX_WEIGHTS_VERSION = 256  # characters of the name of new weights
