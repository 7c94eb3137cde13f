"""The server that is asked."""

import ssl

import httpx

_TIMEOUT_S = 60.0


class ServerError(Exception):
    """The server cannot be measured. The message says why, and what to do."""


def without_version(url: str) -> str:
    """The server's address, whether ``/v1`` was written behind it or not."""
    return url.rstrip("/").removesuffix("/v1")


def served_model(url: str, api_key: str | None = None, ca: str | None = None) -> str:
    """The first model that the server at ``url`` (without ``/v1``) lists. Raises ``ServerError``."""
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
        said = f"{answer.status_code}: {answer.text[:200]}"
        raise ServerError(f"{url}/v1/models does not list models ({said}): name one with --model") from None
    if not models:
        raise ServerError(f"{url} serves no model yet")
    return str(models[0])
