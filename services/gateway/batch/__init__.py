"""OpenAI's Batch API: files and Batch jobs over a store that several gateways may share.

``validation``, ``executor`` and ``finishing`` take a Batch job from its input file to its results.
"""
