"""``toka-key name=team-a >> keys.toml``: create an API key, print it once, and print its ``api_keys_file`` entry."""

import json
import sys
from datetime import date
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, field_validator

from services.common.config import from_command_line
from services.common.flags import Config, Strings, arithmetic
from services.common.keys import INFERENCE, NAME, SCOPES, hash_of, new_key

NONE: Final = "none"


def _limit(value: Any) -> Any:
    """Return a limit from its text. Raises ``ValueError``."""
    value = arithmetic(value)
    if value == NONE:
        return value
    try:
        number = int(value)
    except (TypeError, ValueError):
        raise ValueError("expected a whole number, or none") from None
    if number < 1:
        raise ValueError("expected at least 1, or none")
    return number


Limit = Annotated[int | Literal["none"], BeforeValidator(_limit)]


class NewKeyConfig(Config):
    """The name, the scopes and the limits of a new key."""

    name: str = Field(pattern=f"^{NAME}$", description="in the queue; owner of files, batches and stored responses")
    scopes: Strings = Field((INFERENCE,), min_length=1, description="inference, admin, or both")
    max_concurrent: Limit = Field(256, description="requests at once; none: any number")
    tokens_per_minute: Limit = Field(5_000_000, description="of prompts and answers; none: any number")
    expires: date | None = Field(None, description="the first day, UTC, on which it is refused; default: none")

    @field_validator("scopes")
    @classmethod
    def _scopes_exist(cls, scopes: tuple[str, ...]) -> tuple[str, ...]:
        for scope in scopes:
            if scope not in SCOPES:
                raise ValueError(f"{scope!r} is no scope; the scopes are {', '.join(SCOPES)}")
        return scopes


def main() -> None:
    """Create a key. Print its entry to standard output, and the key to standard error."""
    config = from_command_line(NewKeyConfig)
    key = new_key()
    print(entry(config, key), end="")
    print(f"\nThe key of {config.name}, which is shown this once:\n\n  {key}\n", file=sys.stderr)


def entry(config: NewKeyConfig, key: str) -> str:
    """Return the TOML entry of the key."""
    lines = ["[[keys]]", f'name = "{config.name}"', f'hash = "{hash_of(key)}"']
    lines.append(f"scopes = {json.dumps(list(config.scopes))}")
    for name in ("max_concurrent", "tokens_per_minute", "expires"):
        if (value := getattr(config, name)) not in (None, NONE):
            lines.append(f"{name} = {value}")
    return "\n".join(lines) + "\n\n"


if __name__ == "__main__":
    main()
