"""The error for a weight file that is incomplete or damaged."""

from services.common.errors import InvalidRequest

# The remedy for a file that is not what was published.
AGAIN = "fetch the file again (toka-download model= with the hub's id resumes an interrupted download)"


class BrokenFile(InvalidRequest):
    """A weight file is incomplete or damaged. ``text`` is the defect and ``fix`` the remedy."""

    def __init__(self, text: str, fix: str) -> None:
        super().__init__(f"{text}; {fix}", field="model")
        self.text, self.fix = text, fix
