"""The program that makes the built-in model: problems, tokenizer, training and measurement."""
