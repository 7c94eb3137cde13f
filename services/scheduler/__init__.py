"""The scheduler: one replica's queue, pages and plans. ``core`` decides; the rest carries messages to and fro."""
