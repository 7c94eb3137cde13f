"""Code that several services share: errors, flags, logs, model files, the wire. It imports no service.

Functions run in the thread of their caller. Files that begin a thread or a process say so.
"""
