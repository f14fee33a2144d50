"""What goes wrong when these are compiled: for `test_ahead.py`."""

from __future__ import annotations

import os
import signal
import time
from contextlib import AbstractContextManager


class Deadly:
    """Ends its process."""

    def compiled_in(self) -> AbstractContextManager[None]:
        """See FastKernel."""
        os.kill(os.getpid(), signal.SIGSEGV)
        raise AssertionError("not reached")


class Endless:
    """Takes forever."""

    def compiled_in(self) -> AbstractContextManager[None]:
        """See FastKernel."""
        time.sleep(600)
        raise AssertionError("not reached")


kernel = Deadly()
endless = Endless()
