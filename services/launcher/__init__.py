"""The command ``toka`` and its helpers: start and supervise a deployment on one host.

Threads: the event loop, which starts the services; ``work`` downloads the model. Other commands have a main thread
only.
"""
