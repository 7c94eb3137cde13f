"""The worker: one device with its share of the weights and the paged KV cache."""

import os

# By default gRPC writes a line to stderr for each TLS handshake that fails: any client without a certificate could fill
# the log. gRPC reads this variable when it is imported, which is after this package.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
