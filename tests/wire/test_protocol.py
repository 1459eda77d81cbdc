"""PROTOCOL.md is complete: it has every kind of message once, with its sender, its time and its arrays."""

import re
from collections import Counter
from pathlib import Path

import daskps.wire
from daskps.wire.message import MessageKind
from daskps.wire.session import WAITS

PAGE = (Path(daskps.wire.__file__).parent / "PROTOCOL.md").read_text()


def test_the_page_has_every_kind_of_message_once_and_no_other() -> None:
    (section,) = re.findall(r"^## Kinds$(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    assert Counter(row[0].strip("`") for row in rows) == Counter(MessageKind)
    for kind, sender, when, *_ in rows:
        assert sender, kind
        assert when, kind


def test_a_wait_for_any_message_that_is_received_says_what_it_waits_for() -> None:
    handled = {MessageKind.PULL, MessageKind.PUSH, MessageKind.LOOKUP}  # the owner takes them from its queue
    control = {MessageKind.HELLO, MessageKind.ABORT}
    assert set(WAITS) == set(MessageKind) - handled - control
