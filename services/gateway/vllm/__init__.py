"""vLLM's endpoint for token ids in and out, for trainers that call it."""
