"""The life of a service process: start, logs, traces, watchdog and end.

Threads: the event loop; ``work`` for what blocks at the start; ``relay`` writes output that would block;
``OtelBatchSpanRecordProcessor`` and ``end of tracing`` send spans. ``watchdog`` and ``init`` are processes.
"""
