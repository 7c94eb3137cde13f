"""gRPC servers and channels: certificates, tokens, status codes, health.

Threads: the caller's. gRPC's own threads read certificates during handshakes. ``blocking`` runs calls of a worker on
``rpc_N`` and reports their ends on gRPC's event thread.
"""
