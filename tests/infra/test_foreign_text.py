"""Pins what is shown of text that others wrote.

Without it the log of a machine clears the screen, or its progress bars push the reason out of the last lines.
"""

import pytest

from rollouts.infra.foreign_text import shown_line, shown_lines


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("two\n\tlines\n", "two\n\tlines\n"),
        ("Zürich 東京 🙂", "Zürich 東京 🙂"),
        ("\x1b[1;31mred\x1b[0m, \x1b[38;5;9mtoo\x1b[m", "red, too"),
        ("\x1b[2J\x1b[Hgone\x1b[1A\x1b[K", "gone"),
        ("\x1b]0;title\x07a\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "alink"),
        ("\x1b(B\x1bcreset\x1b7", "reset"),
        ("10 %\r50 %\r100 %\r\nended\r\n", "100 %\nended\n"),
        ("a\x07\x00b\x7f\x9b2J", "a b 2J"),
        ("\u202eobey\u202c \u2066me\u2069\u2028now", " obey   me now"),
        ("שלום عربي\u200f", "שלום عربي\u200f"),
        ("\x1b]0;never ended\nnext", "\nnext"),
        ("\x1b", " "),
    ],
)
def test_text_of_others_is_shown_as_a_terminal_would_leave_it(written: str, shown: str) -> None:
    assert shown_lines(written) == shown


def test_as_one_line_it_has_no_gaps() -> None:
    assert shown_line("\x1b[31m{\n  'error':\t1\r\n}\x1b[0m") == "{ 'error': 1 }"
