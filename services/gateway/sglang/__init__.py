"""SGLang's own endpoints for generation, and those that describe the server, for trainers that call them."""
