"""What an answer has to match: how clients say it, and the grammar that comes of it."""
