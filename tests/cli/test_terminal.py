"""A block redrawn in place: what a terminal that obeys the codes shows in the end."""

from __future__ import annotations

import io
import re
import sys

import pytest

from aioflow.cli.terminal import LiveBlock, is_live, uses_color

CODE = re.compile(r"\x1b\[(\d*)([FKJ])")


class Terminal(io.StringIO):
    """Keeps what is written, and can tell what the screen shows."""

    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        lines, row, column, text = [""], 0, 0, self.getvalue()
        while text:
            if code := CODE.match(text):
                number, letter = code.groups()
                if letter == "F":
                    row, column = row - int(number), 0
                    assert row >= 0, "moved above the first line"
                elif letter == "K":
                    lines[row] = lines[row][:column]
                else:
                    lines[row] = lines[row][:column]
                    del lines[row + 1 :]
                text = text[code.end() :]
                continue
            if text[0] == "\n":
                row, column = row + 1, 0
                lines += [""] * (row + 1 - len(lines))
            else:
                lines[row] = lines[row][:column] + text[0] + lines[row][column + 1 :]
                column += 1
            text = text[1:]
        return [line for line in lines if line]


def test_a_block_takes_the_place_of_the_one_before() -> None:
    terminal = Terminal()
    block = LiveBlock(terminal)

    block.draw(["first line", "second line", "third line"])
    block.draw(["one", "two"])

    assert terminal.screen() == ["one", "two"]


def test_printed_lines_stand_above_the_block() -> None:
    terminal = Terminal()
    block = LiveBlock(terminal)
    block.draw(["a long line of the table", "2"])

    block.print_above(terminal, "hello\nworld\n")
    block.draw(["3", "4"])

    assert terminal.screen() == ["hello", "world", "3", "4"]


def test_streams_of_the_terminal_print_above_by_whole_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", Terminal())
    block = LiveBlock(terminal)

    with block.above():
        block.draw(["table"])
        print("first", end=" ")
        assert terminal.screen() == ["table"]
        print("line")
        print("rest", end="")

    assert terminal.screen() == ["first line", "rest", "table"]
    assert sys.stdout is terminal


def test_a_stream_that_is_no_terminal_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stdout", pipe)
    block = LiveBlock(Terminal())

    with block.above():
        block.draw(["table"])
        print("result")

    assert pipe.getvalue() == "result\n"


@pytest.mark.parametrize(
    ("stream", "environ", "live", "colored"),
    [
        (Terminal(), {"TERM": "xterm"}, True, True),
        (Terminal(), {"TERM": "xterm", "NO_COLOR": "1"}, True, False),
        (Terminal(), {"TERM": "xterm", "NO_COLOR": ""}, True, True),
        (Terminal(), {"TERM": "dumb"}, False, False),
        (io.StringIO(), {"TERM": "xterm"}, False, False),
    ],
)
def test_a_table_is_live_on_a_terminal_and_coloured_unless_declined(
    stream: io.StringIO, environ: dict[str, str], live: bool, colored: bool
) -> None:
    assert (is_live(stream, environ), uses_color(stream, environ)) == (live, colored)
