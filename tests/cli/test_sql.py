"""The command `sql`: a script of a file, its plan, and the statements of a shell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import aioflow as af
from aioflow.cli import sql
from aioflow.cli.command import main
from aioflow.cli.options import UsageError
from aioflow.cli.sql import Shell

NUMBERS = """CREATE TABLE numbers (index BIGINT, third AS index % 3)
  WITH ('connector' = 'datagen', 'count' = '10');
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "numbers.sql"
    path.write_text(
        f"""{NUMBERS}
        CREATE TABLE big (n BIGINT) WITH ('connector' = 'jsonl', 'path' = '{tmp_path}/big');
        INSERT INTO big SELECT index FROM numbers WHERE index > 7;
        SELECT third, count(*) AS n FROM numbers WHERE third < 1 GROUP BY third;
        EXPLAIN SELECT index FROM numbers"""
    )
    return path


def test_a_script_writes_its_tables_and_prints_the_rows_of_its_queries(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sql", "--quiet", str(script), "--checkpoints", str(tmp_path / "state")]) == 0
    plan, *rows = capsys.readouterr().out.split('{"key"')
    assert "flow 'numbers': 1 task" in plan
    assert json.loads('{"key"' + rows[-1])["row"] == {"third": 0, "n": 4}
    written = "".join(one.read_text() for one in (tmp_path / "big").rglob("part-*"))
    assert sorted(written.split()) == ['{"n":8}', '{"n":9}']


def test_run_and_graph_take_a_script(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graph", str(script)]) == 0
    assert "big" in capsys.readouterr().out
    assert main(["sql", "--explain", str(script)]) == 0
    assert "filter" in capsys.readouterr().out
    assert not (script.parent / "big").exists()
    assert main(["run", "--quiet", str(script)]) == 0
    assert (script.parent / "big").exists()


def test_a_wrong_script_ends_with_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wrong.sql"
    path.write_text(f"{NUMBERS}SELECT nothing FROM numbers")
    assert main(["sql", str(path)]) == 2
    assert "line 3, column 8: no column 'nothing'" in capsys.readouterr().err
    assert main(["sql", str(tmp_path / "absent.sql")]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_the_shell_keeps_tables_and_shows_rows_as_a_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shell = Shell(lambda flow: 0)
    shell.carry_out(NUMBERS)
    shell.carry_out("CREATE VIEW small AS SELECT index, 'a' AS name FROM numbers WHERE index < 2;")
    shell.carry_out("SHOW TABLES;")
    shell.carry_out("DESCRIBE numbers;")
    shell.carry_out("SELECT third, count(*) AS n FROM numbers GROUP BY third HAVING count(*) > 3;")
    shell.carry_out("SELECT * FROM small;")
    shell.carry_out("DROP VIEW small;")
    shell.carry_out("SHOW TABLES;")
    assert capsys.readouterr().out.split("\n") == [
        "numbers", "small",
        "column | type", "-------+--------", "index  | INTEGER", "third  | INTEGER",
        "third | n", "------+--", "0     | 4", "1 row",
        "index | name", "------+-----", "0     | a", "1     | a", "2 rows",
        "numbers", "",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("begin", "end"), [("begin statement set;", "end;"), ("EXECUTE STATEMENT SET BEGIN", "END;")]
)
def test_the_shell_takes_a_statement_set_as_one_statement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: str, end: str
) -> None:
    insert = "INSERT INTO {0} SELECT index FROM numbers;".format
    create = "CREATE TABLE {0} (index BIGINT) WITH ('connector'='jsonl', 'path'='{1}/{0}');".format
    lines = [NUMBERS, create("a", tmp_path), create("b", tmp_path)]
    typed = iter([*lines, begin, insert("a"), insert("b"), end, "SHOW TABLES;"])

    def ask(prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(sql, "_line_editor", lambda shell: ask)
    flows: list[af.Flow] = []

    def run(flow: af.Flow) -> int:
        flows.append(flow)
        return 0

    assert sql._shell(run) == 0
    assert [sum(node.sink for node in flow.graph.nodes.values()) for flow in flows] == [2]


def test_the_shell_names_the_place_in_the_statement(capsys: pytest.CaptureFixture[str]) -> None:
    shell = Shell(lambda flow: 0)
    with pytest.raises(UsageError, match="there are none yet, CREATE TABLE makes one"):
        shell.carry_out("DESCRIBE x;")
    with pytest.raises(UsageError, match=r"none; write sql.*CREATE TABLE x before it"):
        shell.carry_out("SELECT 1 FROM x;")
    shell.carry_out(NUMBERS)
    with pytest.raises(UsageError, match="line 1, column 8: no column 'nothing'"):
        shell.carry_out("SELECT nothing FROM numbers;")
    with pytest.raises(UsageError, match="there is no table x; there are numbers"):
        shell.carry_out("DESCRIBE x;")


def test_the_shell_completes_columns_tables_connectors_and_keywords() -> None:
    shell = Shell(lambda flow: 0)
    shell.carry_out(NUMBERS)
    assert shell.completions("th") == ["third", "THEN"]
    assert shell.completions("nu") == ["numbers", "NULL"]
    assert shell.completions("kaf") == ["kafka"]
