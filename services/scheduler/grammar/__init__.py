"""Grammars of requests: from the contract to llguidance's text, and the proof that it compiles."""
