"""The flags of programs that serve the public: gateways and schedulers."""

from typing import Annotated

from pydantic import Field

from services.common.flags import Bool, Config, Float, Needs

API_KEY_VARIABLES = ("TOKA_API_KEY", "OPENAI_API_KEY")  # in which clients find their key


class KeyFlags(Config):
    """Public access: which callers are accepted, and how long an answer waits to be read."""

    api_keys_file: str | None = Field(
        None, min_length=1, description="TOML with a hash of each API key, see toka-key; default: requests need no key"
    )
    isolate_keys: Annotated[Bool, Needs("api_keys_file")] = Field(
        False, description="an API key shares cached prefixes with itself only"
    )
    grpc_token_file: str | None = Field(
        None, min_length=1, description="file with one secret, by which schedulers know their gateways"
    )
    slow_client_seconds: Float = Field(
        60.0,
        gt=0,
        le=3600,
        description="a client that reads less than 16 KiB of waiting data in this time is disconnected",
    )
