"""How the jobs of a cluster are listed."""

from __future__ import annotations

import pytest

from aioflow.cli.jobs import how_far, print_jobs
from aioflow.cluster.execution_graph import JobStatus
from aioflow.cluster.submission import JobLine


def line(
    status: JobStatus = JobStatus.RUNNING, *progress: int, name: str = "shop", error: str = ""
) -> JobLine:
    ended = 2 if status.is_terminal else None
    return JobLine("a1" * 16, name, status, 1, ended, error, "", *progress)


@pytest.mark.parametrize(
    ("job", "shown"),
    [
        (line(JobStatus.RUNNING, 0, 0, 6, 2), "RUNNING 0/6 tasks (waits for 2 slots)"),
        (line(JobStatus.RUNNING, 0, 0, 6, 1), "RUNNING 0/6 tasks (waits for 1 slot)"),
        (line(JobStatus.RUNNING, 6, 0, 6, 0), "RUNNING 6/6 tasks"),
        (line(JobStatus.RUNNING, 2, 4, 6, 0), "RUNNING 2/6 tasks (4 finished)"),
        (
            line(JobStatus.RESTARTING, 0, 1, 6, 2),
            "RESTARTING 0/6 tasks (waits for 2 slots, 1 finished)",
        ),
        (line(JobStatus.INITIALIZING), "INITIALIZING"),
        (line(JobStatus.FINISHED, 0, 6, 6, 0), "FINISHED"),
    ],
)
def test_a_job_that_is_not_over_says_how_many_of_its_tasks_run_and_what_it_waits_for(
    job: JobLine, shown: str
) -> None:
    assert how_far(job) == shown


def test_names_stand_below_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    print_jobs(
        [
            line(JobStatus.RUNNING, 0, 0, 6, 2),
            line(JobStatus.FAILED, name="other", error="ValueError: no 1\naioflow: in map"),
        ]
    )

    first, second = capsys.readouterr().out.splitlines()
    assert first.index("shop") == second.index("other")
    assert second.endswith("other  ValueError: no 1")


def test_a_list_of_jobs_that_are_over_looks_as_ever(capsys: pytest.CaptureFixture[str]) -> None:
    print_jobs([line(JobStatus.FAILED, name="other", error="ValueError: no 1")])

    assert capsys.readouterr().out == f"{'a1' * 16}  FAILED        other  ValueError: no 1\n"


def test_no_jobs_are_said_to_be_none(capsys: pytest.CaptureFixture[str]) -> None:
    print_jobs([])

    assert capsys.readouterr().out == "no jobs\n"
