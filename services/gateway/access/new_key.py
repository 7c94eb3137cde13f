"""``toka-key name=team-a >> keys.toml``: a new API key, shown once, and the entry for ``api_keys_file``."""

import json
import sys
from datetime import date

from pydantic import Field, field_validator

from services.common.config import from_command_line
from services.common.flags import Config, Int, Strings
from services.common.keys import INFERENCE, NAME, SCOPES, hash_of, new_key


class NewKeyConfig(Config):
    """Whose key it is, and what it may do."""

    name: str = Field(pattern=f"^{NAME}$", description="in the queue; owner of files, batches and stored responses")
    scopes: Strings = Field((INFERENCE,), min_length=1, description="inference, admin, or both")
    max_concurrent: Int | None = Field(None, ge=1, description="requests at once; default: any number")
    tokens_per_minute: Int | None = Field(None, ge=1, description="default: any number")
    expires: date | None = Field(None, description="the first day, UTC, on which it is refused; default: none")

    @field_validator("scopes")
    @classmethod
    def _scopes_exist(cls, scopes: tuple[str, ...]) -> tuple[str, ...]:
        for scope in scopes:
            if scope not in SCOPES:
                raise ValueError(f"{scope!r} is no scope; the scopes are {', '.join(SCOPES)}")
        return scopes


def main() -> None:
    config = from_command_line(NewKeyConfig)
    key = new_key()
    print(entry(config, key), end="")
    print(f"\nThe key of {config.name}, which is shown this once:\n\n  {key}\n", file=sys.stderr)


def entry(config: NewKeyConfig, key: str) -> str:
    """TOML, to be appended to the file."""
    lines = ["[[keys]]", f'name = "{config.name}"', f'hash = "{hash_of(key)}"']
    lines.append(f"scopes = {json.dumps(list(config.scopes))}")
    for name in ("max_concurrent", "tokens_per_minute", "expires"):
        if (value := getattr(config, name)) is not None:
            lines.append(f"{name} = {value}")
    return "\n".join(lines) + "\n\n"


if __name__ == "__main__":
    main()
