"""Two machines on this one: network namespaces, joined by a wire that a test can cut. Needs root
and iproute2.

Each side has its own interfaces, addresses and sockets, so a cut wire affects real TCP: packets are
lost without notice. A link that is down, or a route that leads nowhere, is silence, as after a loss
of power, not a reset.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from types import TracebackType
from typing import Self

from tests import needs

__all__ = ["FAR", "NEAR", "TwoMachines"]

NEAR, FAR = "10.77.0.1", "10.77.0.2"

_numbers = itertools.count(1)


def ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


class TwoMachines:
    """Use as `with`.

    `near` and `far` are the names of the namespaces; `near_link` and `far_link` are their ends of
    the wire.
    """

    def __init__(self) -> None:
        needs.program("ip")
        number = f"{os.getpid() % 100_000}{next(_numbers)}"
        self.near, self.far = f"afn{number}", f"aff{number}"
        self.near_link, self.far_link = f"an{number}", f"af{number}"

    def __enter__(self) -> Self:
        try:
            for namespace in (self.near, self.far):
                try:
                    ip("netns", "add", namespace)
                except RuntimeError as error:
                    needs.missing(
                        "network namespaces",
                        f"run it as root, with the right to make them ({error})",
                    )
                ip("-n", namespace, "link", "set", "lo", "up")
            ip(
                "link",
                "add",
                self.near_link,
                "netns",
                self.near,
                "type",
                "veth",
                "peer",
                "name",
                self.far_link,
                "netns",
                self.far,
            )
            for namespace, link, address in (
                (self.near, self.near_link, NEAR),
                (self.far, self.far_link, FAR),
            ):
                ip("-n", namespace, "address", "add", f"{address}/24", "dev", link)
                ip("-n", namespace, "link", "set", link, "up")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for namespace in (self.near, self.far):  # The wire goes with them.
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)

    def cut(self) -> None:
        """Nothing crosses any more, in either direction, and neither side is told."""
        ip("-n", self.near, "link", "set", self.near_link, "down")

    def mend(self) -> None:
        ip("-n", self.near, "link", "set", self.near_link, "up")

    def lose_what_far_says(self) -> None:
        """Cuts one way: packets of `far` are lost, packets of `near` arrive."""
        ip("-n", self.far, "route", "add", "blackhole", f"{NEAR}/32")

    def hear_far_again(self) -> None:
        ip("-n", self.far, "route", "delete", "blackhole", f"{NEAR}/32")

    def cut_all_but(self, port: int) -> None:
        """Nothing crosses any more, in either direction, but connections to `port` and what
        comes back over them.
        """
        for namespace, other in ((self.near, FAR), (self.far, NEAR)):
            for number, side in ((10, "sport"), (11, "dport")):
                kept = ("ipproto", "tcp", side, str(port), "lookup", "main")
                ip("-n", namespace, "rule", "add", "pref", str(number), "to", other, *kept)
            ip("-n", namespace, "rule", "add", "pref", "12", "to", other, "blackhole")

    def join_all(self) -> None:
        for namespace in (self.near, self.far):
            for number in (10, 11, 12):
                ip("-n", namespace, "rule", "delete", "pref", str(number))

    def command(self, namespace: str, *argv: str) -> list[str]:
        """`argv` as run in one of the two."""
        return ["ip", "netns", "exec", namespace, *argv]
