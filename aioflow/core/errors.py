"""Every error of the engine: one base, one class for each remedy.

    AioflowError
    ├── GraphError            the program is wrong; raised while the flow is built
    ├── TypeNotSupported      a value cannot be a key, or cannot travel
    │   └── ValueNotSupported     raised by the engine itself: no restart helps
    ├── Closed                you used something after you (or its owner) closed it
    │   └── MailboxClosed     a mail was put into, or taken from, a mailbox that is shut
    ├── Broken                the other side, or the world, went away
    │   └── ProducerFailed    the upstream task failed: its consumers are cancelled, not failed
    ├── ProtocolError
    │   ├── LocalProtocolError    our own side broke the protocol: a bug of this program
    │   └── RemoteProtocolError   the peer sent something that the protocol does not allow
    │       └── MalformedInput    a source read data that is not in the expected format
    ├── JobError
    │   ├── JobFailed         the job ended FAILED; the cause is chained
    │   ├── JobCanceled       the job ended CANCELED while a caller waited for its result
    │   ├── JobNotRunning     the job is not in a state in which it can answer
    │   └── RescaleError      the job goes on at the parallelism that it had
    ├── CancellationTimeout   user code did not end on its cancellation
    ├── NoResourceAvailable   a cluster has fewer slots than a job needs
    ├── CheckpointError       a checkpoint or savepoint could not be made
    ├── RestoreError          a checkpoint or savepoint could not be read back
    ├── StateError            state was used where there is none, or against its declaration
    ├── InsufficientBuffers   the network buffer pool cannot serve what was asked
    ├── RemoteError           an error of another process whose class is not loaded here
    └── NotAuthenticated      the peer did not prove that it knows the secret

Messages say what happened, to what, what was expected, and what to do. Each class stands for a
remedy, not for the place that raised the error. Details are in the message.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = [
    "AioflowError",
    "Broken",
    "CancellationTimeout",
    "CheckpointError",
    "Closed",
    "GraphError",
    "InsufficientBuffers",
    "JobCanceled",
    "JobError",
    "JobFailed",
    "JobNotRunning",
    "LocalProtocolError",
    "MailboxClosed",
    "MalformedInput",
    "NoResourceAvailable",
    "NotAuthenticated",
    "ProcessCrashed",
    "ProducerFailed",
    "ProtocolError",
    "RemoteError",
    "RemoteProtocolError",
    "RescaleError",
    "RestoreError",
    "StaleLeader",
    "StateError",
    "TypeNotSupported",
    "ValueNotSupported",
    "counted",
    "describe_record",
    "did_you_mean",
    "message_of",
    "note_once",
    "place_note",
    "with_article",
]


class AioflowError(Exception):
    """Base of all errors that the engine raises itself.

    Errors of user code are raised unchanged, with a note.
    """


class GraphError(AioflowError):
    """The flow is wrong. Raised while the flow is built, with the name of the operator."""


class TypeNotSupported(AioflowError, TypeError):
    """A value cannot be used as a key, or cannot be encoded. The message names the type and the
    remedy.
    """


class ValueNotSupported(TypeNotSupported):
    """The engine itself has rejected a value.

    A restart would reach the same value, so the job is not restarted. A TypeNotSupported that user
    code raises is an error of user code, and `restart=` applies to it.
    """


class Closed(AioflowError):
    """An object was used after its owner closed it."""


class MailboxClosed(Closed):
    """The mailbox no longer accepts mail (QUIESCED), or no longer holds any (CLOSED)."""


class Broken(AioflowError):
    """The connection to the peer, or to another external resource, has failed or ended."""


class ProcessCrashed(Broken):
    """A process ended by itself: with an exit code, or by a signal that its own code causes,
    like SIGSEGV.
    """


class ProducerFailed(Broken):
    """The task that produces this input failed. Its consumers end CANCELED, not FAILED."""


class ProtocolError(AioflowError):
    """Base of the two protocol errors, which tell whether this process or the peer is at fault."""


class LocalProtocolError(ProtocolError):
    """This process broke the protocol, which is a bug of this program."""


class RemoteProtocolError(ProtocolError):
    """The peer sent, or a file contains, something that the protocol or the format does not
    allow.
    """


class MalformedInput(RemoteProtocolError, ValueError):
    """A source read data that is not in the expected format.

    The message names file and line. Correct the data, or let the source skip it with `on_error=`.
    """


class JobError(AioflowError):
    """Base of the errors of a job as a whole."""


class JobFailed(JobError):
    """The job ended FAILED. The first cause is chained as `__cause__`."""


class JobCanceled(JobError):
    """The job ended CANCELED while its result was awaited."""


class JobNotRunning(JobError):
    """The job cannot answer now, because it has not started, has been restarting for too long, or
    is over.
    """


class RescaleError(JobError):
    """The job cannot be rescaled now, and goes on at the parallelism that it had."""


class CancellationTimeout(AioflowError):
    """A function, or its `close()`, did not end within `cancellation_timeout` after it was
    cancelled. The message names the operator, and the place where its code waits.

    Let CancelledError pass: code that catches it has to raise it again.
    """


class NoResourceAvailable(AioflowError):
    """The whole cluster has fewer slots than the job needs at its lowest parallelism.

    Add workers, or lower the parallelism.
    """


class CheckpointError(AioflowError):
    """A checkpoint or savepoint could not be completed."""


class RestoreError(AioflowError):
    """A checkpoint or savepoint could not be restored."""


class StateError(AioflowError):
    """State was used where there is none (no `key_by`, no current key) or against its
    declaration.
    """


class InsufficientBuffers(AioflowError, OSError):
    """The network memory of a process is smaller than its inputs and outputs require together."""


class RemoteError(AioflowError):
    """An error from another process whose class is not loaded here.

    `type_name` is the qualified name of the original class, `traceback_text` its traceback as text.
    """

    def __init__(self, type_name: str, message: str, traceback_text: str = "") -> None:
        super().__init__(f"{type_name}: {message}")
        self.type_name = type_name
        self.traceback_text = traceback_text


class NotAuthenticated(AioflowError):
    """The peer did not prove that it knows the secret, or has another role."""


class StaleLeader(AioflowError):
    """A message or a write came from a leader that another leader has replaced.

    The old leader must stop; the request had no effect. A fencing token is a positive integer from
    `leadership`. The larger of two tokens belongs to the newer leader. A receiver keeps the largest
    token that it has seen for a role and refuses smaller ones.
    """


def with_article(noun: str) -> str:
    """Returns `noun` with "a" or "an" before it, as in "a dict" or "an int", for messages to
    users.
    """
    return f"{'an' if noun[:1].lower() in tuple('aeiou') else 'a'} {noun}"


def counted(number: int, noun: str) -> str:
    """Returns the number with the noun, such as "1 slot" or "2 slots"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def did_you_mean(
    given: object, known: Iterable[str], shown: str = "{!r}", likeness: float = 0.6
) -> str:
    """Returns the text "; did you mean ...?" for the end of a message about `given`. Returns "" if
    no name in `known` is similar to `given`.

    `shown` is the format in which the text shows the similar name. `likeness` is the minimum
    similarity, from 0 to 1 (equal).
    """
    import difflib  # Imported late, because only wrong programs need it.

    near = difflib.get_close_matches(str(given), list(known), 1, likeness)
    return f"; did you mean {shown.format(near[0])}?" if near else ""


def note_once(error: BaseException, note: str) -> None:
    """Adds `note` to `error` unless the error already has a note of the engine.

    The innermost code adds its note first, and that note is the most precise.
    """
    if place_note(error) is None:
        add_note(error, f"aioflow: {note}")


def add_note(error: BaseException, note: str) -> None:
    """Adds `note` to `error`, even if its class is frozen, in which case `error.add_note` would
    fail.
    """
    error.__dict__.setdefault("__notes__", []).append(note)


def message_of(error: BaseException) -> str:
    """Returns `str(error)`.

    If the `__str__` of a user's error fails, returns a text that names this failure.
    """
    try:
        return str(error)
    # Nothing is awaited, so even a CancelledError comes from the function.
    except BaseException as failure:  # noqa: BLE001
        return f"(its message cannot be shown: {type(failure).__name__})"


def place_note(error: BaseException) -> str | None:
    """Returns the note of the engine that says where `error` was raised, or None without one."""
    notes = map(str, error.__dict__.get("__notes__", ()))
    return next((note for note in notes if note.startswith("aioflow: ")), None)


RECORD_TEXT_MAX = 200
"""Maximum number of characters of a record in an error message."""


def describe_record(value: Any) -> str:
    """Returns the shortened repr of a record, for an error message. If the repr itself fails,
    returns a replacement.
    """
    try:
        text = repr(value)
    # The error that is being described matters more than any error of `repr`.
    except Exception as error:  # noqa: BLE001
        return f"<{type(value).__name__} whose repr raised {type(error).__name__}>"
    return text if len(text) <= RECORD_TEXT_MAX else text[:RECORD_TEXT_MAX] + "..."
