"""The arguments of `flow.run(checkpoints=..., every=...)`, and their checks before the start."""

import importlib.util
from datetime import timedelta
from pathlib import Path

import pytest

import aioflow as af
from aioflow.api.options import parse_options


def test_without_checkpoints_nothing_is_taken_or_restored():
    options = parse_options({})
    assert options.checkpoint_settings() is None
    assert not options.restart.retries


def test_a_store_alone_is_enough():
    options = parse_options({"checkpoints": "memory://a"})
    settings = options.checkpoint_settings()
    assert (settings.store, settings.every_ms, settings.restore, settings.retain) == (
        "memory://a",
        10_000,
        "latest",
        1,
    )
    assert str(options.restart) == str(af.exponential_delay())


def test_a_policy_that_was_given_stands():
    assert not parse_options(
        {"checkpoints": "memory://a", "restart": af.no_restart()}
    ).restart.retries


@pytest.mark.parametrize(
    "given, url",
    [
        ("file:///var/lib/app", "file:///var/lib/app"),
        ("file:///var/lib/app/", "file:///var/lib/app"),
        (Path("/var/lib/an app"), "file:///var/lib/an%20app"),
        ("/var/lib/app", "file:///var/lib/app"),
        ("memory://tests", "memory://tests"),
    ],
)
def test_a_store_is_a_url_or_a_directory(given, url):
    assert parse_options({"checkpoints": given}).checkpoint_settings().store == url


def test_a_directory_is_found_from_where_the_program_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (
        parse_options({"checkpoints": "below"}).checkpoint_settings().store
        == f"file://{tmp_path}/below"
    )


@pytest.mark.parametrize(
    "unaligned, overtakes",
    [
        (False, (False, None)),
        (True, (True, None)),
        ("2s", (False, 2000)),
        (timedelta(seconds=1), (False, 1000)),
    ],
)
def test_barriers_overtake_from_the_start_or_after_some_time(unaligned, overtakes):
    settings = parse_options(
        {"checkpoints": "memory://a", "unaligned": unaligned}
    ).checkpoint_settings()
    assert (settings.unaligned, settings.aligned_timeout_ms) == overtakes


def test_a_savepoint_is_a_url_or_a_directory():
    settings = parse_options(
        {"checkpoints": "memory://a", "restore": "/somewhere/savepoint"}
    ).checkpoint_settings()
    assert settings.restore == "file:///somewhere/savepoint"


def test_a_savepoint_needs_no_store():
    options = parse_options({"restore": "/somewhere/savepoint", "allow_non_restored": True})
    settings = options.checkpoint_settings()
    assert (settings.store, settings.restore, settings.allow_non_restored) == (
        None,
        "file:///somewhere/savepoint",
        True,
    )
    assert not options.restart.retries, "nothing outlives a failure but what it began with"


@pytest.mark.parametrize("name", ["every", "timeout", "min_pause"])
def test_times_of_checkpoints_need_checkpoints(name):
    with pytest.raises(
        ValueError,
        match=rf"{name}= is about checkpoints, and there are none: give checkpoints=URL too",
    ):
        parse_options({name: "1s"})


@pytest.mark.parametrize(
    "given, message",
    [
        (
            {"restore": "latest"},
            r"restore='latest' looks into a store, and there is none: give checkpoints=URL too, "
            r"or a savepoint's path",
        ),
        (
            {"allow_non_restored": True},
            r"allow_non_restored=True is about a savepoint, and there is none: give restore=PATH",
        ),
        (
            {"restore": "/a/savepoint", "every": "1s"},
            r"every= is about checkpoints, and there are none",
        ),
        (
            {"checkpoints": "memory://a", "fresh": True},
            r"fresh=True begins without state, restore='latest' with some",
        ),
        (
            {"checkpoints": "ftp://a/b"},
            r"stores have the schemes file://, memory://, s3://, gs://, az://",
        ),
        ({"checkpoints": "file://a/b"}, r"a file URL has three slashes"),
        ({"checkpoints": "memory://"}, r"a store needs a name after the scheme"),
        (
            {"checkpoints": "memory:/a"},
            r"the scheme is written memory://; a directory of that name is \./memory:/a",
        ),
        ({"restore": "s3:bucket/a"}, r"restore is 's3:bucket/a': the scheme is written s3://"),
        (
            {"checkpoints": "memory://a", "every": "0s"},
            r"every is '0s', expected more than nothing",
        ),
        ({"checkpoints": "memory://a", "every": "soon"}, r"every is 'soon'"),
        (
            {"checkpoints": "memory://a", "unaligned": "0s"},
            r"unaligned is '0s', expected more than nothing",
        ),
        (
            {"checkpoints": "memory://a", "unaligned": "1m", "timeout": "30s"},
            r"is given up after timeout='30s': give a shorter time",
        ),
        ({"unaligned": True}, r"unaligned= is about checkpoints, and there are none"),
        (
            {"checkpoints": "memory://a", "min_pause": "-1s"},
            r"min_pause is '-1s', expected a time that is not negative",
        ),
        (
            {"checkpoints": "memory://a", "max_concurrent": 0},
            r"max_concurrent is 0, expected how many checkpoints may be under way",
        ),
        (
            {"checkpoints": "memory://a", "max_concurrent": 2, "unaligned": True},
            r"unaligned checkpoints are taken one at a time",
        ),
        ({"checkpoints": "memory://a", "retain": 0}, r"retain is 0, expected how many"),
        ({"checkpoints": "memory://a", "tolerable_failures": -1}, r"tolerable_failures is -1"),
    ],
)
def test_impossible_options_are_refused_with_a_remedy(given, message):
    with pytest.raises(ValueError, match=message):
        parse_options(given)


def test_a_store_that_is_no_text_is_refused():
    with pytest.raises(
        TypeError,
        match=r'checkpoints= takes a URL like "file:///var/lib/app", or a directory; got int: 3',
    ):
        parse_options({"checkpoints": 3})


def test_a_store_whose_package_is_missing_names_the_command_that_installs_it(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "obstore" else find_spec(name)
    )
    with pytest.raises(ValueError, match=r"pip install 'aioflow\[s3\]'"):
        parse_options({"checkpoints": "s3://bucket/app"})


@pytest.mark.parametrize(
    "given, directory",
    [(False, None), (True, ""), ("/fast/disk", "/fast/disk"), (Path("/fast"), "/fast")],
)
def test_local_copies_are_in_a_directory_of_each_machine(given, directory):
    options = parse_options({"checkpoints": "memory://a", "local_recovery": given})
    assert options.local_directory == directory


@pytest.mark.parametrize("wrong", ["", 1, "s3://bucket"])
def test_local_copies_are_in_no_other_place(wrong):
    with pytest.raises(TypeError, match="local_recovery= takes True, or a directory"):
        parse_options({"checkpoints": "memory://a", "local_recovery": wrong})


def test_local_copies_without_checkpoints_are_refused():
    with pytest.raises(ValueError, match="local_recovery= is about checkpoints"):
        parse_options({"local_recovery": True})
