"""What watches the op tests sees an op that writes where its schema does not say so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests._custom_ops.write_watch import WriteWatch


def test_a_write_that_the_schema_does_not_say_is_seen() -> None:
    def add(out: Tensor, xs: list[Tensor]) -> None:
        out.copy_(xs[0].add_(xs[1]))

    with torch.library._scoped_library("write_watch", "DEF") as library:
        library.define("add(Tensor! out, Tensor[] xs) -> ()")
        library.impl("add", add, "CPU")
        out, x, y = (torch.ones(3) for _ in range(3))
        with (
            WriteWatch("write_watch"),
            pytest.raises(AssertionError, match=r"has written to xs\[0\]"),
        ):
            torch.ops.write_watch.add(out, [x, y])
        with WriteWatch("write_watch"):
            torch.ops.write_watch.add(out, [out, y])  # its own memory
