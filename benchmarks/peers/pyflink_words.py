"""PyFlink, parallelism 2: the running count of each word of a directory of text files, in a Java
that stays up between the jobs.

    python -m benchmarks.peers.pyflink_words

It reads one request a line and answers each with a line of JSON: `{"do": "run", "directory": ...,
"settings": {...}}` throws the pairs away in Java, where they come out of Python, and `"do":
"collect"` tells what they were. `settings` are Flink's own. Java's CPU time, and that of the Python
processes it starts, is found from outside: they descend from this process.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

from pyflink.common import Configuration, Types, WatermarkStrategy
from pyflink.datastream import DataStream, MapFunction, RuntimeContext, StreamExecutionEnvironment
from pyflink.datastream.connectors.base import Sink
from pyflink.datastream.connectors.file_system import FileSource, StreamFormat
from pyflink.datastream.state import ValueStateDescriptor
from pyflink.java_gateway import get_gateway

PARALLELISM = 2


class SoFar(MapFunction):  # type: ignore[misc]
    def open(self, context: RuntimeContext) -> None:
        self._count = context.get_state(ValueStateDescriptor("count", Types.LONG()))

    def map(self, word: str) -> tuple[str, int]:
        n = (self._count.value() or 0) + 1
        self._count.update(n)
        return word, n


def counts(
    directory: str, settings: Mapping[str, str]
) -> tuple[StreamExecutionEnvironment, DataStream]:
    chosen = Configuration()
    for name, value in {
        "python.executable": sys.executable,
        "rest.bind-port": "0",
        **settings,
    }.items():
        chosen.set_string(name, value)
    env = StreamExecutionEnvironment.get_execution_environment(chosen)
    env.set_parallelism(PARALLELISM)
    files = FileSource.for_record_stream_format(StreamFormat.text_line_format(), directory).build()
    # Lower case in the step that splits: one Python call a line, where another step would be one a
    # word.
    words = env.from_source(files, WatermarkStrategy.no_watermarks(), "files").flat_map(
        lambda line: line.lower().split(), Types.STRING()
    )
    return env, words.key_by(lambda word: word, Types.STRING()).map(
        SoFar(), Types.TUPLE([Types.STRING(), Types.LONG()])
    )


def answer(asked: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """How often each pair came out; nothing of a run that throws them away."""
    env, counted = counts(asked["directory"], asked["settings"])
    if asked["do"] == "collect":
        with counted.execute_and_collect() as rows:
            return [(word, n, times) for (word, n), times in Counter(map(tuple, rows)).items()]
    counted.sink_to(
        Sink(get_gateway().jvm.org.apache.flink.streaming.api.functions.sink.v2.DiscardingSink())
    )
    env.execute("words")
    return []


def main() -> None:
    # Java and the workers write to file descriptor 1 as they like: the answers go where it led
    # before.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
