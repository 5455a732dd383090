"""Secrets are taken out of text of any shape, and the time for it grows as the text does."""

from __future__ import annotations

import time

import pytest

from aioflow.inspection import redaction
from aioflow.inspection.redaction import HIDDEN, redacted


@pytest.mark.parametrize(
    "text",
    [
        "password=hunter2", 'api_key: "hunter2"', "{'token': 'hunter2'}",
        "Authorization: Bearer hunter2", "DB_PASSWORD = hunter2", "Bearer hunter2hunter2",
        "secret=hunter2&x=1", "aws_secret_access_key=hunter2", "AWS_SECRET_ACCESS_KEY=hunter2",
        "pwd=hunter2", "PGPASSWORD=hunter2", "pass: hunter2", "passphrase: 'a hunter2'",
        "token => hunter2", "sig=hunter2", "password=b'hunter2'", "password='it\\'s hunter2'",
        "password: str = 'hunter2'", "password = {'a': 'hunter2'}", '{"password": "hun\\"hunter2"}',
        '{\\"password\\": \\"a hunter2\\"}', "sasl_plain_password='hunter2'", "--password hunter2",
        "--api-key=hunter2", "['--password', 'hunter2', '-x']", "postgres://me:hunter2@db/x",
        "redis://:hunter2@h", "redis://u:hunter2@hunter2@h:1/0", "postgres://u:hun/hunter2@h/p",
        "nats://hunter2@h:4222", "https://a:hunter2@a,http://b:hunter2@b",
        "wss://h/x?access_token=hunter2&a=b", "wss://h?key=hunter2",
        "s3://bucket?X-Amz-Signature=hunter2", "AccountKey=hunter2",
        "{'Cookie': 'a=1; b=hunter2', 'x': 1}", (
            "-----BEGIN PRIVATE KEY-----\nhunter2\n"
            "-----END PRIVATE KEY-----"
        ),
    ],
)  # fmt: skip
def test_secrets_are_hidden_and_the_rest_stays(text: str) -> None:
    shown = redacted(f"before {text} after")
    assert "hunter2" not in shown
    assert shown.startswith("before ")
    assert shown.endswith(" after")


@pytest.mark.parametrize(
    "line",
    [
        "Cookie: a=1; b=hunter2", "Set-Cookie: a=hunter2; path=/", (
            'Authorization: Digest '
            'username="x", response="hunter2"'
        ),
        "Authorization: AWS4-HMAC-SHA256 Credential=a/b, "
        "SignedHeaders=host, Signature=hunter2", "password='not closed, hunter2",
    ],
)  # fmt: skip
def test_headers_and_open_quotes_are_hidden_to_the_end_of_the_line(line: str) -> None:
    shown = redacted(f"before\n{line}\nafter")
    assert "hunter2" not in shown
    assert shown.startswith("before\n")
    assert shown.endswith("\nafter")


@pytest.mark.parametrize(
    "text",
    [
        "", "tokens were counted", "passwords differ", "http://host:80/path",
        "http://[::1]:8081/jobs", "key=value", "a: b", "passed: 3", "bypass=1", "--name x",
        "KeyError: 'token'", "the design=5", "http://host:80/@scope/package",
    ],
)  # fmt: skip
def test_plain_text_is_left_alone(text: str) -> None:
    assert redacted(text) == text


def test_a_name_keeps_its_place_beside_a_hidden_value() -> None:
    assert (
        redacted("connect(host='db', password='x', port=1)")
        == f"connect(host='db', password={HIDDEN}, port=1)"
    )
    assert redacted("postgres://me:x@db:5432/app") == f"postgres://me:{HIDDEN}@db:5432/app"


def test_a_long_text_is_cut_and_says_how_much_is_missing() -> None:
    assert redacted("x" * 30, 10) == "xxxxxxxxxx ... (20 more characters)"


@pytest.mark.parametrize(
    "text", ["x postgres://me:hunter2@db", "x password='hunter2", "x token=hunter2"]
)
def test_a_secret_that_is_cut_in_two_is_hidden(text: str) -> None:
    for length in range(text.index("hunter2") + 1, len(text)):
        assert (
            "hunter2"[: length - text.index("hunter2")]
            not in redacted(text, length).partition(" ... ")[0]
        )


SHAPES = [
    "a", "-", "a.", "token", "token=", "token:", "token = ", "token ", "token='", 'token="',
    'token="\\"', 'token=\\"', "token=\\", "token=(", "token=[", "token\\", "token==>",
    "token=token ", "token=aws4-", "token=digest ", "password: x = ", "api_", "sig", "pass",
    "cookie", "cookie:", 'cookie:"', "cookie\\", "--", "--a", "--a ", "--token ", "--a,", " --a\t",
    "://", "://a:", "a://u:p@", "://[", "aaaa@", "bearer ", "basic  ", "?key=", "&key=&",
    "-----BEGIN ", "-----BEGIN PRIVATE KEY-----", "eyJ.", "\\", "'", '"',
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_redaction_takes_time_in_proportion_to_the_text(shape: str) -> None:
    """Sixteen times the text takes sixteen times as long; 256 times would be the sign of a
    pattern that goes back.
    """

    def least_s(length: int) -> float:
        text = "token ://x bearer --y " + (shape * length)[:length]
        times = []
        for _ in range(5):
            began = time.process_time()
            redacted(text)
            times.append(time.process_time() - began)
        return min(times)

    assert least_s(65_000) < 80 * least_s(4_000)


def test_a_hidden_value_that_begins_with_another_one_is_hidden_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(redaction, "_hidden_values", ())
    for value in ("canary", "canary-77aa", "short"):
        redaction.hide(value)
    assert redacted("canary-77aa, canary, short") == "***, ***, short"
