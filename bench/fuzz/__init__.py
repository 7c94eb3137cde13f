"""Requests that no client should send, by the hundred thousand."""
