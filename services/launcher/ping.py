"""Sends one request to a running server and prints its answer: the command ``toka-ping prompt='...'``."""

import ssl
import time

import httpx
from pydantic import Field

from services.common.config import fail, from_command_line
from services.common.flags import Bool, Config, Float, Int


class PingConfig(Config):
    """Flags of ``toka-ping``."""

    prompt: str = "Question: Tom buys 3 books for $7 each and 4 pens for $2 each. How much does he pay?\nAnswer:"
    host: str = "127.0.0.1"
    port: Int = Field(10210, ge=1, le=65535)
    model: str | None = Field(None, description="default: the first model the server lists")
    max_tokens: Int = Field(200, ge=1)
    temperature: Float = Field(0.0, ge=0)
    n: Int = Field(1, ge=1, description="samples")
    chat: Bool = Field(False, description="send the prompt as a chat message")
    timeout_s: Float = Field(300.0, gt=0)
    retries: Int = Field(0, ge=0, le=100, description="times to connect again if the server cannot be reached")
    hide: Bool = Field(False, description="print how long the samples took, not their text")
    api_key: str | None = Field(None, min_length=1, description="better in the environment, as TOKA_API_KEY")
    https: Bool = False
    ca: str | None = Field(
        None, min_length=1, description="PEM of the authority that signed the server's certificate, with https=T"
    )


def main() -> None:
    """Send the request and print the answer. Exit with status 1 and the reason if it fails."""
    config = from_command_line(PingConfig)
    try:
        started = time.monotonic()
        texts = ping(config)
        if config.hide:
            print(f"{len(texts)} samples in {time.monotonic() - started:.2f} s")
            return
        for text in texts:
            print(text)
    except httpx.HTTPStatusError as error:
        fail(f"the server answered {error.response.status_code}: {error.response.text}")
    except httpx.TransportError as error:
        fail(f"no answer from {config.host}:{config.port} ({error}); is toka running there?")


def ping(config: PingConfig) -> list[str]:
    """Return the text of each sample. Raises ``httpx.HTTPError``."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    base_url = f"{'https' if config.https else 'http'}://{host}:{config.port}/v1"
    headers = {} if config.api_key is None else {"authorization": f"Bearer {config.api_key}"}
    verify = ssl.create_default_context(cafile=config.ca)
    transport = httpx.HTTPTransport(verify=verify, retries=config.retries)
    with httpx.Client(base_url=base_url, timeout=config.timeout_s, headers=headers, transport=transport) as client:
        served = client.get("/models").raise_for_status().json()["data"]
        # A server without a model yet returns an error with the reason.
        model = config.model or (served[0]["id"] if served else None)
        body = {"model": model, "max_tokens": config.max_tokens, "temperature": config.temperature, "n": config.n}
        if config.chat:
            answer = client.post(
                "/chat/completions", json=body | {"messages": [{"role": "user", "content": config.prompt}]}
            )
            return [choice["message"]["content"] for choice in answer.raise_for_status().json()["choices"]]
        answer = client.post("/completions", json=body | {"prompt": config.prompt})
        return [choice["text"] for choice in answer.raise_for_status().json()["choices"]]


if __name__ == "__main__":
    main()
