"""Downloads the files of a model and prints their directory: the command ``toka-download model=...``."""

from pydantic import Field

from services.common.config import fail, from_command_line
from services.common.errors import TokaError
from services.common.flags import Config
from services.common.model.files import read_card, resolve
from services.common.model.gguf_file import is_gguf


class DownloadConfig(Config):
    """Flags of ``toka-download``."""

    model: str = Field(description="hub id (or a local directory, which is checked only)")
    tokenizer: str | None = Field(None, description="hub id of another tokenizer")


def main() -> None:
    config = from_command_line(DownloadConfig)
    try:
        card = read_card(config.model, weights=True)
        if config.tokenizer:
            resolve(config.tokenizer, weights=False)
        if not is_gguf(card.directory) and not any(card.directory.glob("*.safetensors")):
            raise TokaError(f"{config.model} has no safetensors weights; the worker reads them, or one GGUF file")
    except TokaError as error:
        fail(error.message)
    print(card.directory)


if __name__ == "__main__":
    main()
