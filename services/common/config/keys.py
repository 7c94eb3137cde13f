"""The flags of what serves the public."""

from pydantic import Field, model_validator

from services.common.config.service import ServiceConfig
from services.common.flags import Bool, Float


class KeysConfig(ServiceConfig):
    """Of what serves the public: who may ask, and how long an answer waits to be read."""

    api_keys_file: str | None = Field(
        None, min_length=1, description="TOML with a hash of each API key, see toka-key; default: anybody may ask"
    )
    isolate_keys: Bool = Field(False, description="an API key shares cached prefixes with itself only")
    grpc_token_file: str | None = Field(
        None, min_length=1, description="file with one secret, by which schedulers know their gateways"
    )
    slow_client_seconds: Float = Field(
        60.0,
        gt=0,
        le=3600,
        description="a client that takes less than 16 KiB of what waits for it in this time is cut off",
    )

    @model_validator(mode="after")
    def _nothing_to_isolate_without_keys(self) -> "KeysConfig":
        if self.isolate_keys and self.api_keys_file is None:
            raise ValueError("flag isolate_keys=T: has no effect without api_keys_file; leave it out, or set both")
        return self
