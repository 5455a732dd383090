"""A flow as text, as a Mermaid flowchart and as a picture."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import aioflow as af
from aioflow.api.drawing import mermaid, svg
from aioflow.cli.command import main
from aioflow.graph.job_graph import JobGraph

SVG = "{http://www.w3.org/2000/svg}"
NASTY = '<b>"a" & #1</b>'


def diamond() -> JobGraph:
    """Builds a flow with one source, two branches of different length that join again, a side
    output, and names that need escaping.
    """
    flow = af.Flow(f"diamond {NASTY}")
    tag = af.OutputTag[int]("odd")

    def split(value: int, ctx: af.ProcessContext) -> list[int]:
        ctx.output(tag, value)
        return [value]

    source = flow.source(range(10), name=NASTY)
    split_up = source.process(split, name="split").start_new_chain()
    far = (
        split_up.key_by(lambda x: x)
        .count(name="count", parallelism=3)
        .map(lambda pair: pair[0], name="first")
        .rebalance()
    )
    source.union(far).map(lambda x: x, name="together").sink(print, name="out")
    split_up.side(tag).sink(print, name="odd ones")
    return flow.job_graph()


def boxes(picture: ET.Element) -> list[tuple[float, float, float, float]]:
    """x, y, width, height of each task."""
    return [
        tuple(float(box.attrib[k]) for k in ("x", "y", "width", "height"))
        for box in picture.iterfind(f".//{SVG}rect[@class='box']")
    ]  # type: ignore[misc]


def test_the_plan_of_a_flow_is_that_of_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`info`, as it is called for Flink, is `graph`."""
    path = tmp_path / "planned.py"
    path.write_text(
        'import aioflow as af\nflow = af.Flow("planned")\n'
        'words = flow.source(["a"], name="words", uid="words")\n'
        'words.key_by(str).count(name="count", uid="count", parallelism=2).sink(print)\n'
    )
    assert main(["info", f"{path}:flow", "--format", "json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    (words, count, _) = plan["nodes"]
    assert (plan["name"], words["description"], count["parallelism"]) == ("planned", "words", 2)
    (read,) = count["inputs"]
    assert (read["id"], read["ship_strategy"]) == (words["id"], "HASH")


def test_mermaid_has_a_box_a_task_and_an_arrow_an_exchange() -> None:
    flow = af.Flow("plain")
    words = flow.source(["a"], name="words").map(str.upper, name="upper")
    words.key_by(str).count(name="count", parallelism=2).sink(print, name="out", parallelism=2)

    assert mermaid(flow.job_graph()).splitlines() == [
        "flowchart LR",
        '    t0(["words<br/>upper<br/>×1"])',
        '    t2["count<br/>out<br/>×2"]',
        '    t0 -- "HASH" --> t2',
    ]


def test_mermaid_escapes_what_it_would_read_as_its_own() -> None:
    chart = mermaid(diamond())

    assert "#lt;b#gt;#quot;a#quot; & #35;1#lt;/b#gt;" in chart
    assert '"odd: ' in chart
    assert NASTY not in chart


def test_a_picture_is_well_formed_and_shows_every_name() -> None:
    graph = diamond()

    picture = ET.fromstring(svg(graph))

    shown = [text.text for text in picture.iter(f"{SVG}text")]
    for vertex in graph.vertices:
        for node in vertex.nodes:
            assert node.name in shown
    assert "×3" in shown
    assert {"HASH", "REBALANCE", "odd: FORWARD"} <= set(shown)


def test_boxes_do_not_overlap_and_stand_inside_the_picture() -> None:
    picture = ET.fromstring(svg(diamond()))

    found = boxes(picture)

    width, height = float(picture.attrib["width"]), float(picture.attrib["height"])
    for i, (x, y, w, h) in enumerate(found):
        assert x >= 0
        assert y >= 0
        assert x + w <= width
        assert y + h <= height
        for other_x, other_y, other_w, other_h in found[:i]:
            apart = (
                x + w <= other_x
                or other_x + other_w <= x
                or y + h <= other_y
                or other_y + other_h <= y
            )
            assert apart


def test_consumers_stand_to_the_right_of_their_producers() -> None:
    graph = diamond()

    found = dict(
        zip((vertex.id for vertex in graph.vertices), boxes(ET.fromstring(svg(graph))), strict=True)
    )

    for edge in graph.edges:
        (x, _, width, _), (other_x, *_) = found[edge.source], found[edge.target]
        assert x + width < other_x


def test_arrows_do_not_cross_where_they_need_not() -> None:
    """Two branches whose consumers were built crosswise stand in the order of their producers."""
    flow = af.Flow("crosswise")
    source = flow.source(range(10), name="source")
    upper, lower = source.map(lambda x: x, name="upper"), source.map(lambda x: x, name="lower")
    for number, branch in enumerate((lower, upper, lower, upper)):
        branch.key_by(lambda x: x).count(name=f"count {number}").sink(print, name="out")
    graph = flow.job_graph()

    found = dict(
        zip(
            (vertex.nodes[0].name for vertex in graph.vertices),
            boxes(ET.fromstring(svg(graph))),
            strict=True,
        )
    )

    def is_above(one: str, other: str) -> bool:
        return found[one][1] < found[other][1]

    upper_first = is_above("upper", "lower")
    assert all(
        is_above(up, low) is upper_first
        for up in ("count 1", "count 3")
        for low in ("count 0", "count 2")
    )


def test_a_picture_follows_the_light_of_its_page() -> None:
    assert "@media (prefers-color-scheme: dark)" in svg(diamond())


def test_a_picture_is_the_same_each_time() -> None:
    assert svg(diamond()) == svg(diamond())


def test_graph_prints_text_by_default_and_writes_files_when_asked(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["graph", "program.py:doubled"]) == 0
    assert "task 1, parallelism 1" in capsys.readouterr().out

    assert main(["graph", "program.py:doubled", "--format", "mermaid"]) == 0
    assert capsys.readouterr().out.startswith("flowchart LR")

    assert main(["graph", "program.py:doubled", "--svg", "a.svg", "--mermaid", "a.mmd"]) == 0
    assert capsys.readouterr().out == ""
    assert ET.parse(folder / "a.svg").getroot().tag == f"{SVG}svg"
    assert (folder / "a.mmd").read_text().startswith("flowchart LR")


def test_a_file_that_cannot_be_written_is_wrong_usage(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["graph", "program.py:doubled", "--svg", "no/such/folder.svg"]) == 2
    assert "cannot write no/such/folder.svg: No such file or directory" in capsys.readouterr().err
