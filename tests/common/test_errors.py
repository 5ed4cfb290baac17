"""Errors as text: one line, whatever the error."""

import pytest
import torch

from flsuite.common.errors import FlsuiteError, one_line
from flsuite.common.messages import ClientFailure
from flsuite.federation.engines.wire import Fatal


class MuteError(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("two\n  lines"), "two lines"),
        (ValueError(), "ValueError"),
        (SystemExit(3), "3"),
        (MuteError(), "MuteError, whose message cannot be read"),
        (ValueError("\x1b]0;title\x07\x9b2J"), r"\x1b]0;title\x07\x9b2J"),
        (ValueError("\u202eleft \udc80"), r"\u202eleft \udc80"),
        (ValueError("Größe 5 µm"), "Größe 5 µm"),
    ],
)
def test_an_error_is_one_line_that_a_terminal_only_shows(error: BaseException, line: str) -> None:
    assert one_line(error) == line
    assert ClientFailure(0, 1, error).reason == line  # type: ignore[arg-type]


def test_a_worker_without_memory_gives_one_line() -> None:
    with pytest.raises(RuntimeError) as torchs:
        torch.empty(2**60)
    for error in (torchs.value, MemoryError()):
        answer = Fatal.of(error).error()
        assert isinstance(answer, FlsuiteError) and "out of memory" in str(answer)
    assert not Fatal.of(RuntimeError("another")).is_user_error
