"""Slots and pages of one worker: which are free, what they hold, and which sequences share them."""
