"""OpenAI's Batch API: files and Batch jobs over the store.

``validation``, ``executor`` and ``finishing`` take a Batch job from its input file to its results.

Threads: the event loop. ``blobs_N`` checks lines, ``asyncio_N`` parses large ones, ``text_N`` joins long lists.
"""
