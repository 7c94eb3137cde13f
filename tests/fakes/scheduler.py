"""A scheduler that dies of a request: ``python -m tests.fakes.scheduler poison=9 ...flags of a scheduler`` ends, as by
a crash in native code, when it queues a prompt that begins with this token."""

import os
import sys

from services.scheduler.__main__ import main
from services.scheduler.core.life.intake import Intake


def _arm(poison: int) -> None:
    submit = Intake.submit

    def dying(intake, request, *others) -> None:
        submit(intake, request, *others)
        if int(request.tokens[0]) == poison:
            os._exit(139)

    Intake.submit = dying


if __name__ == "__main__":
    [poison] = [argument for argument in sys.argv if argument.startswith("poison=")]
    sys.argv.remove(poison)
    _arm(int(poison.partition("=")[2]))
    main()
