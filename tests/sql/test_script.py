"""Scripts in SQL: tables of connectors, INSERT, EXPLAIN, uids by meaning, errors at the place."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import re
import sqlite3
import traceback
from decimal import Decimal
from pathlib import Path

import aiohttp
import pyarrow.parquet as pq
import pytest
from aiohttp import web

import aioflow as af
from aioflow.inspection.redaction import redacted
from aioflow.sql.options import connectors, options_of
from aioflow.sql.rows import rows_of_change
from aioflow.sql.script import script
from tests.io.servers import free_port
from tests.sql.random_mistakes import SCRIPTS, mistakes

MISTAKES = int(os.environ.get("AIOFLOW_SQL_MISTAKES", "150"))

BIDS = [
    {"item": "tea", "user": "ann", "price": 3, "at": 1_000},
    {"item": "tea", "price": 5, "at": "1970-01-01T00:00:04"},
    {"item": "cup", "user": None, "price": 7, "at": 12_000},
]
TABLE = """
    CREATE TABLE bids (item STRING NOT NULL, `user` STRING, price BIGINT, at TIMESTAMP(3),
      twice AS price * 2, WATERMARK FOR at AS at - INTERVAL '5' SECOND)
    WITH ('connector' = 'jsonl', 'path' = '${BIDS}');
"""


@pytest.fixture
def bids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "bids.jsonl"
    path.write_text("".join(f"{json.dumps(one)}\n" for one in BIDS))
    monkeypatch.setenv("BIDS", str(path))
    return path


def lines(path: Path) -> list[str]:
    return [line for one in sorted(path.rglob("part-*")) for line in one.read_text().splitlines()]


class Shown:
    """Keeps what a script shows: plans, and the plans of its queries."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def rows(self, stream: af.DataStream[object]) -> None:
        self.texts.append(stream.explain())

    def plan(self, text: str) -> None:
        self.texts.append(text)


def execute(path: Path, statement: str) -> list[tuple[object, ...]]:
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        return database.execute(statement).fetchall()


async def run(text: str, **options: object) -> af.Flow:
    flow = af.Flow("script")
    flow.sql_script(text)
    await flow.execute(**options)  # type: ignore[arg-type]
    return flow


def refused(text: str) -> af.SqlError:
    with pytest.raises(af.SqlError) as caught:
        af.Flow("script").sql_script(text)
    return caught.value


async def test_several_inserts_are_one_job_with_one_source(bids: Path, tmp_path: Path) -> None:
    execute(tmp_path / "t.db", "CREATE TABLE totals (item TEXT PRIMARY KEY, total INT)")
    flow = await run(f"""{TABLE}
        CREATE VIEW dear AS SELECT * FROM bids WHERE price > 3;
        CREATE VIEW unread AS SELECT item FROM bids WHERE price > 4;
        CREATE TABLE counts (item STRING, n BIGINT, most BIGINT, ended TIMESTAMP)
          WITH ('connector' = 'jsonl', 'path' = '{tmp_path}/counts');
        CREATE TABLE totals (item STRING, total BIGINT, PRIMARY KEY (item) NOT ENFORCED)
          WITH ('connector' = 'sqlite', 'path' = '{tmp_path}/t.db', 'table' = 'totals');
        INSERT INTO counts SELECT item, count(*), max(twice), window_end
          FROM TUMBLE(bids, at, INTERVAL '10' SECOND) GROUP BY item, window_start, window_end;
        INSERT INTO totals SELECT item, sum(price) FROM bids GROUP BY item;
        INSERT INTO counts (n, item) SELECT price, item FROM dear""")
    assert sorted(lines(tmp_path / "counts")) == [
        '{"item":"cup","n":1,"most":14,"ended":"1970-01-01 00:00:20"}',
        '{"item":"cup","n":7,"most":null,"ended":null}',
        '{"item":"tea","n":2,"most":10,"ended":"1970-01-01 00:00:10"}',
        '{"item":"tea","n":5,"most":null,"ended":null}',
    ]
    totals = execute(tmp_path / "t.db", "SELECT * FROM totals ORDER BY item")
    assert totals == [("cup", 7), ("tea", 8)]
    assert [one.name for one in flow.graph.nodes.values() if one.source] == ["bids"]
    assert not [one for one in flow.graph.nodes.values() if "unread" in one.name]


DIGITS = "12345678901234567890.123456789"


@pytest.mark.parametrize("connector", ["jsonl", "lines", "csv"])
async def test_a_declared_decimal_keeps_all_digits_of_a_number(
    connector: str, tmp_path: Path
) -> None:
    text = f"p,n\n{DIGITS},1\n" if connector == "csv" else f'{{"p": {DIGITS}, "n": 1}}\n'
    (tmp_path / "in").write_text(text)
    found = await af.Flow("digits").sql(f"""
        CREATE TABLE t (p DECIMAL(38, 9), n BIGINT)
          WITH ('connector' = '{connector}', 'path' = '{tmp_path}/in');
        SELECT p, n FROM t""").collect()  # fmt: skip
    assert found == [{"p": Decimal(DIGITS), "n": 1}]


@pytest.mark.parametrize("wrong", ["abc", "", "Infinity"])
async def test_a_text_that_is_no_declared_decimal_is_an_error(wrong: str, tmp_path: Path) -> None:
    """It was NULL, and so missing in each sum."""
    execute(tmp_path / "t.db", f"CREATE TABLE t AS SELECT '{wrong}' AS p")
    with pytest.raises(ValueError, match=f"the column p is '{wrong}', expected a number"):
        await run(f"""
            CREATE TABLE t (p DECIMAL(9, 2))
              WITH ('connector' = 'sqlite', 'path' = '{tmp_path}/t.db', 'table' = 't');
            CREATE TABLE out (p DECIMAL) WITH ('connector' = 'blackhole');
            INSERT INTO out SELECT p FROM t""")


@pytest.mark.parametrize("connector", ["jsonl", "lines"])
async def test_columns_have_names_that_python_does_not_allow(
    connector: str, tmp_path: Path
) -> None:
    (tmp_path / "in").write_text('{"@id": 1, "class": "a", "_at": 1000}\n{"@id": 2}\n')
    table = f"""
        CREATE TABLE t (`@id` BIGINT NOT NULL, class STRING, _at TIMESTAMP)
          WITH ('connector' = '{connector}', 'path' = '{tmp_path}/in');
        SELECT `@id`, class, _at FROM t"""
    assert await af.Flow("names").sql(table).collect() == [
        {"@id": 1, "class": "a", "_at": 1000},
        {"@id": 2, "class": None, "_at": None},
    ]
    (tmp_path / "in").write_text('{"@id": "one"}\n')
    with pytest.raises(ValueError, match=r"Expected `int`, got `str` - at `\$.@id`"):
        await af.Flow("names").sql(table).collect()


async def test_a_declared_decimal_has_its_scale_when_it_is_read_and_written(tmp_path: Path) -> None:
    (tmp_path / "prices.jsonl").write_text('{"p": "2.255", "n": 3}\n{"p": 1, "n": 4}\n')
    await run(f"""
        CREATE TABLE prices (p DECIMAL(10, 2), n BIGINT)
          WITH ('connector' = 'jsonl', 'path' = '{tmp_path}/prices.jsonl');
        CREATE TABLE out (p DECIMAL(10, 2), fine DECIMAL(20, 4), third DECIMAL(10, 1), n DECIMAL)
          WITH ('connector' = 'jsonl', 'path' = '{tmp_path}/out');
        INSERT INTO out SELECT p, p, p / 3, n FROM prices""")
    assert sorted(lines(tmp_path / "out")) == [
        '{"p":"1.00","fine":"1.0000","third":"0.3","n":"4"}',
        '{"p":"2.26","fine":"2.2600","third":"0.8","n":"3"}',
    ]


async def test_a_decimal_of_sqlite_is_one_in_expressions(tmp_path: Path) -> None:
    """SQLite has floats, ints and texts only."""
    execute(tmp_path / "t.db", "CREATE TABLE t (id INTEGER PRIMARY KEY, p)")
    execute(tmp_path / "t.db", "INSERT INTO t VALUES (1, 1.1), (2, 3), (3, '0.10'), (4, NULL)")
    await run(f"""
        CREATE TABLE t (id BIGINT, p DECIMAL)
          WITH ('connector' = 'sqlite', 'path' = '{tmp_path}/t.db', 'table' = 't');
        CREATE TABLE out (p DECIMAL) WITH ('connector' = 'jsonl', 'path' = '{tmp_path}/out');
        INSERT INTO out SELECT p * 3 FROM t""")
    assert sorted(lines(tmp_path / "out")) == [
        '{"p":"0.30"}', '{"p":"3.3"}', '{"p":"9"}', '{"p":null}'
    ]  # fmt: skip


async def test_a_variable_in_the_path_of_a_url_is_hidden_when_the_job_fails(
    monkeypatch: pytest.MonkeyPatch, bids: Path
) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=403, text=f"no such hook: {request.path}")

    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", refuse)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setenv("HOOK", "T0123/canary-77aa")
    with pytest.raises(Exception, match="answered 403") as caught:
        await run(f"""{TABLE}
            CREATE TABLE out (item STRING) WITH ('connector' = 'http',
              'url' = 'http://127.0.0.1:{runner.addresses[0][1]}/hooks/${{HOOK}}');
            INSERT INTO out SELECT item FROM bids""")
    await runner.cleanup()
    told = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
    assert "hooks/***" in told and "canary" not in told


@pytest.mark.parametrize(
    ("variable", "value", "is_hidden"),
    [
        ("OUT", "quietplace", False),
        ("OUT", "my-out.files", False),
        ("OUT", "quiet7place", True),
        ("OUT_TOKEN", "loudplace", True),
    ],
)
async def test_a_plain_word_of_a_variable_stays_readable(
    monkeypatch: pytest.MonkeyPatch,
    bids: Path,
    tmp_path: Path,
    variable: str,
    value: str,
    is_hidden: bool,
) -> None:
    monkeypatch.setenv(variable, value)
    await run(f"""{TABLE}
        CREATE TABLE out (item STRING)
        WITH ('connector' = 'jsonl', 'path' = '{tmp_path}/${{{variable}}}');
        INSERT INTO out SELECT item FROM bids""")
    assert redacted(f"a message about {value}") == (
        "a message about ***" if is_hidden else f"a message about {value}"
    )


@pytest.mark.parametrize(
    ("begin", "end"), [("BEGIN STATEMENT SET;", "END;"), ("EXECUTE STATEMENT SET BEGIN", "end")]
)
async def test_a_statement_set_is_a_part_of_the_job(
    begin: str, end: str, bids: Path, tmp_path: Path
) -> None:
    await run(f"""{TABLE}
        CREATE TABLE out (item STRING) WITH ('connector' = 'jsonl', 'path' = '{tmp_path}/out');
        {begin}
          INSERT INTO out SELECT CASE WHEN price > 3 THEN item END FROM bids;
          INSERT INTO out SELECT 'more' FROM bids WHERE price = 3;
        {end}""")
    assert sorted(lines(tmp_path / "out")) == [
        '{"item":"cup"}', '{"item":"more"}', '{"item":"tea"}', '{"item":null}'
    ]  # fmt: skip
    told = refused(f"{TABLE} {begin} INSERT INTO bids SELECT * FROM bids")
    assert "the statement set has no end: write END;" in told.message
    assert told.line == 5


@pytest.mark.parametrize(
    ("columns", "tables", "message"),
    [
        ("id BIGINT", "t", "mysql_changes needs the key of its rows: PRIMARY KEY"),
        ("id BIGINT PRIMARY KEY", "t, u", "write CREATE TABLE for each of the tables"),
        ("id BIGINT PRIMARY KEY, at TIMESTAMP, WATERMARK FOR at AS at", "t", "no event time"),
    ],
)
def test_a_table_of_changes_has_a_key_and_no_event_time(
    columns: str, tables: str, message: str
) -> None:
    table = f"""CREATE TABLE t ({columns}) WITH ('connector' = 'mysql_changes',
        'dsn' = 'mysql://u@127.0.0.1:9/db', 'tables' = '{tables}');"""
    assert message in refused(f"{table} SELECT 1 FROM t").message


def test_a_truncated_table_is_an_error_with_its_way_out() -> None:
    change: af.Change[dict[str, object]] = af.Change("truncate", "shop.t", {}, None, None, "7", 0)
    with pytest.raises(af.StateError, match=r"empty the tables .* fresh=True .* DELETE FROM"):
        rows_of_change("t", ("id",), ("id",), None, change)


def test_inserts_into_a_table_of_a_database_give_the_same_columns(tmp_path: Path) -> None:
    """NULL would take the place of the default."""
    text = f"""
        CREATE TABLE t (id BIGINT, kind STRING, n BIGINT)
          WITH ('connector' = 'sqlite', 'path' = '{tmp_path}/t.db', 'table' = 't');
        CREATE TABLE s (index BIGINT) WITH ('connector' = 'datagen');
        INSERT INTO t (id, kind) SELECT index, 'a' FROM s;
        INSERT INTO t ("""
    af.Flow("same").sql_script(f"{text}kind, id) SELECT 'b', index FROM s")
    error = refused(f"{text}id, n) SELECT index, 1 FROM s")
    assert "an INSERT into t leaves out n, which another one gives" in error.message
    assert "NULL AS n" in error.message


async def test_columns_that_the_script_does_not_declare_have_their_defaults(
    bids: Path, tmp_path: Path
) -> None:
    execute(
        tmp_path / "t.db",
        "CREATE TABLE totals (kind TEXT DEFAULT 'new', item TEXT PRIMARY KEY, total INT, n INT)",
    )
    await run(f"""{TABLE}
        CREATE TABLE totals (item STRING, n BIGINT, total BIGINT, PRIMARY KEY (item) NOT ENFORCED)
          WITH ('connector' = 'sqlite', 'path' = '{tmp_path}/t.db', 'table' = 'totals');
        INSERT INTO totals (total, item) SELECT sum(price), item FROM bids GROUP BY item""")
    totals = execute(tmp_path / "t.db", "SELECT * FROM totals ORDER BY item")
    assert totals == [("new", "cup", 7, None), ("new", "tea", 8, None)]


async def test_a_query_ignores_views_that_it_does_not_read(bids: Path) -> None:
    flow = af.Flow("script")
    first = flow.sql(f"""{TABLE}
        CREATE VIEW totals AS SELECT item, sum(price) AS total FROM bids GROUP BY item;
        CREATE VIEW last AS SELECT item, max(at) AS at FROM bids GROUP BY item;
        SELECT item, price FROM bids WHERE price > 3""")
    assert [one.name for one in flow.graph.nodes.values() if one.stateful] == ["bids"]
    other = first.key_by(af.col.item).aggregate(af.sum(af.col.price))
    flow.sql("SELECT item FROM t", t=first)
    assert flow.graph.nodes[other.upstreams[0].node_id].uid is None
    with pytest.raises(af.SqlError, match="no column 'prize'"):
        af.Flow("other").sql(f"{TABLE} CREATE VIEW v AS SELECT prize FROM bids; SELECT 1 FROM bids")


async def test_parquet_columns_without_values_have_their_declared_types(tmp_path: Path) -> None:
    """A reader takes the types of the first part for the parts after it."""
    columns = "b BOOLEAN, i BIGINT, x DOUBLE, s STRING, y BYTES, d DATE, t TIMESTAMP"
    await run(f"""
        CREATE TABLE one (index BIGINT) WITH ('connector' = 'datagen', 'count' = '1');
        CREATE TABLE t ({columns}) WITH ('connector' = 'parquet', 'path' = '{tmp_path}/t');
        INSERT INTO t SELECT NULL, NULL, NULL, NULL, NULL, NULL, NULL FROM one""")
    (part,) = (tmp_path / "t").glob("part-*")
    types = [str(kind) for kind in pq.read_schema(part).types]
    assert types == [
        "bool", "int64", "double", "string", "binary", "date32[day]", "timestamp[us]",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("connector", "columns", "written"),
    [
        ("csv", "item STRING, price DECIMAL(9, 2), at TIMESTAMP, d DATE, ok BOOLEAN, x DOUBLE", []),
        ("jsonl", "item STRING, price DECIMAL(9, 2), at TIMESTAMP, d DATE, ok BOOLEAN, x DOUBLE",
         ['{"item":"tea","price":"1.50","at":"2026-01-31 10:00:00.5","d":"2026-01-31",'
          '"ok":true,"x":2.0}']),
        ("parquet", "item STRING, at TIMESTAMP, d DATE, ok BOOLEAN, x DOUBLE", []),
        ("sqlite", "item STRING, at TIMESTAMP, d DATE, x DOUBLE", []),
        ("lines", "item STRING", ["tea"]),
    ],
)  # fmt: skip
async def test_values_come_back_from_a_table_as_they_were_written(
    connector: str, columns: str, written: list[str], tmp_path: Path
) -> None:
    """Given all types of a connector, one script writes what another one reads."""
    names = [one.split()[0] for one in re.split(r",\s+(?=[a-z])", columns)]
    values = {
        "item": "'tea'", "price": "CAST('1.5' AS DECIMAL(9, 2))", "ok": "TRUE", "x": "2",
        "at": "TIMESTAMP '2026-01-31 10:00:00.500'", "d": "DATE '2026-01-31'",
    }  # fmt: skip
    table = f"'connector' = '{connector}', 'path' = '{tmp_path}/t'"
    if connector == "sqlite":
        table += ", 'table' = 't'"
        execute(tmp_path / "t", f"CREATE TABLE t ({', '.join(names)})")
    one = "CREATE TABLE one (index BIGINT) WITH ('connector' = 'datagen', 'count' = '1');"
    chosen = ", ".join(values[name] for name in names)
    await run(f"""{one} CREATE TABLE t ({columns}) WITH ({table});
        INSERT INTO t SELECT {chosen} FROM one""", checkpoints=str(tmp_path / "state"))  # fmt: skip
    if written:
        assert lines(tmp_path / "t") == written
    rows = await (
        af.Flow("read")
        .sql(f"CREATE TABLE t ({columns}) WITH ({table}); SELECT {', '.join(names)} FROM t")
        .collect()
    )
    expected = await (
        af.Flow("values")
        .sql(f"{one} SELECT {', '.join(f'{values[n]} AS {n}' for n in names)} FROM one")
        .collect()
    )
    assert rows == expected


@pytest.mark.parametrize("workers", [0, 2])
async def test_rows_of_a_table_travel_between_processes(
    workers: int, bids: Path, tmp_path: Path
) -> None:
    """The class of the records is made by the script, so no other process can import it."""
    flow = af.Flow("script", parallelism=2)
    flow.sql_script(f"""{TABLE}
        CREATE TABLE out (item STRING, n BIGINT)
          WITH ('connector' = 'jsonl', 'path' = '{tmp_path}/out');
        INSERT INTO out SELECT item, count(*) FROM TUMBLE(bids, at, INTERVAL '1' HOUR)
          WHERE item <> 'x' GROUP BY item, window_start, window_end""")
    await flow.execute(workers=workers)
    assert sorted(lines(tmp_path / "out")) == ['{"item":"cup","n":1}', '{"item":"tea","n":2}']


def test_every_connector_with_texts_as_arguments_is_known() -> None:
    """A new connector of `af.io` is a table without a change here, or is named here."""
    of_objects = {"arrow", "hybrid", "queue", "spark"}
    no_rows = {"drop_postgres_slot", "formats", "push"}
    functions = {one for one in af.io.__all__ if one.islower()}
    assert functions - {*connectors()} == of_objects | no_rows


def test_options_are_the_arguments_of_the_connector() -> None:
    for name in connectors():
        parameters = inspect.signature(getattr(af.io, name)).parameters
        for option in parameters:
            given = str(parameters[option].annotation)
            is_object = given.startswith(("type", "Callable", "ssl."))
            if name != "datagen":
                assert (option in options_of(name)) is not is_object, (name, option)


@pytest.mark.parametrize("name", connectors())
def test_a_secret_is_in_no_plan_and_in_no_error(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Given a secret as any option with a text, neither plan nor log nor error shows it."""
    monkeypatch.setenv("SECRET", "tr0ub4dor")
    needed = {
        one.name: {"port": "80", "table": "t", "topic": "t", "subject": "s", "stream": "s"}.get(
            one.name, "x"
        )
        for one in inspect.signature(getattr(af.io, name)).parameters.values()
        if one.default is one.empty and one.name != "fn"
    }
    urls = {"dsn": {"postgres": "postgresql", "mysql": "mysql"}.get(name, "x"), "url": "redis"}
    for option, kinds in options_of(name).items():
        suffix = ".x" if any(kind.startswith("Mapping") for kind in kinds) else ""
        value = "${SECRET}"
        if option in urls:
            scheme = urls[option] if name in ("postgres", "mysql", "redis") else "http"
            value = f"{scheme}://u:${{SECRET}}@h/d"
        given = {**needed, option + suffix: value}
        if name == "fn":
            continue
        options = ", ".join(f"'{key}' = '{text}'" for key, text in given.items())
        columns = "index BIGINT" if name == "datagen" else "a STRING, b BIGINT"
        table = f"CREATE TABLE t ({columns}) WITH ('connector' = '{name}', {options});"
        found = []
        for text in (
            "EXPLAIN SELECT * FROM t",
            "INSERT INTO t SELECT * FROM t",
            "CREATE TABLE t2 (a INT) WITH ('connector' = 'blackhole'); SELECT nothing FROM t",
        ):
            console = Shown()
            shown = console.texts
            flow = af.Flow("script")
            try:
                script(flow, f"{table} {text}", {}, console=console)
            except af.SqlError as error:
                shown.append(str(error))
            shown += [repr(node) for node in flow.graph.nodes.values() if option in ("dsn", "url")]
            found += shown
        if option not in ("path", "table", "topic", "subject", "stream", "tables", "host"):
            assert "tr0ub4dor" not in "\n".join(found), option
    assert "tr0ub4dor" not in caplog.text


@pytest.mark.parametrize(
    ("text", "message", "place"),
    [
        ("CREATE TABLE t (a INT) WITH ('connector' = 'kafak')", "did you mean kafka", "'kafak'"),
        ("CREATE TABLE t (a INT) WITH ('topic' = 'x')", "WITH needs 'connector'", "t"),
        ("CREATE TABLE t (a INT) WITH ('connector' = 'csv', 'path' = 'x', 'delimeter' = ';')",
         "csv has no option 'delimeter'", "'delimeter'"),
        ("CREATE TABLE t (a INT) WITH ('connector' = 'csv')", "csv needs the option 'path'", "t"),
        ("CREATE TABLE t (a INT) WITH ('connector' = 'csv', 'path' = 'x', 'header' = 'maybe')",
         "header is 'maybe', expected true or false", "'maybe'"),
        ("CREATE TABLE t (a INT) WITH ('connector' = 'nats', 'servers' = 'nats://h', "
         "'subject' = 's', 'format' = 'jsn')", "format is 'jsn'", "'format' = 'jsn'"),
        ("CREATE TABLE t (a INT) WITH ('connector' = 'jsonl', 'path' = 'x', 'path' = 'y')",
         "'path' is given twice", "'path'"),
        ("CREATE TABLE t (a INT) WITH ('connector' = 'jsonl', 'path' = '${NO_SUCH}')",
         "no variable NO_SUCH", "'${NO_SUCH}'"),
        ("CREATE TABLE t (a INT, a INT) WITH ('connector' = 'blackhole')", "stands twice", "a"),
        ("CREATE TABLE t (a INT, PRIMARY KEY (b)) WITH ('connector' = 'blackhole')",
         "b is no column", "b"),
        ("CREATE TABLE t (a INTT) WITH ('connector' = 'blackhole')", "", ""),
        ("CREATE TABLE t (a INT, WATERMARK FOR a AS a + INTERVAL '1' SECOND) "
         "WITH ('connector' = 'blackhole')", "write WATERMARK FOR a AS a - INTERVAL", "a"),
        ("CREATE TABLE t (a INT) WITH ('connector' = 'datagen')", "column index", "t"),
        ("CREATE TABLE t (a INT)", "CREATE TABLE ends with WITH", ")"),
        ("CREATE TABLE t (a INT METADATA) WITH ('connector' = 'kafka')", "METADATA", "METADATA"),
        ("SET 'parallelism' = '3'", "SET parallelism is not known", ""),
        ("DROP TABLE t", "a script has CREATE TABLE", ""),
        ("SELECT 1", "shows no rows and no plan", ""),
    ],
)  # fmt: skip
def test_a_wrong_statement_is_refused_at_its_place(text: str, message: str, place: str) -> None:
    error = refused(text)
    assert message in str(error)
    assert error.span is not None
    if place:
        assert error.text[slice(*error.span)] == place


@pytest.mark.parametrize(
    ("insert", "message"),
    [
        ("INSERT INTO nothing SELECT * FROM bids", "no table 'nothing'"),
        ("INSERT INTO out SELECT item FROM bids", "out takes 2 columns, item, n"),
        ("INSERT INTO out (item, m) SELECT item, price FROM bids", "m is no column of out"),
        ("INSERT INTO out SELECT price, item FROM bids", "write CAST(... AS STRING)"),
        ("INSERT INTO out SELECT item, at FROM bids", "declare n TIMESTAMP"),
        ("INSERT INTO out SELECT item, count(*) FROM bids GROUP BY item",
         "INSERT INTO a table of postgres, mysql, sqlite, delta or iceberg with PRIMARY KEY"),
        ("INSERT INTO key (item) SELECT item FROM bids", "INSERT lacks n of PRIMARY KEY"),
        ("INSERT INTO bids (item) SELECT item FROM unread", "no table 'unread'"),
        ("INSERT INTO events (data) SELECT item FROM bids", "sse is only a source"),
        ("INSERT INTO out SELECT item, 1 FROM hole", "blackhole is only a sink"),
        ("INSERT OVERWRITE out SELECT item, price FROM bids", "INSERT OVERWRITE"),
        ("INSERT INTO out VALUES ('a', 1)", "INSERT INTO needs a SELECT"),
        ("EXPLAIN SELECT item FROM bids", "shows no rows and no plan"),
        ("INSERT INTO out SELECT item, count(*) FROM TUMBLE(bids, price, INTERVAL '1' SECOND) "
         "GROUP BY item, window_start, window_end", "price is not the event time"),
        ("INSERT INTO out SELECT item, PROCTIME() FROM bids", "is PROCTIME()"),
    ],
)  # fmt: skip
def test_a_wrong_insert_is_refused(insert: str, message: str, bids: Path) -> None:
    error = refused(f"""{TABLE}
        CREATE TABLE out (item STRING, n BIGINT) WITH ('connector' = 'jsonl', 'path' = '/x');
        CREATE TABLE hole (item STRING) WITH ('connector' = 'blackhole');
        CREATE TABLE events (data STRING) WITH ('connector' = 'sse', 'url' = 'http://h/');
        CREATE TABLE key (item STRING, n BIGINT, PRIMARY KEY (n))
          WITH ('connector' = 'sqlite', 'path' = '/x', 'table' = 't');
        {insert}""")
    assert message in str(error), str(error)
    assert error.span is not None


@pytest.mark.parametrize(
    ("query", "hint"),
    [
        ("SELECT count(*) FROM TUMBLE(a, ts, INTERVAL '1' HOUR) GROUP BY window_start, window_end",
         "WATERMARK FOR ts AS ts in CREATE TABLE"),
        ("SELECT count(*) OVER (ORDER BY ts) FROM a", "column of WATERMARK in CREATE TABLE"),
        ("SELECT count(*) FROM a JOIN endless e ON a.n = e.index", "SET 'ttl' = '1h' in a script"),
        ("SELECT n FROM a /*+ OPTIONS('follow' = 'true') */", "no hints: move their options"),
        ("SELECT /*+ STATE_TTL('a' = '1d') */ n FROM a", "no hints: move their options"),
    ],
)  # fmt: skip
def test_a_message_names_what_a_script_can_write(query: str, hint: str) -> None:
    error = refused(f"""
        CREATE TABLE a (n BIGINT, ts TIMESTAMP(3)) WITH ('connector' = 'jsonl', 'path' = '/x');
        CREATE TABLE endless (index BIGINT) WITH ('connector' = 'datagen');
        CREATE TABLE out (n BIGINT, PRIMARY KEY (n) NOT ENFORCED)
          WITH ('connector' = 'sqlite', 'path' = '/x', 'table' = 't');
        INSERT INTO out {query}""")
    assert hint in str(error), str(error)
    assert error.span is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("SELEC item FROM bids", "did you mean SELECT?"),
        ("-- all\nISNERT INTO out SELECT item FROM bids", "did you mean INSERT?"),
        ("SET 'ttl' = '1h'; CRATE VIEW v AS SELECT 1", "did you mean CREATE?"),
        ("SELECT 1 FROM TUMBLE(t, ts, 5 MINUTES)", "an interval is written INTERVAL '5' MINUTE"),
    ],
)
def test_a_text_that_is_not_sql_has_a_hint(text: str, message: str) -> None:
    assert message in str(refused(text))


def test_scripts_with_mistakes_run_or_are_refused_at_a_place() -> None:
    for text in SCRIPTS:
        af.Flow("script").sql_script(text)
    for text in mistakes(7, MISTAKES):
        found: af.SqlError | None = None
        try:
            af.Flow("script").sql_script(text)
        except af.SqlError as error:
            found = error
        assert found is None or (found.span is not None and str(found)), text


BODIES = [
    ({"id": "a", "ts": "2026-01-31 10:00:00", "price": 3}, 202, ""),
    ({"id": "b", "ts": 1_000, "more": [], "price": None}, 202, ""),
    ({"ts": 1_000}, 400, "missing required field `id`"),
    ({"id": "c"}, 400, "the column ts is NULL"),
    ({"id": "c", "ts": "soon"}, 400, "'soon' is not a time"),
    (
        {"id": "c", "ts": "2026-01-31 10:00:00", "seen": "then"},
        400,
        "the column seen: 'then' is not a time",
    ),
    ({"id": "c", "ts": 1_000, "price": "dear"}, 400, "at `$.price`"),
    ([{"id": "c", "ts": 1_000}], 400, "Expected `object`"),
]


async def test_a_webhook_table_refuses_a_body_that_would_fail_the_job() -> None:
    port, flow = free_port(), af.Flow("posts")
    flow.sql_script(f"""
        CREATE TABLE posts (
          id STRING NOT NULL, ts TIMESTAMP, seen TIMESTAMP, price DECIMAL(9, 2),
          WATERMARK FOR ts AS ts - INTERVAL '5' SECOND
        ) WITH ('connector' = 'webhook', 'port' = '{port}');
        CREATE VIEW found AS SELECT id, ts, seen, price * 2 AS twice FROM posts;
        CREATE TABLE out (id STRING, ts TIMESTAMP, seen TIMESTAMP, twice DECIMAL(9, 2))
          WITH ('connector' = 'blackhole');
        INSERT INTO out SELECT * FROM found;""")
    async with (
        flow.run(checkpoints="memory://posts", every="1s") as job,
        aiohttp.ClientSession() as session,
    ):
        for body, status, message in BODIES:
            async with session.post(f"http://127.0.0.1:{port}/", json=body) as answer:
                assert (answer.status, message in await answer.text()) == (status, True), body
        await job.savepoint()
        assert job.status == "RUNNING"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"id": "a"}', "n"),
        ('{"id": "a", "n": null}', "null"),
        ('{"id": "a", "n": "7 cups"}', "int"),
        ("[1]", "Expected `object`"),
    ],
)
async def test_a_text_that_is_no_row_of_its_table_is_named(
    text: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "in.txt").write_text(f'{{"id": "ok", "n": 1}}\n{text}\n')
    flow = af.Flow("texts")
    flow.sql_script(f"""
        CREATE TABLE texts (id STRING, n BIGINT NOT NULL)
          WITH ('connector' = 'lines', 'path' = '{tmp_path}/in.txt');
        CREATE TABLE out (id STRING) WITH ('connector' = 'blackhole');
        INSERT INTO out SELECT id FROM texts""")
    with pytest.raises(ValueError, match=message):
        await flow.execute()


def test_explain_shows_the_plan_of_one_statement(bids: Path, tmp_path: Path) -> None:
    console = Shown()
    flow = af.Flow("script")
    script(
        flow,
        f"""{TABLE}
        CREATE TABLE out (n BIGINT) WITH ('connector' = 'blackhole');
        EXPLAIN INSERT INTO out SELECT price FROM bids WHERE price > 3;
        EXPLAIN SELECT item FROM bids""",
        {},
        console=console,
    )
    assert not flow.graph.nodes
    assert "filter" in console.texts[0] and "out" in console.texts[0]
    assert "filter" not in console.texts[1]


# State.


def states(text: str) -> list[str]:
    flow = af.Flow("script")
    flow.sql_script(f"""{TABLE}
        CREATE TABLE sums (item STRING, total BIGINT, ended TIMESTAMP)
          WITH ('connector' = 'blackhole');
        {text}""")
    return [flow.graph.uids()[i] for i, one in flow.graph.nodes.items() if one.stateful]


SUMS = """INSERT INTO sums SELECT item, sum(price), window_end
    FROM TUMBLE(bids, at, INTERVAL '10' SECOND) GROUP BY item, window_start, window_end;"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("FROM TUMBLE(bids, at, INTERVAL '10' SECOND)",
         "FROM TUMBLE(bids, at, INTERVAL '10' SECOND) WHERE price > 3"),
        ("SELECT item,", "SELECT UPPER(item),"),
        ("window_end;", "window_end HAVING sum(price) > 4;"),
        ("INSERT", "CREATE TABLE more (item STRING) WITH ('connector' = 'blackhole');"
         "INSERT INTO more SELECT item FROM bids WHERE price > 1;\nINSERT"),
        ("INSERT", "CREATE VIEW v AS SELECT * FROM bids;\nINSERT"),
        ("FROM TUMBLE(bids,", "FROM TUMBLE(TABLE bids,"),
    ],
)  # fmt: skip
def test_a_change_that_keeps_the_meaning_of_an_operator_keeps_its_uid(
    old: str, new: str, bids: Path
) -> None:
    assert {*states(SUMS)} <= {*states(SUMS.replace(old, new))}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("GROUP BY item,", "GROUP BY item, price,"),
        ("sum(price)", "max(price)"),
        ("'10' SECOND", "'20' SECOND"),
        ("INTO sums", "INTO others"),
    ],
)
def test_another_meaning_is_another_uid(old: str, new: str, bids: Path) -> None:
    """State of another operator must not be taken for that of this one."""
    others = (
        "CREATE TABLE others (a STRING, b BIGINT, c TIMESTAMP) WITH ('connector' = 'blackhole');"
    )
    before, after = states(SUMS), states(others + SUMS.replace(old, new))
    assert before[1] not in after


async def test_a_changed_script_goes_on_from_its_savepoint(tmp_path: Path) -> None:
    """Given counts and a savepoint, when WHERE and an INSERT are added, then the counts go on."""
    words = tmp_path / "words"
    words.mkdir()
    execute(tmp_path / "t.db", "CREATE TABLE counts (word TEXT PRIMARY KEY, n INT)")

    def flow_of(where: str, more: str = "") -> af.Flow:
        flow = af.Flow("words")
        flow.sql_script(f"""
            CREATE TABLE words (word STRING) WITH ('connector' = 'lines',
              'path' = '{words}/*.txt', 'discover-every' = '50ms');
            CREATE TABLE counts (word STRING PRIMARY KEY NOT ENFORCED, n BIGINT)
              WITH ('connector' = 'sqlite', 'path' = '{tmp_path}/t.db', 'table' = 'counts');
            {more}
            INSERT INTO counts SELECT word, count(*) FROM words {where} GROUP BY word""")
        return flow

    async def counted(flow: af.Flow, expected: list[tuple[str, int]]) -> None:
        state = str(tmp_path / "state")
        async with asyncio.timeout(40), flow.run(checkpoints=state, every="100ms") as job:
            while execute(tmp_path / "t.db", "SELECT * FROM counts ORDER BY word") != expected:
                await asyncio.sleep(0.05)
            await job.stop()

    (words / "1.txt").write_text("a\nb\na\n")
    await counted(flow_of(""), [("a", 2), ("b", 1)])
    (words / "2.txt").write_text("a\nb\nc\n")
    more = """CREATE TABLE hole (word STRING) WITH ('connector' = 'blackhole');
        INSERT INTO hole SELECT word FROM words WHERE word > 'a';"""
    await counted(flow_of("WHERE word <> 'b'", more), [("a", 3), ("b", 1), ("c", 1)])


async def test_a_script_runs_in_a_service_beside_other_streams(tmp_path: Path) -> None:
    flow = af.Flow("service")
    prices = flow.source([{"item": "tea", "price": 3}])
    flow.sql_script(
        f"""CREATE TABLE out (item STRING, price BIGINT)
              WITH ('connector' = 'jsonl', 'path' = '{tmp_path}/out');
            INSERT INTO out SELECT item, price + 1 FROM prices""",
        prices=prices,
    )
    async with flow.run() as job:
        await asyncio.wait_for(job.wait(), 30)
    assert lines(tmp_path / "out") == ['{"item":"tea","price":4}']
