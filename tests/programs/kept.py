"""Programs that found something, made small: what it was, the way to run it, and the program."""

from __future__ import annotations

from tests.programs.program import Program, Step

__all__ = ["KEPT"]

KEPT: dict[str, tuple[str, Program]] = {
    "event time ended before timers of the clock fired at the end": (
        "restarted",
        Program(
            351,
            True,
            (
                Step(
                    "source",
                    (),
                    {
                        "rows": [(9, 70, 359, None), (3, -20, 279, -1)],
                        "type": "D",
                        "keys": "int",
                        "delay": 0,
                        "strategy": "punctuated",
                        "stamp": "expression",
                        "columnar": False,
                    },
                ),
                Step(
                    "keyed_process",
                    (0,),
                    {
                        "parallelism": 3,
                        "cls": "AtEnd",
                        "init": {},
                        "key": "first_key",
                        "key_form": "partial",
                    },
                ),
                Step(
                    "window",
                    (1,),
                    {
                        "parallelism": 1,
                        "key": "key_of",
                        "key_form": "name",
                        "window": {"kind": "global"},
                        "result": {"kind": "process"},
                    },
                ),
            ),
            (2,),
        ),
    ),
    "a batch that began with bytes was taken for one of bytes alone": (
        "plainly",
        Program(
            300104,
            False,
            (
                Step(
                    "source",
                    (),
                    {
                        "rows": [
                            (0, 5, 0, {"a": {"b": None}, 1: "x"}),
                            ("", 1, 0, None),
                            (1.5, 5, 0, ()),
                        ],
                        "type": "N",
                        "keys": "odd",
                        "delay": 0,
                        "strategy": "bounded",
                        "stamp": "lambda",
                        "columnar": False,
                    },
                ),
                Step(
                    "running",
                    (0,),
                    {
                        "agg": "aggregate",
                        "key": "odd_key",
                        "key_form": "object",
                        "spec": [("", "count", "n_of", None)],
                    },
                ),
            ),
            (1,),
        ),
    ),
    "an async process function got elements of a checkpoint twice": (
        "restored",
        Program(
            920011,
            True,
            (
                Step(
                    "source",
                    (),
                    {
                        "rows": [
                            ("k1" if i in (3, 4) else "k0", 10 + i, 4503599627370556 + 7 * i, "")
                            for i in range(16)
                        ],
                        "type": "S",
                        "keys": "str",
                        "delay": 40,
                        "strategy": "punctuated",
                        "stamp": "expression",
                        "columnar": False,
                    },
                ),
                Step(
                    "keyed_process",
                    (0,),
                    {"cls": "AwaitedTotals", "init": {}, "key": ("col", "key"), "key_form": "name"},
                ),
                Step("map", (1,), {"fn": "record_of", "form": "blocking"}),
            ),
            (2,),
        ),
    ),
    "an async function took elements of another batch where columns and rows came in turn": (
        "on_columns",
        Program(
            1100068,
            False,
            (
                Step(
                    "source",
                    (),
                    {
                        "rows": [(i % 3, i, 10 * i, 1.5) for i in range(40)],
                        "type": "dict",
                        "keys": "int",
                        "delay": 40,
                        "strategy": "bounded",
                        "stamp": "expression",
                        "columnar": True,
                    },
                ),
                Step("map", (0,), {"fn": "doubled", "form": "name"}),
                Step("union", (1, 0), {}),
                Step("flat_map", (2,), {"fn": "some", "form": "async"}),
            ),
            (3,),
        ),
    ),
}
