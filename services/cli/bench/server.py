"""Finds the model of the server to measure."""

import ssl

import httpx

_TIMEOUT_S = 60.0


class ServerError(Exception):
    """Raised if the server cannot be measured. The message has the reason, and what to do."""


def without_version(url: str) -> str:
    """Return the address of a server without ``/v1`` at its end."""
    return url.rstrip("/").removesuffix("/v1")


def served_model(url: str, api_key: str | None = None, ca: str | None = None) -> str:
    """Return the first model that the server at ``url`` lists. ``url`` has no ``/v1``. Raises ``ServerError``."""
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    try:
        verify = ssl.create_default_context(cafile=ca)
        answer = httpx.get(f"{url}/v1/models", headers=headers, verify=verify, trust_env=False, timeout=_TIMEOUT_S)
    except (httpx.TransportError, httpx.InvalidURL, OSError) as error:
        raise ServerError(f"no answer from {url} ({error}): is a server running there? --url names another") from None
    if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise ServerError(f"{url} refuses the key: give --api-key, or set OPENAI_API_KEY")
    try:
        models = [model["id"] for model in answer.raise_for_status().json()["data"]]
    except (httpx.HTTPStatusError, ValueError, KeyError, TypeError):
        reply = f"{answer.status_code}: {answer.text[:200]}"
        raise ServerError(f"{url}/v1/models does not list models ({reply}): name one with --model") from None
    if not models:
        raise ServerError(f"{url} serves no model yet")
    return str(models[0])
