"""Tokens as logprobs write them."""


def token_bytes(token: str) -> bytes:
    """The bytes of a token in legacy logprobs, where half a character is ``bytes:\\xe2\\x80``."""
    if token.startswith("bytes:"):
        return bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))
    return token.encode()
