"""gRPC channels and ports: certificates, tokens, status codes, health.

Threads: the caller's. gRPC's own threads read certificates at handshakes. ``blocking`` serves calls of a worker on
``rpc_N`` and reports their ends on gRPC's event thread.
"""
