"""Models that transformers computes, with the worker's attention over its pages. Needs transformers.

The compute threads run the model. Only the boot makes it.
"""
