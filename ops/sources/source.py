"""From what a person names to a folder that can be packed."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

from packer import adapter_config
from packer.peft import TENSORS_NAME

# what ``roost publish`` may call with a description, for a bar over (bytes done, bytes in all)
Bars = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]

CONFIG_NAME = adapter_config.NAME
MAX_CONFIG_BYTES = adapter_config.MAX_CONFIG_BYTES
# as much as the gateway takes unless it is told otherwise
MAX_TENSORS_BYTES = 64 << 30
# what is fetched, and how much of it at most
FILES = {CONFIG_NAME: MAX_CONFIG_BYTES, TENSORS_NAME: MAX_TENSORS_BYTES}

_URL_RE = re.compile(r"[a-z][a-z0-9+.-]*://")
_HUB_PREFIX = "hf:"


class Source(NamedTuple):
    """An adapter's folder, and what its revision's provenance says of where it came from."""

    folder: Path
    origin: str


@contextmanager
def opened(named: str, bars: Bars) -> Iterator[Source]:
    """The adapter that ``named`` means: a folder, an URL of one, or ``hf:ORGANISATION/NAME[@REVISION]``.

    What was fetched is removed with the block. Raises InvalidRequest, NotFound, TooLarge, ArtifactUnavailable.
    """
    remote = _URL_RE.match(named) is not None
    if not remote and not named.startswith(_HUB_PREFIX):
        yield Source(Path(named), Path(named).absolute().name)
        return
    with tempfile.TemporaryDirectory(prefix="roost-source-") as scratch:
        folder = Path(scratch) / "adapter"
        folder.mkdir(mode=0o700)
        # the clients of both are loaded where one is used
        if remote:
            from .bucket import fetch_from_url

            yield Source(folder, fetch_from_url(named, folder, bars))
        else:
            from .hub import fetch_from_hub

            yield Source(folder, fetch_from_hub(named.removeprefix(_HUB_PREFIX), folder, bars))
