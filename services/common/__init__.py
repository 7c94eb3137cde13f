"""Code shared by the services: errors, flags, logs, model files, gRPC. It imports no service.

Functions run in the caller's thread. Modules that start a thread or a process say so.
"""
