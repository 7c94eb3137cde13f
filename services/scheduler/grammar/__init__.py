"""Grammars of requests: conversion to llguidance's text, and the check that a grammar compiles.

Threads: the event loop, which starts child processes; ``asyncio_N`` for large grammars. ``child`` and ``walk`` run in a
child process.
"""
