"""The program `fedsieve`, from its first moment on: Ctrl-C ends it with one line, also while it still imports.

It imports nothing that takes time before it is ready for that.
"""

import os
import signal
import sys
from types import FrameType

from fedsieve.errors import INTERRUPTED_ADVICE

INTERRUPTED = 130  # the exit code
PATIENCE = 3  # how often Ctrl-C is pressed until nothing is tidied up any more

pressed = 0


def main() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as with nohup
        signal.signal(signal.SIGINT, interrupt)
    try:
        from fedsieve.cli import main as command

        command()
    except SystemExit:
        raise
    except BaseException:
        if not pressed:
            raise
        sys.exit(end())  # what it says is what the interruption did to it
    finally:
        if pressed or signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # there is nothing left to tidy up


def interrupt(_: int, __: FrameType | None) -> None:
    global pressed
    pressed += 1
    if pressed >= PATIENCE:
        os._exit(end())
    raise KeyboardInterrupt


def end() -> int:
    """Say that it was interrupted; a bar may have hidden the cursor."""
    show_cursor = "\x1b[?25h" if os.isatty(2) else ""
    os.write(2, f"{show_cursor}error: {INTERRUPTED_ADVICE}\n".encode())
    return INTERRUPTED


if __name__ == "__main__":
    main()
