"""The scheduler of one replica: its queue, pages and plans. ``core`` decides, the other packages transfer messages."""

import os

# By default, gRPC logs each failed TLS handshake to stderr, so clients without a certificate could fill the log. gRPC
# reads this variable when it is imported, which is after this package.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
