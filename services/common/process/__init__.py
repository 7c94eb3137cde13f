"""Process lifecycle of a service: start, logs, traces, watchdog and exit.

Threads: the event loop; ``work`` for blocking calls at the start; ``relay`` writes output that would block;
``OtelBatchSpanRecordProcessor`` and ``end of tracing`` send spans. ``watchdog`` and ``init`` are processes.
"""
