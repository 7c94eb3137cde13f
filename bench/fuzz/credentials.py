"""API keys for the services of a run, and which of them a request has."""

import secrets
from pathlib import Path
from random import Random

from services.common.keys import ADMIN, hash_of, new_key

_TEAMS = ("team-a", "team-b")
_WRONG = ("Bearer tk-wrong", "Basic dGs6dGs=", "Bearer", "Bearer  ", "tk-wrong", "Bearer " + "x" * 4000, "Bearer \xff")


class Credentials:
    """The keys of a run. Without ``directory``, there are no keys."""

    def __init__(self, directory: Path | None) -> None:
        self._keys = {name: new_key() for name in (*_TEAMS, ADMIN)} if directory else {}
        self.flags: tuple[str, ...] = ()
        self.gateway = ""  # the header of a gateway at a scheduler
        if directory is None:
            return
        file, token = directory / "keys.toml", directory / "token"
        file.write_text(
            "".join(
                f'[[keys]]\nname = "{name}"\nhash = "{hash_of(key)}"\nscopes = ["{scope}"]\n'
                for name, key in self._keys.items()
                for scope in [ADMIN if name == ADMIN else "inference"]
            )
        )
        secret = secrets.token_urlsafe(32)
        token.write_text(secret)
        self.gateway = f"Bearer {secret}"
        for path in (file, token):
            path.chmod(0o600)
        self.flags = (f"api_keys_file={file}", f"grpc_token_file={token}", "isolate_keys=T")

    def choose(self, random: Random, *, right: bool = False) -> tuple[str | None, str]:
        """Return the owner of a key, as in ``Ask.owner``, and the header. ``right``: the key permits inference."""
        if not self._keys:
            return "", random.choice(("", "", "Bearer anything"))
        if right or random.random() < 0.8:
            name = random.choice(_TEAMS)
            return name, f"Bearer {self._keys[name]}"
        return None, random.choice(("", *_WRONG))

    @property
    def admin(self) -> dict[str, str]:
        """Return the headers of an operator."""
        return {"authorization": f"Bearer {self._keys[ADMIN]}"} if self._keys else {}

    def of(self, name: str) -> str:
        """Return the header of ``name``, empty without keys."""
        return f"Bearer {self._keys[name]}" if self._keys else ""
