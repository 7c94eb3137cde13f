"""Ids of the requests that a call aborts."""

import re
from collections.abc import Collection


def is_chosen(request_id: str, chosen: Collection[str] | None) -> bool:
    """Return whether the ids ``chosen`` stand for the request ``request_id``. None stands for all requests.

    An id also stands for the requests whose ids begin with it and ``-`` or ``+``.
    """
    if chosen is None or request_id in chosen:
        return True
    return any(request_id[: sign.start()] in chosen for sign in re.finditer("[-+]", request_id))
